"""One batch split into several updates: the synchronous run that asynchronous ones are compared with."""

from __future__ import annotations

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate

BASE = SimulationConfig.model_validate(
    {
        "name": "split",
        "num_steps": 2,
        "model": "qwen2.5-7b",
        "device": "h800",
        "placement": {"generation": 4},
        "rollout": {"prompts_per_step": 10, "group_size": 2, "max_new_tokens": 64},
        "answer_tokens": {"type": "uniform", "low": 8, "high": 64},
        "training": {"duration": {"type": "fixed", "value": 10}, "sync_s": 5, "overhead_s": 2},
    }
)


def test_simulation_equal_staleness_a_split_batch_counts_by_update() -> None:
    whole = simulate(BASE, seed=1).steps
    split = simulate(BASE.with_changes({"training.num_updates": 5}), seed=1).steps
    for one, parts in zip(whole, split, strict=True):
        assert parts.num_samples * 5 == one.num_samples == 20
        assert abs(parts.num_tokens - one.num_tokens / 5) < 1
        assert (one.max_staleness, parts.max_staleness) == (0, 4)
        assert (one.train_s, round(parts.train_s, 9)) == (10, 3.6)  # (10 + 4 x 2) / 5
        assert abs(parts.wait_s * 5 - one.wait_s) < 1e-9
        assert round(parts.sync_s, 9) == 1
