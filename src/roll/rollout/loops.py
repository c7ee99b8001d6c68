"""Rollout loops: a single answer, or a conversation with an environment (`roll.rollout.episode`).

The model's answers are never rendered or tokenized again, so the trainer sees exactly the tokens that the engine
sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from roll.data.router_replay import merge_experts
from roll.errors import CallbackError, RollError, find_raise_location, one_line_error
from roll.types import (
    Branch,
    EncodedText,
    Generation,
    GenerationRequest,
    IntArray,
    MediaSpan,
    Message,
    PromptDraw,
    Rollout,
    Turn,
)
from roll.user_code import check_call, load_function

__all__ = [
    "Generate",
    "Renderer",
    "RolloutLoop",
    "build_next_request",
    "generate_single_answer",
    "join_turns",
    "load_user_loop",
]

Generate: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]


class Renderer(Protocol):
    """The methods of `ChatRenderer` that rollout loops need; see that class for details."""

    @property
    def drops_tool_results(self) -> bool:
        """True if the template drops tool messages, which contain the replies of tools."""
        ...

    def tokenize_follow_up(self, observation: str) -> IntArray:
        """Return the token ids from the end of an assistant message, over an observation, to the start of the next
        answer.
        """
        ...

    def decode(self, token_ids: IntArray) -> str:
        """Decode tokens to text, without special tokens."""
        ...

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        """Return the text of an answer after the model's reasoning; empty if the reasoning never ends."""
        ...

    def render_text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Render a conversation with the chat template, up to the start of the next answer."""
        ...

    def encode(self, text: str) -> EncodedText:
        """Return the token ids of rendered text, with the spans of its images."""
        ...

    def escape_special_tokens(self, text: str) -> str:
        """Escape special tokens in untrusted text, so that it cannot end or begin a message."""
        ...

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """Return an answer's text without its end token, and whether the answer has an end token."""
        ...

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        """Encode the text that the template appends to an answer; `None` if it cannot be tokenized separately."""
        ...


class RolloutLoop(Protocol):
    """Generates one rollout, without its reward."""

    async def __call__(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """Generate one rollout; the sampling parameters of `first_request` apply to all turns."""
        ...


def load_user_loop(path: str | None) -> RolloutLoop | None:
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

    async def run_loop(
        draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        try:
            rollout = await loop(draw, index, first_request, generate, renderer)
        except RollError:
            raise
        except (Exception, SystemExit) as error:
            place, cause = find_raise_location(error), one_line_error(error)
            raise CallbackError(f"rollout loop '{path}' failed at {place}: {cause}") from error
        if not isinstance(rollout, Rollout):
            raise CallbackError(f"rollout loop '{path}' must return a Rollout, got {type(rollout).__name__}.")
        return rollout

    return run_loop


async def generate_single_answer(
    draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """Generate one answer to the prompt."""
    generation = await generate(first_request)
    return join_turns(draw, index, [generation], [], (), renderer)


def build_next_request(
    first_request: GenerationRequest,
    context: IntArray,
    turn: int,
    max_new_tokens: int | None = None,
    media: tuple[MediaSpan, ...] = (),
) -> GenerationRequest:
    """Return the request of a turn, with a unique id and a seed derived from the seed of the first turn.

    Args:
        first_request: Request of the rollout's first turn.
        context: Context of the turn, shape [C].
        turn: Index of the turn.
        max_new_tokens: Token limit of the turn; by default the limit of the first turn.
        media: Media spans in the context.
    """
    sampling = first_request.sampling
    # An odd multiplier (2^32 / golden ratio) keeps the seeds of turns different from the seeds of other rollouts.
    seed = sampling.seed if sampling.seed is None or turn == 0 else (sampling.seed + 0x9E3779B1 * turn) % 2**31
    most = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
    return replace(
        first_request,
        request_id=f"{first_request.request_id}.t{turn}" if turn else first_request.request_id,
        token_ids=context,
        media=media,
        sampling=replace(sampling, seed=seed, max_new_tokens=most),
    )


def join_turns(
    draw: PromptDraw,
    index: int,
    generations: list[Generation],
    inter_turn_tokens: list[IntArray],
    turns: tuple[Turn, ...],
    renderer: Renderer,
    branches: tuple[Branch, ...] = (),
    media: tuple[MediaSpan, ...] = (),
) -> Rollout:
    """Join all turns into one rollout; tokens of the environment have log-prob 0 and policy version -1.

    `media` contains the media spans between turns, with positions in the rollout's tokens.
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
        if position < len(inter_turn_tokens):
            tokens.append(inter_turn_tokens[position])
            logprobs.append(np.zeros(len(inter_turn_tokens[position]), np.float32))
            versions.append(np.full(len(inter_turn_tokens[position]), -1, np.int32))
    token_ids = _join_arrays(tokens, np.int32)
    text = renderer.decode(token_ids)
    rollout = Rollout(
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
        # if the prompt begins the answer (prefill), the reasoning tags in the whole text decide
        final_text=None if draw.prompt.prefill else _build_final_text(draw.token_ids, tokens, branches, text, renderer),
        engine_id=generations[-1].engine_id,
        turns=turns,
        branches=branches,
        media=media,
    )
    return replace(rollout, experts=merge_experts(rollout, experts))


def _build_final_text(
    prompt: IntArray, parts: Sequence[IntArray], branches: Sequence[Branch], text: str, renderer: Renderer
) -> str:
    """Return the rollout's text without the reasoning of its turns.

    Args:
        prompt: Tokens before the first turn, shape [P].
        parts: Tokens of the turns, alternating with the tokens between turns.
        branches: Branches at which a turn follows a different context.
        text: Text of the complete rollout.
        renderer: Converts tokens to text.
    """
    contexts = {branch.start: branch.context for branch in branches}
    if len(parts) == 1:
        final = renderer.decode_final_text(parts[0], contexts.get(0, prompt))
        return text if final == text else final
    finals: list[str] = []
    position, before, changed = 0, prompt, False
    for number, part in enumerate(parts):
        decoded = renderer.decode(part)
        if number % 2 == 0:  # a turn of the model; the other parts are from the environment
            final = renderer.decode_final_text(part, contexts.get(position, before))
            decoded, changed = final, changed or final != decoded
        finals.append(decoded)
        position, before = position + len(part), part if len(part) else before
    return "".join(finals) if changed else text


def _join_arrays(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)  # a single answer is not copied
    return whole.astype(dtype, copy=False)
