"""Builds one rollout from a session's calls: a prefix tree of the engine's contexts, split into chains.

    call A: [context ][tokens]
    call B: [context ][tokens][environment][tokens]     B's context starts with all of A: B continues A
    call C: [context ][tokens][other      ][tokens]     C's context does, too, but B already continues A: a new chain
    call D: [other context   ][tokens]                  D's context starts with no call: a sub-agent, or a compacted
                                                        history

A chain is a sequence of calls, each of which continues the one before; the tokens in between come from the
environment. Each chain is trained once, with exactly the context that the engine had before it (`Branch.context`).

Invariants:
    - every token that the model wrote is in exactly one chain, with its log-prob and policy version;
    - calls are compared by their tokens and images;
    - the time is linear in the tokens of all contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from roll.data.router_replay import merge_experts
from roll.types import (
    Branch,
    FinishReason,
    FloatArray,
    IntArray,
    MediaSpan,
    PromptDraw,
    Rollout,
    Turn,
    build_sequence_key,
    slice_media,
)

__all__ = ["ModelCall", "build_rollout", "find_main_chain", "group_chains"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelCall:
    """One generation: the engine's input, and the tokens that the agent received."""

    context: IntArray
    """Token IDs of the engine's input, shape [C]."""
    media: tuple[MediaSpan, ...] = ()
    """Spans of the images in the context."""
    token_ids: IntArray
    """Generated token IDs that the agent received, shape [T]."""
    logprobs: FloatArray
    """Log-probs of the generated tokens, shape [T]."""
    policy_versions: IntArray
    """Policy versions of the generated tokens, shape [T]."""
    finish_reason: FinishReason
    engine_id: str = ""
    experts: IntArray | None = None
    """Expert IDs as in `Generation.experts`, shape [C + T, layers, k]."""

    @property
    def all_token_ids(self) -> IntArray:
        """All token IDs, shape [C + T]."""
        return np.concatenate([self.context, self.token_ids]).astype(np.int32, copy=False)

    @property
    def keys(self) -> NDArray[Any]:
        """Integer keys of all tokens and images, shape [C + T]; equal tokens have equal keys (`build_sequence_key`)."""
        return build_sequence_key(self.all_token_ids, self.media).astype(np.int64)


def group_chains(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Group the indices of calls into chains; the chains are in the order in which they ended.

    A call continues the longest earlier call that is a prefix of its context. If several calls continue the same call,
    the first one extends the chain, and each later one starts a new chain.

    Args:
        calls: The calls, in the order in which they ended.
    """
    # Calls are looked up by length and hash: each context is hashed once, up to every known length. So the time is
    # linear in the tokens instead of quadratic in the calls.
    ends: dict[tuple[int, bytes], list[int]] = {}
    lengths: list[int] = []
    follows: dict[int, int] = {}
    continued_calls: set[int] = set()
    for place, call in enumerate(calls):
        keys = call.keys
        before = _find_longest_prefix(keys[: len(call.context)], lengths, ends, continued_calls)
        if before is not None:
            follows[place] = before
            continued_calls.add(before)
        ends.setdefault((len(keys), xxhash.xxh3_128_digest(keys.tobytes())), []).append(place)
        if len(keys) not in lengths:
            lengths.append(len(keys))
            lengths.sort()
    found: dict[int, list[int]] = {}
    for place in range(len(calls)):
        chain = found.pop(follows[place]) if place in follows else []
        found[place] = [*chain, place]  # ordered by last call: a chain that continues moves to the end
    return list(found.values())


def find_main_chain(calls: Sequence[ModelCall]) -> list[int]:
    """Return the indices of the calls in the longest chain, in the order in which they ended.

    Titles, summaries and other requests outside an agent's conversation are short chains. The longest chain has the
    most calls; ties are broken by the number of tokens, including the context, then by the latest end.

    Args:
        calls: The calls in the order in which they ended; there must be at least one.
    """
    return max(group_chains(calls), key=lambda chain: (len(chain), len(calls[chain[-1]].all_token_ids), chain[-1]))


def _find_longest_prefix(
    context: NDArray[Any], lengths: Sequence[int], ends: dict[tuple[int, bytes], list[int]], continued_calls: set[int]
) -> int | None:
    """Return the index of the longest earlier call (context and answer) that is a prefix of `context`.

    The result is `None` if no call is a prefix, or if another call already continues the longest one.

    Args:
        context: Keys of the tokens and images of the new call's input, shape [C].
        lengths: The lengths of all earlier calls, ascending.
        ends: Indices of the earlier calls, by the length and the digest of their tokens.
        continued_calls: Indices of the calls that already have a continuation.
    """
    digest, done, best = xxhash.xxh3_128(), 0, None
    tokens = np.ascontiguousarray(context)
    for length in lengths:
        if length > len(tokens):
            break
        digest.update(tokens[done:length].tobytes())
        done = length
        best = ends.get((length, digest.digest()), best)
    return next((place for place in best or () if place not in continued_calls), None)


def build_rollout(
    draw: PromptDraw, index: int, calls: Sequence[ModelCall], *, text: str, cut_off: bool = False
) -> Rollout:
    """Build one rollout from all calls, without a reward.

    Args:
        draw: The rollout's prompt.
        index: The rollout's index within its group.
        calls: The calls in the order in which they ended; there must be at least one.
        text: The final text, for verifiers.
        cut_off: Whether the agent was stopped before it finished.
    """
    tokens: list[IntArray] = []
    logprobs: list[FloatArray] = []
    versions: list[IntArray] = []
    turns: list[Turn] = []
    branches: list[Branch] = []
    experts: list[tuple[int, IntArray | None]] = []
    media: list[MediaSpan] = []
    position = 0
    for number, chain in enumerate(group_chains(calls)):
        first = calls[chain[0]]
        if number or not np.array_equal(first.context, draw.token_ids) or first.media != draw.media:
            branches.append(Branch(start=position, context=first.context, media=first.media))
        seen = len(first.context)
        for place in chain:
            call = calls[place]
            between = call.context[seen:]
            media += slice_media(call.media, seen, len(call.context), position)
            seen = len(call.context) + len(call.token_ids)
            tokens += [between, call.token_ids]
            logprobs += [np.zeros(len(between), np.float32), call.logprobs]
            versions += [np.full(len(between), -1, np.int32), call.policy_versions]
            begin = position + len(between)
            experts.append((begin, call.experts))
            position = begin + len(call.token_ids)
            turns.append(Turn(start=begin, end=position))
    last = calls[-1]
    found = Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        prompt_media=draw.media,
        media=tuple(media),
        token_ids=np.concatenate(tokens).astype(np.int32, copy=False),
        logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        policy_versions=np.concatenate(versions).astype(np.int32, copy=False),
        finish_reason="length" if cut_off or last.finish_reason == "length" else "stop",
        text=text,
        engine_id=last.engine_id,
        turns=tuple(turns),
        branches=tuple(branches),
    )
    return replace(found, experts=merge_experts(found, experts))
