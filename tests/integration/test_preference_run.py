"""Whole runs that learn from preferences on a tiny random model: what is learnt, used, kept, resumed."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run

import roll
from roll.config.preference import METHODS

NUM_ROWS = 60


def rows(kind: str) -> list[dict[str, Any]]:
    """Answers of the first letters are better than those of the last ones."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        good, bad = ("".join(rng.choice(letters) for _ in range(5)) for letters in ("abc", "xyz"))
        wanted = rng.random() < 0.5
        single = {"completion": good if wanted else bad, "label": wanted}
        found.append({"prompt": f"say {number}"} | ({"chosen": good, "rejected": bad} if kind == "pair" else single))
    return found


def write(directory: Path, kind: str = "pair") -> Path:
    path = directory / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
    return path


def config(directory: Path, model: Path, preference: dict[str, Any], /, **changes: Any) -> dict[str, Any]:
    return {
        "pipeline": "preference",
        "name": "run",
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "float32"},
        "data": [{"source": "file", "path": str(write(directory, kind_of(preference)))}],
        "preference": preference,
        "training": {"num_epochs": 2, "examples_per_step": 16, "learning_rate": 3e-3, "num_threads": 1},
        "evaluation": {"every_num_steps": 3},
        "checkpoint": {"every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
        **changes,
    }


def kind_of(preference: dict[str, Any]) -> str:
    return "labelled" if preference.get("type") == "kto" else "pair"


def evaluations(run: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == "evaluation"]


def test_preference_run_held_out_preferences_are_learnt_and_every_example_is_used_once_an_epoch(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = config(tmp_path, tiny_model, {"type": "dpo"}, model={"path": str(tiny_model), "dtype": "bfloat16"})
    roll.train(settings)
    first, last = evaluations(tmp_path / "run")[0], evaluations(tmp_path / "run")[-1]
    step = next(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1:]))
    assert first["eval/margin"] == step["training/preference/margin"] == 0.0  # begins as its reference, to the bit
    assert first["eval/loss"] == pytest.approx(math.log(2)) == step["training/loss"]
    assert last["eval/accuracy"] >= 0.9
    assert last["eval/margin"] > 1
    ledger = Run.at(tmp_path / "run").ledger()
    uses = Counter(entry["uid"] for entry in ledger)
    assert set(uses.values()) == {2}
    assert {entry["outcome"] for entry in ledger} == {"trained"}
    measured = roll.evaluate(settings, model=str(tmp_path / "run"))  # beside the model that training began with
    assert measured["eval/margin"] == pytest.approx(last["eval/margin"], abs=1e-3)


@pytest.mark.parametrize(
    "name",
    [name if name in ("dpo", "simpo", "kto") else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_preference_run_every_method_prefers_what_was_preferred(tmp_path: Path, tiny_model: Path, name: str) -> None:
    quick = {"num_steps": 6, "examples_per_step": 16, "learning_rate": 3e-3, "num_threads": 1}
    evaluation = {"every_num_steps": 0}
    roll.train(config(tmp_path, tiny_model, {"type": name}, training=quick, evaluation=evaluation))
    first, last = evaluations(tmp_path / "run")
    assert last["eval/margin"] > first["eval/margin"]
    assert last["eval/loss"] < first["eval/loss"]
    assert (tmp_path / "run" / "reference").is_dir() == METHODS[name].uses_reference


def test_preference_run_the_policy_without_its_adapters_says_what_a_kept_reference_said(
    tmp_path: Path, tiny_model: Path
) -> None:
    last = []
    for reference in ("precomputed", "adapters"):
        directory = tmp_path / reference
        directory.mkdir()
        model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}
        roll.train(config(directory, tiny_model, {"type": "kto", "reference": reference}, model=model))
        last.append(evaluations(directory / "run")[-1])
        assert (directory / "run" / "reference").exists() == (reference == "precomputed")
    assert last[0]["eval/loss"] == pytest.approx(last[1]["eval/loss"], abs=1e-3)
    assert last[0]["eval/margin"] > 0.01


@pytest.mark.parametrize(
    "preference",
    [pytest.param({"type": "dpo"}, id="dpo"), pytest.param({"type": "kto"}, id="kto")],
)
@pytest.mark.slow
def test_preference_run_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, preference: dict[str, Any]
) -> None:
    settings = config(tmp_path, tiny_model, preference)
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
@pytest.mark.parametrize("preference", [{"type": "dpo"}, {"type": "kto"}], ids=lambda p: p["type"])
def test_preference_run_two_ranks_on_ray_learn_as_one_does(
    tmp_path: Path, tiny_model: Path, preference: dict[str, Any]
) -> None:
    training = {"num_steps": 3, "examples_per_step": 16, "learning_rate": 1e-3, "num_threads": 1}
    ray = {"type": "ray", "devices_per_node": 2, "device_mapping": {"actor_train": "0-1"}}
    last = []
    for name, cluster in (("one", {}), ("two", ray)):
        run = Run(tmp_path / name, config(tmp_path, tiny_model, preference, training=training, cluster=cluster))
        run.finish()
        last.append(evaluations(run.path)[-1])
    assert last[1]["eval/loss"] == pytest.approx(last[0]["eval/loss"], abs=1e-4)
    assert last[1]["eval/margin"] == pytest.approx(last[0]["eval/margin"], abs=1e-3)
