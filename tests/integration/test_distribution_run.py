"""Runs that need more of the policy than log-probs: entropy, the full-vocabulary KL, its attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from worlds.timing import is_timing

import roll

ALGORITHM = {
    "type": "attention_credit",
    "credit": {"horizon_start": 2},
    "entropy": {"coefficient": 0.01},
    "kl": {"coefficient": 0.1, "estimator": "full"},
    "filters": {"skip_zero_variance": False},
}


def config(directory: Path, source: Path, num_steps: int = 4, /, **changes: Any) -> dict[str, Any]:
    base = tiny_config(source, num_steps=num_steps)
    base["evaluation"] = {"every_num_steps": 0, "num_prompts": 2, "samples_per_prompt": 1, "before_training": False}
    base["training"] = {"num_steps": num_steps, "learning_rate": 1e-3, "num_threads": 1}
    return {**base, "output_dir": str(directory), "algorithm": ALGORITHM, **changes}


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not is_timing(k)} for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_output_distribution_run_a_resumed_run_keeps_its_distance_from_the_model_it_began_with(
    tmp_path: Path, tiny_model: Path, lora: dict[str, Any] | None
) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": lora}
    roll.train(config(tmp_path / "whole", tiny_model, model=model))
    roll.train(config(tmp_path / "parts", tiny_model, 2, model=model))
    roll.resume(tmp_path / "parts" / "run", ["training.num_steps=4"])
    whole = steps(tmp_path / "whole")
    assert whole == steps(tmp_path / "parts")
    distance = [row["training/policy/kl_reference"] for row in whole]
    assert distance[0] == 0.0
    assert 0 < distance[1] < distance[3]


def test_output_distribution_run_credit_changes_the_first_update(tmp_path: Path, tiny_model: Path) -> None:
    norms = {}
    for form in ("none", "coupled"):
        algorithm = ALGORITHM | {"credit": {"type": form, "horizon_start": 2}}
        roll.train(config(tmp_path / form, tiny_model, 1, algorithm=algorithm))
        norms[form] = steps(tmp_path / form)[0]["training/grad_norm"]
    assert norms["none"] != pytest.approx(norms["coupled"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_output_distribution_run_several_ranks_on_ray_find_the_same(tmp_path: Path, tiny_model: Path) -> None:
    cluster = {
        "type": "ray",
        "devices_per_node": 4,
        "device_mapping": {"actor_train": "0-1", "actor_infer": "2"},
    }
    for name, changes in (("ray", {"cluster": cluster}), ("local", {})):
        roll.train(config(tmp_path / name, tiny_model, 2, **changes))
    here, there = steps(tmp_path / "local")[0], steps(tmp_path / "ray")[0]
    assert here["reward/mean"] == there["reward/mean"]
    for key in ("training/loss", "training/grad_norm", "training/policy/entropy"):
        assert there[key] == pytest.approx(here[key], rel=1e-3, abs=1e-6), key
