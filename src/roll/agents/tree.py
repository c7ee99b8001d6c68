"""From the calls of a session to one rollout: a prefix tree of what the engine saw, cut into chains.

    call A: [context ][tokens]
    call B: [context ][tokens][environment][tokens]     B's context begins with all of A: B goes on where A ended
    call C: [context ][tokens][other      ][tokens]     so does C's, and A is taken: a fork, with a context of its own
    call D: [other context   ][tokens]                  begins with no call: a sub-agent, or a compacted history

A chain is a run of calls each of which goes on where the one before ended; what came between is the environment's. Each
chain is trained once, after exactly the tokens that the engine saw before it (`Branch.context`).

Invariants:
    - every token that the model wrote is in exactly one chain, with its log-prob and policy version;
    - nothing is compared but tokens: how a context came about does not matter here;
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
    """[C] what the engine was given."""
    token_ids: IntArray
    """[T] what it wrote, as far as the agent received it."""
    logprobs: FloatArray
    """[T]"""
    policy_versions: IntArray
    """[T]"""
    finish_reason: FinishReason
    engine_id: str = ""
    experts: IntArray | None = None
    """[C + T, layers, k] as `Generation.experts`."""

    @property
    def whole(self) -> IntArray:
        """[C + T]"""
        return np.concatenate([self.context, self.token_ids]).astype(np.int32, copy=False)


def chains(calls: Sequence[Call]) -> list[list[int]]:
    """Group calls, by their places, into chains, which are in the order in which they ended.

    A call goes on where the longest earlier one ended that its context begins with. Of several calls that go on where
    one ended, the first one continues the chain; each other begins its own.

    Args:
        calls: in the order in which they ended.
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
        found[place] = [*chain, place]  # by their last call: a chain that goes on moves behind those that do not
    return list(found.values())


def main_chain(calls: Sequence[Call]) -> list[int]:
    """Return the places of the calls in the longest chain, in the order in which they ended.

    Titles, summaries and other requests beside an agent's own conversation are chains of few calls. The longest chain
    has the most calls; of several such, the most tokens, contexts included; of several such, it ended last.

    Args:
        calls: in the order in which they ended, at least one.
    """
    return max(chains(calls), key=lambda chain: (len(chain), len(calls[chain[-1]].whole), chain[-1]))


def _longest(
    context: IntArray, lengths: Sequence[int], ends: dict[tuple[int, bytes], list[int]], taken: set[int]
) -> int | None:
    """Return the longest call with which a context begins, unless another one went on there."""
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
        draw: its prompt.
        index: within its group.
        calls: in the order in which they ended, at least one.
        text: what verifiers read.
        cut_off: the agent did not end by itself.
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
