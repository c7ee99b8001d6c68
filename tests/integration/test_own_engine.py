"""An engine of the user's own, from a folder of theirs: named in the configuration, trained with, checked before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.errors import ConfigError

PLAIN = Path(__file__).parents[2] / "examples/extension/src/roll_example/engine.py"
ENGINE = "engines/mine.py:PlainEngine"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, with the engine in it; commands are run there."""
    (tmp_path / "engines").mkdir()
    shutil.copy(PLAIN, tmp_path / "engines" / "mine.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(model: Path, **changes: Any) -> dict[str, Any]:
    return {**tiny_config(model, engine=ENGINE, num_steps=3), "output_dir": "runs", **changes}


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def test_own_engine_of_a_users_folder_trains(folder: Path, tiny_model: Path) -> None:
    roll.train(config(tiny_model))
    trained = rows(folder)
    assert [row["step"] for row in trained] == [1, 2, 3]
    assert all(row["agreement/logprob_max_abs"] < 1e-4 for row in trained)  # float32: it has the trainer's weights
    assert all(row["sync/probe_max_abs"] < 1e-4 and row["sync/probe_change"] > 0 for row in trained[1:])


@pytest.mark.ray
def test_own_engine_trains_in_the_workers_of_ray(folder: Path, tiny_model: Path) -> None:
    apart = {"type": "ray", "device_mapping": {"actor_train": 0, "actor_infer": [1]}, "devices_per_node": 2}
    roll.train(config(tiny_model, cluster=apart, training={"num_steps": 2, "learning_rate": 1e-3}))
    assert [row["step"] for row in rows(folder)] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cluster": {"sharing": "colocated"}},
            "cluster.sharing colocated requires an engine that can free its memory (can_sleep), but "
            "inference.engine is engines/mine.py:PlainEngine: set inference.engine to hf or sglang, or set "
            "cluster.sharing to auto.",
        ),
        (
            {"inference": {"engine": ENGINE}, "weight_sync": {"quantization": "int8"}},
            "weight_sync.quantization int8 requires an engine that can receive 8-bit weights (quantized_sync), but "
            "inference.engine is engines/mine.py:PlainEngine: set inference.engine to vllm or hf or sglang, or set "
            "weight_sync.quantization to none.",
        ),
    ],
)
def test_own_engine_that_lacks_a_capability_is_named_with_those_that_have_it(
    folder: Path, tiny_model: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tiny_model, **changes)
    assert words in roll.check(asked).problems
    with pytest.raises(ConfigError) as caught:
        roll.train(asked)
    assert str(caught.value) == words


def test_own_engine_that_changed_is_no_longer_the_runs(folder: Path, tiny_model: Path) -> None:
    roll.train(config(tiny_model))
    with (folder / "engines" / "mine.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(roll.errors.CheckpointError, match=r"the code of 'engines/mine.py:PlainEngine' changed"):
        roll.resume("runs/run", ["training.num_steps=4"])
