"""Policies that contradict each other are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from roll.config.scheduling import SchedulingConfig


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"type": "tail_batching", "async_ratio": 1.0, "stale_policy": "drop"}, "set stale_policy to wait"),
        ({"type": "batch", "async_ratio": 0.5}, "`type: batch` requires async_ratio 0"),
        ({"async_ratio": 1.0, "prompt_redundancy": 1.5}, "steps do not wait for slow prompts"),
        ({"type": "tail_batching", "prompt_redundancy": 1.0}, "requires redundant prompts"),
        ({"type": "tail_batching", "choose": "launch_order"}, "remove `choose`"),
        ({"type": "tail_batching", "leftovers": "drop"}, "requires `leftovers: defer`"),
        ({"type": "batch", "prompt_redundancy": 2.0}, "redundancy is not supported with `type: batch`"),
        ({"prompt_redundancy": 0.5}, "greater than or equal to 1"),
        ({"async_ratio": -1.0}, "greater than or equal to 0"),
        ({"reward_range": (1.0, 0.0)}, "must be .lowest, highest."),
    ],
)
def test_config_scheduling_contradictions_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SchedulingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "wanted", "prompts"),
    [
        ({}, 8, 8),
        ({"prompt_redundancy": 3.0}, 8, 24),  # 8 prompts and 16 redundant ones
        ({"prompt_redundancy": 1.1}, 10, 11),  # not 12, although 1.1 * 10 is above 11 in binary
        ({"type": "tail_batching"}, 128, 160),  # RollPacker's 1.25
        ({"type": "tail_batching", "prompt_redundancy": 1.5}, 128, 192),
    ],
)
def test_config_scheduling_redundancy_is_rounded_up_to_whole_prompts(
    settings: dict[str, Any], wanted: int, prompts: int
) -> None:
    assert SchedulingConfig(**settings).compute_num_prompts(wanted) == prompts


@pytest.mark.parametrize(("ratio", "bound"), [(0.0, 0), (0.25, 1), (1.0, 1), (1.5, 2), (8.0, 8)])
def test_config_scheduling_the_staleness_bound_is_the_ratio_rounded_up(ratio: float, bound: int) -> None:
    assert SchedulingConfig(async_ratio=ratio).max_staleness == bound
