"""What a choice left out, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roll.rollout.selection_bias import SelectionBias


def rollout(index: int, reward: float, length: int) -> Any:
    return SimpleNamespace(index=index, reward=SimpleNamespace(value=reward), token_ids=[0] * length)


def group(scored: list[Any], chosen: list[int], num_stopped: int) -> Any:
    """`scored` in the order in which they finished."""
    taken = tuple(r for r in scored if r.index in chosen)
    return SimpleNamespace(
        group=SimpleNamespace(scored_rollouts=taken), scored_rollouts=scored, num_stopped=num_stopped
    )


def test_selection_bias_means_of_what_counts_of_what_finished_and_of_what_was_launched() -> None:
    census = SelectionBias()
    census.add(group([rollout(3, 0.0, 10), rollout(0, 1.0, 30), rollout(1, 1.0, 50)], [3, 0], 2), is_counted=True)
    census.add(group([rollout(0, 0.5, 20)], [0], 3), is_counted=False)  # a group that the step does not get
    assert census.compute_metrics() == pytest.approx(
        {
            "selection/reward_counted": 0.5,  # 0 and 1
            "selection/reward_finished": 0.625,  # these, 1 and 0.5
            "selection/length_counted": 20,
            "selection/length_finished": 27.5,
            "selection/reward_launched": 0.8,  # 0, 1, 1, and twice 1 for what was stopped
            "selection/length_launched": 30,  # (10 + 30 + 50 + 2 * 30) / 5
            "selection/unused_share": 2 / 9,  # of 4 that finished and 5 that were stopped
            "selection/stopped_share": 5 / 9,
        }
    )


def test_selection_bias_a_step_that_got_no_group_counts_nothing() -> None:
    census = SelectionBias()
    census.add(group([rollout(0, 1.0, 5)], [0], 1), is_counted=False)
    assert (census.compute_metrics(), census.num_stopped, len(census.unused)) == ({}, 1, 1)
