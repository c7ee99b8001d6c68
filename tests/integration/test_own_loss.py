"""Losses and gates of the user's own, from a folder of theirs: one file each, and nothing of the package is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.errors import ConfigError

LOSS = """
from roll.types import LossOutputs, LossRequirements


def loss(inputs):
    value = -(inputs.advantages * inputs.logprobs).sum() / inputs.num_tokens
    return LossOutputs(loss=value, metrics={"own/entropy": inputs.entropy.detach().sum() / inputs.num_tokens})


loss.needs = LossRequirements(entropy=True)
"""
GATE = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Cubic:
    strength: float = 1.0

    def __call__(self, log_ratio, logprobs, advantages):
        return advantages * logprobs - self.strength * log_ratio.abs() ** 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_loss.py").write_text(LOSS)
    (tmp_path / "my_gate.py").write_text(GATE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(model: Path, algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    whole = tiny_config(model, num_steps=2)
    return {**whole, "output_dir": "runs", "algorithm": algorithm, "evaluation": {"every_num_steps": 0}, **changes}


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def test_own_loss_says_what_it_needs_of_the_trainer(folder: Path, tiny_model: Path) -> None:
    roll.train(config(tiny_model, {"loss": "my_loss.py:loss"}))
    trained = [row for row in steps(folder) if row.get("training/stepped")]
    assert trained and all(row["training/own/entropy"] > 0 for row in trained)


def test_own_loss_own_gate_takes_its_options(folder: Path, tiny_model: Path) -> None:
    gate = {"type": "python", "gate": "my_gate.py:Cubic", "options": {"strength": 0.5}}
    roll.train(config(tiny_model, {"gate": gate}))
    assert [row["step"] for row in steps(folder) if row.get("training/stepped")]


@pytest.mark.ray
def test_own_loss_own_gate_trains_on_the_ranks_of_ray(folder: Path, tiny_model: Path) -> None:
    apart = {"type": "ray", "device_mapping": {"actor_train": 0, "actor_infer": [0]}, "devices_per_node": 1}
    roll.train(config(tiny_model, {"gate": {"type": "python", "gate": "my_gate.py:Cubic"}}, cluster=apart))
    assert [row["step"] for row in steps(folder)] == [1, 2]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"loss": "mine"}, "unknown loss 'mine'. Known: path/to/file.py:Name, package.module:Name"),
        ({"gate": {"type": "python", "gate": "cubic"}}, "unknown gate 'cubic'."),
        ({"gate": {"type": "python", "gate": "my_gate.py:Cubik"}}, "'my_gate.py' has no 'Cubik'. Did you mean 'Cubic'"),
        (
            {"gate": {"type": "python", "gate": "my_gate.py:Cubic", "options": {"power": 3}}},
            "gate 'my_gate.py:Cubic' cannot be created with algorithm.gate.options {'power': 3}",
        ),
    ],
)
def test_own_loss_or_gate_that_cannot_be_used_is_refused_before_anything_starts(
    folder: Path, tiny_model: Path, algorithm: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        roll.train(config(tiny_model, algorithm))
    assert words in str(caught.value)
    assert not (folder / "runs" / "run").exists()
