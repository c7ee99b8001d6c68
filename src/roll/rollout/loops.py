"""How one rollout comes about: a single answer, or a conversation with an environment (`roll.rollout.episode`).

What the model wrote is never rendered or tokenised again, so the trainer sees exactly what the engine did.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from roll.data.expert_choices import experts_by_context
from roll.types import Branch, Generation, GenerationRequest, IntArray, Message, PromptDraw, Rollout, Turn
from roll.user_code import check_call, load_function

__all__ = ["Generate", "Renderer", "RolloutLoop", "joined", "next_turn", "own_loop", "single_answer"]

Generate: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]


class Renderer(Protocol):
    """What loops need of `ChatRenderer`, which says more of each."""

    @property
    def drops_tools(self) -> bool:
        """Whether the template leaves out what a tool says."""
        ...

    def follow_up(self, observation: str) -> IntArray:
        """Ids from the end of the assistant's message to where its next one begins."""
        ...

    def decode(self, token_ids: IntArray) -> str:
        """The text of tokens, without special ones."""
        ...

    def final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Return what an answer says after the model's reasoning; empty where that never ends."""
        ...

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """A conversation as the template writes it, up to where the next answer begins."""
        ...

    def tokens(self, text: str) -> IntArray:
        """Ids of such a text."""
        ...

    def harmless(self, text: str) -> str:
        """Text of others, unable to end a message or to begin one."""
        ...

    def written(self, answer: IntArray, after: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """An answer's text, and whether a token that is not in it ended it."""
        ...

    def following(self, text: str, ended: bool) -> IntArray | None:
        """Ids of what the template puts behind an answer; `None` where they cannot be told from the answer's."""
        ...


class RolloutLoop(Protocol):
    """Makes one rollout, without its reward."""

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """`first` is the request for the first turn; its sampling holds for all turns."""
        ...


def own_loop(path: str | None) -> RolloutLoop | None:
    """Return the user's own way to make a rollout, where there is one.

    Args:
        path: `rollout.loop` of the configuration.

    Raises:
        ConfigError: it cannot be imported, or does not take its arguments.
    """
    if path is None:
        return None
    loop = load_function(path, "rollout loop")
    check_call(loop, f"rollout loop '{path}'", "draw", "index", "first", "generate", "renderer")
    return cast(RolloutLoop, loop)


async def single_answer(
    draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """One answer to the prompt."""
    generation = await generate(first)
    return joined(draw, index, [generation], [], (), renderer)


def next_turn(
    first: GenerationRequest, context: IntArray, turn: int, max_new_tokens: int | None = None
) -> GenerationRequest:
    """The request of a turn: its own id, and its own seed, which depends on the first one's alone.

    Args:
        first: the request of the rollout's first turn.
        context: [C] that the turn follows.
        turn: its number, from 0.
        max_new_tokens: where they are others than the first one's.
    """
    sampling = first.sampling
    seed = sampling.seed if sampling.seed is None or turn == 0 else (sampling.seed + 0x9E3779B1 * turn) % 2**31
    most = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
    return replace(
        first,
        request_id=f"{first.request_id}.t{turn}" if turn else first.request_id,
        token_ids=context,
        sampling=replace(sampling, seed=seed, max_new_tokens=most),
    )


def joined(
    draw: PromptDraw,
    index: int,
    generations: list[Generation],
    between: list[IntArray],
    turns: tuple[Turn, ...],
    renderer: Renderer,
    branches: tuple[Branch, ...] = (),
) -> Rollout:
    """All turns as one sequence; the environment's tokens have log-prob 0 and policy version -1.

    A single generation's arrays are used as they are.
    """
    tokens: list[IntArray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    experts: list[tuple[int, IntArray | None]] = []
    for position, generation in enumerate(generations):
        experts.append((sum(map(len, tokens)), generation.experts))
        tokens.append(generation.token_ids)
        logprobs.append(generation.logprobs)
        versions.append(generation.policy_versions)
        if position < len(between):
            tokens.append(between[position])
            logprobs.append(np.zeros(len(between[position]), np.float32))
            versions.append(np.full(len(between[position]), -1, np.int32))
    token_ids = _joined_array(tokens, np.int32)
    text = renderer.decode(token_ids)
    found = Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        prompt_media=draw.media,
        token_ids=token_ids,
        logprobs=_joined_array(logprobs, np.float32),
        policy_versions=_joined_array(versions, np.int32),
        finish_reason=generations[-1].finish_reason,
        text=draw.prompt.prefill + text,
        # of an answer that the prompt begins, the marks of reasoning in the whole text decide
        final_text=None if draw.prompt.prefill else _final_text(draw.token_ids, tokens, branches, text, renderer),
        engine_id=generations[-1].engine_id,
        turns=turns,
        branches=branches,
    )
    return replace(found, experts=experts_by_context(found, experts))


def _final_text(
    prompt: IntArray, parts: Sequence[IntArray], branches: Sequence[Branch], text: str, renderer: Renderer
) -> str:
    """Return the rollout's text without the reasoning of its turns.

    Args:
        prompt: [P] before the first turn.
        parts: tokens of the turns, in turn with those between them.
        branches: where turns follow another context.
        text: the whole.
        renderer: tokens to text.
    """
    contexts = {branch.start: branch.context for branch in branches}
    if len(parts) == 1:
        final = renderer.final_text(parts[0], contexts.get(0, prompt))
        return text if final == text else final
    finals: list[str] = []
    position, before, changed = 0, prompt, False
    for number, part in enumerate(parts):
        said = renderer.decode(part)
        if number % 2 == 0:
            final = renderer.final_text(part, contexts.get(position, before))
            said, changed = final, changed or final != said
        finals.append(said)
        position, before = position + len(part), part if len(part) else before
    return "".join(finals) if changed else text


def _joined_array(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype(dtype, copy=False)
