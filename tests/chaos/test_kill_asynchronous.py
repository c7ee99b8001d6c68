"""A run in which generation runs ahead, killed and resumed: every draw is trained exactly once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run, tiny_config

from roll.pipelines.checkpoint_files import read_checkpoint
from roll.pipelines.learning.state import LearningState

NUM_STEPS = 6


def asynchronous(model: Path, scheduling: dict[str, Any], pipeline: str = "rlvr") -> dict[str, Any]:
    config = tiny_config(model, num_steps=NUM_STEPS) | {"pipeline": pipeline}
    config["checkpoint"]["every_num_steps"] = 1
    config["rollout"]["scheduling"] = scheduling
    return config


def drawn_for_training(run: Run) -> Counter[int]:
    """How many steps recorded rollouts of each draw."""
    from pyarrow import parquet

    found: Counter[int] = Counter()
    for path in (run.path / "rollouts").glob("step-*.parquet"):
        found.update(set(parquet.read_table(path, columns=["draw_id"]).to_pydict()["draw_id"]))
    return found


def kill_and_check(
    directory: Path, model: Path, scheduling: dict[str, Any], seed: int, duration: float | None, pipeline: str = "rlvr"
) -> int:
    """Kill a run some times, let it end, and account for every draw; returns the number of kills.

    Without a duration of the run, a kill comes soon after a new checkpoint.
    """
    rng = random.Random(seed)
    run = Run(directory, asynchronous(model, scheduling, pipeline))
    kills = 0
    for _ in range(rng.choice([1, 2, 3])):
        if duration is None:
            kills += run.kill_after_a_checkpoint(rng.uniform(0.0, 0.1))
        else:
            kills += run.kill_after(rng.uniform(0.4, 1.0) * duration)
    run.finish()
    entries = run.ledger()
    assert [entry["draw_id"] for entry in entries] == list(range(len(entries)))
    used = [entry for entry in entries if entry["outcome"] in ("trained", "filtered")]
    assert len(used) == 3 * NUM_STEPS
    assert Counter(entry["step"] for entry in used) == dict.fromkeys(range(1, NUM_STEPS + 1), 3)
    assert drawn_for_training(run) == {entry["draw_id"]: 1 for entry in used}
    waiting = [entry["draw_id"] for entry in entries if entry["outcome"] == "in_flight"]
    assert [draw[0] for draw in read_checkpoint(run.checkpoint(), LearningState).state.pending] == waiting
    return kills


AHEAD: dict[str, Any] = {"async_ratio": 1.0}
TAILS: dict[str, Any] = {"type": "tail_batching"}


@pytest.mark.parametrize("pipeline", ["rlvr", "preference_online", "rejection_sampling"])
def test_resume_after_kill_async_every_draw_is_used_exactly_once_after_a_kill(
    tmp_path: Path, tiny_model: Path, pipeline: str
) -> None:
    assert kill_and_check(tmp_path / "run", tiny_model, AHEAD, 4, None, pipeline)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_resume_after_kill_async_fifteen_kills_at_random_moments(tmp_path: Path, tiny_model: Path) -> None:
    kills = seed = 0
    duration = Run(tmp_path / "reference", asynchronous(tiny_model, AHEAD)).finish()
    while kills < 15:
        scheduling = TAILS if seed % 3 == 2 else AHEAD | {"async_ratio": [0.5, 2.0][seed % 2]}
        found = kill_and_check(tmp_path / str(seed), tiny_model, scheduling, 100 + seed, duration)
        kills += found
        if not found:  # it ended first: the reference was slow, so the next kills come earlier
            duration *= 0.8
        seed += 1
