"""Runs that learn from fresh rollouts without an algorithm, killed and resumed: bit for bit as if they never were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run, tiny_config
from worlds.tiny_model import write_tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "distill": {"pipeline": "distill", "distillation": {"reward_weight": 0.5}},
    "distill_reward": {"pipeline": "distill", "distillation": {"mode": "reward"}},
    "preference_online": {"pipeline": "preference_online"},
    "rejection_sampling": {"pipeline": "rejection_sampling"},
}


def configuration(name: str, model: Path, teacher: Path) -> dict[str, Any]:
    taught = {"teacher": str(teacher)} if METHODS[name]["pipeline"] == "distill" else {}
    return {**tiny_config(model), **METHODS[name], **taught}


@pytest.mark.parametrize(
    "name", [name if name == "distill" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_resume_after_kill_online_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, name: str
) -> None:
    teacher = write_tiny_model(tmp_path / "teacher", seed=1)
    settings = configuration(name, tiny_model, teacher)
    reference, run = Run(tmp_path / "reference", settings), Run(tmp_path / "killed", settings)
    reference.finish()
    run.kill_after_a_checkpoint(random.Random(name).uniform(0.0, 0.3))
    run.finish()
    assert run.metrics() == reference.metrics()
    assert run.rollouts() == reference.rollouts()
    assert run.ledger() == reference.ledger()
    ours, theirs = (r.checkpoint() / "model" / "model.safetensors" for r in (run, reference))
    assert ours.read_bytes() == theirs.read_bytes()
    assert [entry["draw_id"] for entry in run.ledger()] == list(range(18))
    assert {entry["outcome"] for entry in run.ledger()} <= {"trained", "filtered"}
