"""Distillation and online preferences with ranks and engines as Ray actors: they learn what one process learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run, tiny_config
from worlds.tiny_model import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TRAINERS = {"actor_train": "0-1", "actor_infer": "2"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "held": ({"pipeline": "distill"}, {}, "training/distill/divergence"),
    "trainer": (
        {"pipeline": "distill", "distillation": {"mode": "reward"}},
        {"teacher": "3"},
        "training/distill/divergence",
    ),
    "engine": (
        {"pipeline": "distill", "distillation": {"mode": "reward"}, "place": "engine"},
        {"teacher": "3"},
        "training/distill/divergence",
    ),
    "preference_online": (
        {"pipeline": "preference_online"},
        {"reference": "0-1"},
        "training/preference/logprob_chosen",
    ),
}
"""What is run, the devices of its further role, and a metric that says it was computed as in one process."""


@pytest.mark.parametrize("name", METHODS)
def test_online_ray_a_run_on_ray_learns_what_one_process_learns(tmp_path: Path, tiny_model: Path, name: str) -> None:
    method, devices, metric = METHODS[name]
    settings = {**tiny_config(tiny_model, num_steps=2), **method}
    if (place := settings.pop("place", "trainer")) and settings["pipeline"] == "distill":
        settings["teacher"] = {"model": str(write_tiny_model(tmp_path / "teacher", seed=1)), "backend": place}
    ray = {"type": "ray", "devices_per_node": 4, "device_mapping": {**TRAINERS, **devices}}
    alone, together = Run(tmp_path / "alone", settings), Run(tmp_path / "ray", {**settings, "cluster": ray})
    alone.finish()
    together.finish()
    found, other = ([row for row in run.metrics() if row["kind"] == "train"] for run in (alone, together))
    assert found[0][metric] == pytest.approx(other[0][metric], abs=1e-4)
    stepped = sum(bool(row.get("training/stepped")) for row in found)  # a step without a pair changes nothing
    assert 1 <= stepped == sum(bool(row.get("training/stepped")) for row in other) == other[1]["policy_version"]
    assert {entry["outcome"] for entry in together.ledger()} <= {"trained", "filtered"}
