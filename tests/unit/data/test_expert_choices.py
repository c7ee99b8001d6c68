"""Which experts the engine chose comes to the samples, each token's first choice, context by context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roll.data.router_replay import merge_experts, merge_records
from roll.data.samples import build_samples
from roll.types import Branch, IntArray, Prompt, Rollout, Turn


def record(*choices: int) -> IntArray:
    """[L, 1, 1]"""
    return np.array(choices, np.int8)[:, None, None]


def test_router_replay_the_first_record_of_a_token_counts_and_later_ones_say_what_is_unknown() -> None:
    found = merge_records([record(1, 2, -1), None, record(3, 3, 3, 3, -1)], 5)
    assert found is not None and found.ravel().tolist() == [1, 2, 3, 3, -1] and found.dtype == np.int8
    assert merge_records([None, None], 3) is None
    shorter = merge_records([record(1, 2, 3)], 2)
    assert shorter is not None and shorter.ravel().tolist() == [1, 2]


def test_router_replay_a_rewritten_history_has_its_own_choices() -> None:
    """Two turns in the first context, then one in another; a request that made nothing says nothing."""
    rollout = Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid="a/0", domain="a", messages=()),
        prompt_token_ids=np.array([7, 8], np.int32),
        token_ids=np.arange(10, 16, dtype=np.int32),
        logprobs=np.zeros(6, np.float32),
        policy_versions=np.zeros(6, np.int32),
        finish_reason="stop",
        text="",
        turns=(Turn(start=0, end=2), Turn(start=3, end=4), Turn(start=4, end=6)),
        branches=(Branch(start=4, context=np.array([5], np.int32)),),
    )
    records = [(0, record(1, 1, 1, -1)), (3, record(2, 2, 2, 2, 2, -1)), (4, record(3, 3, -1))]
    found = merge_experts(rollout, records)
    assert [x.ravel().tolist() for x in found] == [[1, 1, 1, 2, 2, -1], [3, 3, -1]]
    first, second = build_samples(replace(rollout, experts=found))
    assert first.experts is found[0] and second.experts is found[1]
    assert len(first) == len(found[0]) and len(second) == len(found[1])
    assert merge_experts(rollout, [(0, None), (3, None), (4, None)]) == ()
    unknown = merge_experts(rollout, [records[0], (3, None), (4, None)])
    assert [x.ravel().tolist() for x in unknown] == [[1, 1, 1, -1, -1, -1], [-1, -1, -1]]
    changed = replace(rollout, experts=(found[1], found[0]))  # by a loop of the user's own, after it was recorded
    assert all(sample.experts is None for sample in build_samples(changed))
