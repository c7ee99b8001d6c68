"""Runs with critics and references: resumed exactly, and spread over processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import tiny_config
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from worlds.timing import is_timing

import roll

CRITICS = {"type": "asy_ppo", "updates": {"num_minibatches": 2, "num_epochs": 2}, "kl": {"coefficient": 0.05}}


def config(directory: Path, source: Path, /, **changes: Any) -> dict[str, Any]:
    base = tiny_config(source, num_steps=4)
    base["evaluation"] = {"every_num_steps": 0, "num_prompts": 2, "samples_per_prompt": 1, "before_training": False}
    return {**base, "output_dir": str(directory), "algorithm": CRITICS, **changes}


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not is_timing(k)} for row in rows if row["kind"] == "train"]


def collect_state(checkpoint: Path, name: str, scratch: Path) -> dict[str, torch.Tensor]:
    file = scratch / f"{name}.pt"
    dcp_to_torch_save(checkpoint / name, file)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_critic_run_a_resumed_run_with_critics_and_a_reference_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, lora: dict[str, Any] | None
) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": lora}
    training = {"learning_rate": 1e-3, "num_threads": 1}
    roll.train(config(tmp_path / "whole", tiny_model, model=model, training={"num_steps": 4, **training}))
    roll.train(config(tmp_path / "parts", tiny_model, model=model, training={"num_steps": 2, **training}))
    roll.resume(tmp_path / "parts" / "run", ["training.num_steps=4"])
    whole, parts = steps(tmp_path / "whole"), steps(tmp_path / "parts")
    assert [row["step"] for row in parts] == [1, 2, 3, 4]
    assert whole == parts
    last = [tmp_path / name / "run" / "checkpoints" / "step-000004" for name in ("whole", "parts")]
    for role in ("trainer", "critic-0", "critic-1"):
        first, second = (collect_state(path, role, path.parent) for path in last)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), role
    zero, one = (collect_state(last[0], f"critic-{i}", last[0].parent)["weight/score.weight"] for i in (0, 1))
    assert zero.any() and one.any()
    assert not torch.equal(zero, one)  # they learn from different rollouts


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_critic_run_critics_and_a_reference_run_on_ray_with_several_ranks(tmp_path: Path, tiny_model: Path) -> None:
    cluster = {
        "type": "ray",
        "devices_per_node": 4,
        "device_mapping": {"actor_train": "0-1", "actor_infer": "2", "critic": "0-1", "reference": "3"},
    }
    training = {"num_steps": 2, "learning_rate": 1e-3, "num_threads": 1}
    for name, changes in (("ray", {"cluster": cluster}), ("local", {})):
        roll.train(config(tmp_path / name, tiny_model, training=training, **changes))
    here, there = steps(tmp_path / "local"), steps(tmp_path / "ray")
    assert [row["step"] for row in there] == [1, 2]
    first, second = here[0], there[0]  # later ones sample from weights that differ by rounding
    assert first["reward/mean"] == second["reward/mean"]
    for key in ("training/loss", "training/grad_norm", "critic/loss", "critic/grad_norm"):
        if key in first:
            assert second[key] == pytest.approx(first[key], rel=1e-3, abs=1e-6), key
    saved = tmp_path / "ray" / "run" / "checkpoints" / "step-000002"
    assert (saved / "critic-0").is_dir() and (saved / "critic-1").is_dir()


@pytest.mark.parametrize("changes", [{}, {"updates": {"num_epochs": 2}}, {"kl": {"coefficient": 0.1}}])
def test_critic_run_a_shared_critic_learns_in_the_policys_updates(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any]
) -> None:
    algorithm = {"type": "ppo", "critic": {"shared": True, "head_learning_rate": 0.02}, **changes}
    roll.train(config(tmp_path / "whole", tiny_model, algorithm=algorithm))
    half = {"num_steps": 2, "learning_rate": 1e-3, "num_threads": 1}
    roll.train(config(tmp_path / "parts", tiny_model, algorithm=algorithm, training=half))
    roll.resume(tmp_path / "parts" / "run", ["training.num_steps=4"])
    rows = steps(tmp_path / "whole")
    assert rows == steps(tmp_path / "parts")
    values = [row["training/value/mean"] for row in rows]
    if "updates" not in changes:
        assert values[0] == 0.0  # the head begins there
    assert abs(values[-1]) > 1e-3
    assert not (tmp_path / "whole" / "run" / "checkpoints" / "step-000004" / "critic-0").exists()
