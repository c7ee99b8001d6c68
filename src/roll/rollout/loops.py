"""Rollout loops: a single answer, or a conversation with an environment (`roll.rollout.episode`).

The model's answers are never rendered or tokenized again, so the trainer sees exactly the tokens that the engine
sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from roll.data.expert_choices import experts_by_context
from roll.errors import CallbackError, RollError, one_line_error, raised_at
from roll.types import Branch, Generation, GenerationRequest, IntArray, Message, PromptDraw, Rollout, Turn
from roll.user_code import check_call, load_function

__all__ = ["Generate", "Renderer", "RolloutLoop", "join_turns", "load_own_loop", "next_turn", "single_answer"]

Generate: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]


class Renderer(Protocol):
    """The methods of `ChatRenderer` that loops need; see its documentation for details."""

    @property
    def drops_tools(self) -> bool:
        """Whether the template drops the replies of tools."""
        ...

    def follow_up(self, observation: str) -> IntArray:
        """Return the ids from the end of an assistant message to the beginning of the next one."""
        ...

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of tokens, without special tokens."""
        ...

    def final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Return the text of an answer after the model's reasoning; empty if the reasoning never ends."""
        ...

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Render a conversation with the chat template, up to where the next answer begins."""
        ...

    def tokens(self, text: str) -> IntArray:
        """Return the token ids of a rendered text."""
        ...

    def escape_special_tokens(self, text: str) -> str:
        """Escape untrusted text so that it cannot end or begin a message."""
        ...

    def parse_answer(self, answer: IntArray, after: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """Return an answer's text, and whether a token outside that text ended the answer."""
        ...

    def suffix_ids(self, text: str, ended: bool) -> IntArray | None:
        """Return the ids of the text that the template appends to an answer; `None` if they are not separable from the
        answer's.
        """
        ...


class RolloutLoop(Protocol):
    """Makes one rollout, without its reward."""

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """Make one rollout; `first` is the first turn's request, whose sampling parameters hold for all turns."""
        ...


def load_own_loop(path: str | None) -> RolloutLoop | None:
    """Load the user's rollout loop; `None` if none is configured.

    Args:
        path: `rollout.loop` of the configuration.

    Raises:
        ConfigError: The loop cannot be imported, or does not accept its arguments.
    """
    if path is None:
        return None
    loop = load_function(path, "rollout loop")
    check_call(loop, f"rollout loop '{path}'", "draw", "index", "first", "generate", "renderer")

    async def made(
        draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        try:
            rollout = await loop(draw, index, first, generate, renderer)
        except RollError:
            raise
        except (Exception, SystemExit) as error:
            place, what = raised_at(error), one_line_error(error)
            raise CallbackError(f"rollout loop '{path}' failed at {place}: {what}") from error
        if not isinstance(rollout, Rollout):
            raise CallbackError(f"rollout loop '{path}' returned {type(rollout).__name__}, not a Rollout.")
        return rollout

    return made


async def single_answer(
    draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """Generate one answer to the prompt."""
    generation = await generate(first)
    return join_turns(draw, index, [generation], [], (), renderer)


def next_turn(
    first: GenerationRequest, context: IntArray, turn: int, max_new_tokens: int | None = None
) -> GenerationRequest:
    """Return the request of a turn, with an id and a seed of its own; the seed depends only on that of the first turn.

    Args:
        first: Request of the rollout's first turn.
        context: Context of the turn, shape [C].
        turn: Number of the turn, from 0.
        max_new_tokens: Token limit of the turn; by default that of the first turn.
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


def join_turns(
    draw: PromptDraw,
    index: int,
    generations: list[Generation],
    between: list[IntArray],
    turns: tuple[Turn, ...],
    renderer: Renderer,
    branches: tuple[Branch, ...] = (),
) -> Rollout:
    """Join all turns into one rollout; the environment's tokens have log-prob 0 and policy version -1.

    The arrays of a single generation are not copied.
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
    token_ids = _join_arrays(tokens, np.int32)
    text = renderer.decode(token_ids)
    found = Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        prompt_media=draw.media,
        token_ids=token_ids,
        logprobs=_join_arrays(logprobs, np.float32),
        policy_versions=_join_arrays(versions, np.int32),
        finish_reason=generations[-1].finish_reason,
        text=draw.prompt.prefill + text,
        # for an answer that the prompt begins (prefill), the reasoning tags in the whole text decide
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
        prompt: Tokens before the first turn, shape [P].
        parts: Tokens of the turns, alternating with the tokens between turns.
        branches: Branches at which a turn follows another context.
        text: Text of the whole rollout.
        renderer: Converts tokens to text.
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


def _join_arrays(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype(dtype, copy=False)
