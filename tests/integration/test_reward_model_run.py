"""Whole runs that train a reward model on a tiny random model, and the policy that then learns from it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import Run
from safetensors.torch import load_file

import roll

LETTERS = "abc", "xyz"
"""Of good and of bad answers."""


def rows(kind: str, count: int = 60) -> list[dict[str, Any]]:
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(count):
        good, bad = ("".join(rng.choice(letters) for _ in range(rng.randint(2, 6))) for letters in LETTERS)
        better = rng.random() < 0.5
        scored = {"completion": good if better else bad, "score": 1.0 if better else -1.0}
        found.append({"prompt": f"say {number}"} | ({"chosen": good, "rejected": bad} if kind == "pair" else scored))
    return found


def config(directory: Path, model: Path, kind: str = "pair", /, **changes: Any) -> dict[str, Any]:
    data = directory / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
    return {
        "pipeline": "reward_model",
        "name": "run",
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "float32"},
        "data": [{"source": "file", "path": str(data)}],
        "reward_model": {"loss": "bradley_terry" if kind == "pair" else "regression"},
        "training": {"num_epochs": 2, "examples_per_step": 16, "learning_rate": 3e-3, "num_threads": 1},
        "evaluation": {"every_num_steps": 3},
        "checkpoint": {"every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
        **changes,
    }


def recorded(run: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == kind]


def test_reward_model_run_held_out_pairs_are_told_apart_and_a_policy_learns_from_the_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = config(tmp_path, tiny_model)
    roll.train(settings)
    last = recorded(tmp_path / "run", "evaluation")[-1]
    assert last["eval/accuracy"] >= 0.95
    assert last["eval/margin"] > 0.5
    uses = Counter(entry["uid"] for entry in Run.at(tmp_path / "run").ledger())
    assert set(uses.values()) == {2}
    assert roll.evaluate(settings, model=str(tmp_path / "run"))["eval/loss"] == pytest.approx(
        last["eval/loss"], abs=1e-4
    )

    scored = {"type": "reward_model", "path": str(tmp_path / "run"), "require_finished": False, "device": "cpu"}
    rule = {"type": "regex", "name": "rule", "pattern": "[a-c]", "weight": 0, "require_finished": False}
    policy = {
        "pipeline": "rlvr",
        "name": "policy",
        "output_dir": str(tmp_path),
        "model": settings["model"],
        "data": [{"source": "arithmetic", "reward": [scored, rule]}],
        "rollout": {"prompts_per_step": 6, "group_size": 6, "max_new_tokens": 6},
        "training": {"num_steps": 12, "learning_rate": 1e-2, "num_threads": 1},
        "inference": {"engine": "hf"},
        "evaluation": {"every_num_steps": 0},
        "tracking": settings["tracking"],
    }
    roll.train(policy)
    steps = recorded(tmp_path / "policy", "train")
    first, final = (sum(row["reward/arithmetic/rule"] for row in part) / 3 for part in (steps[:3], steps[-3:]))
    assert final > first + 0.2
    assert all(row["rollout/infra_errors"] == 0 for row in steps)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_reward_model_run_scores_are_learnt_as_their_rows_say(
    tmp_path: Path, tiny_model: Path, lora: dict[str, Any] | None
) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": lora}
    training = {"num_epochs": 4, "examples_per_step": 16, "learning_rate": 1e-2, "num_threads": 1}
    roll.train(config(tmp_path, tiny_model, "scored", model=model, training=training))
    first, *_, last = recorded(tmp_path / "run", "evaluation")
    assert first["eval/loss"] == pytest.approx(1.0, abs=1e-5)
    assert last["eval/loss"] < 0.3


@pytest.mark.slow
def test_reward_model_run_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = config(tmp_path, tiny_model)
    reference = Run(tmp_path / "reference", settings)
    reference.finish()
    run = Run(tmp_path / "killed", settings)
    run.kill_after_a_checkpoint(0.2)
    run.finish()
    assert run.metrics() == reference.metrics()
    assert run.ledger() == reference.ledger()
    ours, theirs = (r.checkpoint() / "model" / "model.safetensors" for r in (run, reference))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_reward_model_run_two_ranks_on_ray_learn_and_export_as_one_does(tmp_path: Path, tiny_model: Path) -> None:
    training = {"num_steps": 3, "examples_per_step": 16, "learning_rate": 1e-3, "num_threads": 1}
    ray = {"type": "ray", "devices_per_node": 2, "device_mapping": {"actor_train": "0-1"}}
    weights, last = [], []
    for name, cluster in (("one", {}), ("two", ray)):
        run = Run(tmp_path / name, config(tmp_path, tiny_model, training=training, cluster=cluster))
        run.finish()
        last.append(recorded(run.path, "evaluation")[-1])
        weights.append(load_file(run.checkpoint() / "model" / "model.safetensors")["score.weight"])
    assert last[1]["eval/loss"] == pytest.approx(last[0]["eval/loss"], abs=1e-4)
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-4)
