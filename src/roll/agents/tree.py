"""Build one rollout from a session's calls: a prefix tree of the engine's contexts, cut into chains.

    call A: [context ][tokens]
    call B: [context ][tokens][environment][tokens]     B's context starts with all of A: B continues A
    call C: [context ][tokens][other      ][tokens]     so does C's, but B continues A: a fork, with a context of its
        own
    call D: [other context   ][tokens]                  starts with no call: a sub-agent, or a compacted history

A chain is a sequence of calls, each of which continues the one before; tokens in between are the environment's. Each
chain is trained once, after exactly the tokens that the engine saw before it (`Branch.context`).

Invariants:
    - every token that the model wrote is in exactly one chain, with its log-prob and policy version;
    - only tokens are compared: the origin of a context does not matter here;
    - the time is linear in the tokens of all contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from roll.data.expert_choices import experts_by_context
from roll.types import Branch, FinishReason, FloatArray, IntArray, PromptDraw, Rollout, Turn

__all__ = ["Call", "as_rollout", "chains", "main_chain"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One answer of the model."""

    context: IntArray
    """Token IDs of the engine's input, shape [C]."""
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
    def whole(self) -> IntArray:
        """All token IDs, shape [C + T]."""
        return np.concatenate([self.context, self.token_ids]).astype(np.int32, copy=False)


def chains(calls: Sequence[Call]) -> list[list[int]]:
    """Group calls, by their indices, into chains, in the order in which the chains ended.

    A call continues the longest earlier call with which its context starts. If several calls continue the same one, the
    first of them extends the chain; each other one starts a new chain.

    Args:
        calls: The calls, in the order in which they ended.
    """
    ends: dict[tuple[int, bytes], list[int]] = {}
    lengths: list[int] = []
    follows: dict[int, int] = {}
    taken: set[int] = set()
    for place, call in enumerate(calls):
        before = _longest(call.context, lengths, ends, taken)
        if before is not None:
            follows[place] = before
            taken.add(before)
        whole = call.whole
        ends.setdefault((len(whole), xxhash.xxh3_128_digest(whole.tobytes())), []).append(place)
        if len(whole) not in lengths:
            lengths.append(len(whole))
            lengths.sort()
    found: dict[int, list[int]] = {}
    for place in range(len(calls)):
        chain = found.pop(follows[place]) if place in follows else []
        found[place] = [*chain, place]  # ordered by last call: a chain that continues moves to the end
    return list(found.values())


def main_chain(calls: Sequence[Call]) -> list[int]:
    """Return the indices of the calls in the longest chain, in the order in which they ended.

    Titles, summaries and other requests outside an agent's own conversation are short chains. The longest chain has the
    most calls; ties are broken by the most tokens, contexts included, then by the latest end.

    Args:
        calls: The calls, in the order in which they ended, at least one.
    """
    return max(chains(calls), key=lambda chain: (len(chain), len(calls[chain[-1]].whole), chain[-1]))


def _longest(
    context: IntArray, lengths: Sequence[int], ends: dict[tuple[int, bytes], list[int]], taken: set[int]
) -> int | None:
    """Return the longest call that a context starts with, unless another call already continues it."""
    digest, done, best = xxhash.xxh3_128(), 0, None
    tokens = np.ascontiguousarray(context, np.int32)
    for length in lengths:
        if length > len(tokens):
            break
        digest.update(tokens[done:length].tobytes())
        done = length
        best = ends.get((length, digest.digest()), best)
    return next((place for place in best or () if place not in taken), None)


def as_rollout(draw: PromptDraw, index: int, calls: Sequence[Call], *, text: str, cut_off: bool = False) -> Rollout:
    """Return one rollout of all calls, without its reward.

    Args:
        draw: The rollout's prompt.
        index: The rollout's index within its group.
        calls: The calls, in the order in which they ended, at least one.
        text: The text for verifiers.
        cut_off: Whether the agent did not end by itself.
    """
    tokens: list[IntArray] = []
    logprobs: list[FloatArray] = []
    versions: list[IntArray] = []
    turns: list[Turn] = []
    branches: list[Branch] = []
    experts: list[tuple[int, IntArray | None]] = []
    position = 0
    for number, chain in enumerate(chains(calls)):
        first = calls[chain[0]]
        if number or not np.array_equal(first.context, draw.token_ids):
            branches.append(Branch(start=position, context=first.context))
        seen = len(first.context)
        for place in chain:
            call = calls[place]
            between = call.context[seen:]
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
        token_ids=np.concatenate(tokens).astype(np.int32, copy=False),
        logprobs=np.concatenate(logprobs).astype(np.float32, copy=False),
        policy_versions=np.concatenate(versions).astype(np.int32, copy=False),
        finish_reason="length" if cut_off or last.finish_reason == "length" else "stop",
        text=text,
        engine_id=last.engine_id,
        turns=tuple(turns),
        branches=tuple(branches),
    )
    return replace(found, experts=experts_by_context(found, experts))
