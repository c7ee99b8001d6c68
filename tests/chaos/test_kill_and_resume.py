"""A run that was killed and resumed equals one that never was: bit for bit, every draw trained once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from chaos.harness import Run, tiny_config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Run, float]:
    """The reference run and its duration."""
    run = Run(tmp_path_factory.mktemp("runs") / "reference", tiny_config(tiny_model))
    return run, run.finish()


def assert_equal(run: Run, reference: Run) -> None:
    assert run.metrics() == reference.metrics()
    assert run.rollouts() == reference.rollouts()
    assert run.ledger() == reference.ledger()
    ours, theirs = (r.checkpoint() / "model" / "model.safetensors" for r in (run, reference))
    assert ours.read_bytes() == theirs.read_bytes()


def kill_and_compare(directory: Path, tiny_model: Path, reference: tuple[Run, float], seed: int) -> int:
    """Kill a run once or several times at random moments, let it end, compare; returns the number of kills."""
    rng = random.Random(seed)
    run = Run(directory, tiny_config(tiny_model))
    kills = sum(run.kill_after(rng.uniform(0.2, 1.0) * reference[1]) for _ in range(rng.choice([1, 1, 2, 3])))
    run.finish()
    assert_equal(run, reference[0])
    return kills


def test_resume_after_kill_the_reference_run_trains_and_settles_every_draw(uninterrupted: tuple[Run, float]) -> None:
    run, _ = uninterrupted
    steps = [row for row in run.metrics() if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(row.get("training/stepped") or 0 for row in steps) >= 4
    outcomes = Counter(entry["outcome"] for entry in run.ledger())
    assert outcomes["trained"] + outcomes["filtered"] == 18
    assert outcomes["in_flight"] == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_resume_after_kill_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, uninterrupted: tuple[Run, float], seed: int
) -> None:
    kill_and_compare(tmp_path / "run", tiny_model, uninterrupted, seed)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_resume_after_kill_fifty_kills_at_random_moments(
    tmp_path: Path, tiny_model: Path, uninterrupted: tuple[Run, float]
) -> None:
    kills = seed = 0
    while kills < 50:
        kills += kill_and_compare(tmp_path / str(seed), tiny_model, uninterrupted, 1000 + seed)
        seed += 1


@pytest.mark.chaos
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_resume_after_kill_with_vllm_every_draw_is_trained_exactly_once(tmp_path: Path, servable_model: Path) -> None:
    reference = Run(tmp_path / "reference", tiny_config(servable_model, engine="vllm"))
    duration = reference.finish()
    rng = random.Random(7)
    run = Run(tmp_path / "run", tiny_config(servable_model, engine="vllm"))
    for _ in range(3):
        run.kill_after(rng.uniform(0.5, 1.0) * duration)
    run.finish()
    entries = run.ledger()
    assert [e["draw_id"] for e in entries] == list(range(18))
    assert [e["uid"] for e in entries] == [e["uid"] for e in reference.ledger()]
    assert {e["outcome"] for e in entries} <= {"trained", "filtered"}
    trained = [name for name in run.rollouts() if name.startswith("step-")]
    assert trained == [f"step-{step:06d}.parquet" for step in range(1, 7)]
