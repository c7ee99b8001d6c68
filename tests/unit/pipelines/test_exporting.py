"""Copying a model out of a run: whole, and as transformers 4 and 5 read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from roll.errors import ModelError
from roll.pipelines import exporting


@pytest.fixture
def checkpoint(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a model and an adapter. What a model card says of it is tested elsewhere."""
    directory = tmp_path / "run" / "checkpoints" / "step-000001"
    shutil.copytree(tiny_model, directory / "model")
    (directory / "adapter").mkdir()
    shutil.copy(tiny_model / "model.safetensors", directory / "adapter" / "adapter_model.safetensors")
    monkeypatch.setattr(exporting, "build_model_card", lambda *unused, **settings: "card")
    monkeypatch.setattr(exporting, "find_checkpoint", lambda directory: directory)
    return directory


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 7, 1000, -1])
def test_export_refuses_weights_that_are_not_whole(checkpoint: Path, tmp_path: Path, adapter: bool, kept_bytes: int):
    file = checkpoint / ("adapter/adapter_model.safetensors" if adapter else "model/model.safetensors")
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(ModelError, match=rf"{file.name}' is corrupted, or is not a safetensors file"):
        exporting.export(checkpoint, tmp_path / "target", adapter=adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("adapter", [False, True])
def test_export_refuses_weights_that_are_missing(checkpoint: Path, tmp_path: Path, adapter: bool):
    (checkpoint / ("adapter/adapter_model.safetensors" if adapter else "model/model.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        exporting.export(checkpoint, tmp_path / "target", adapter=adapter)
    assert not (tmp_path / "target").exists()


def test_export_of_a_run_of_an_earlier_version_adds_what_transformers_4_reads(checkpoint: Path, tmp_path: Path):
    file = checkpoint / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "TokenizersBackend"}
    file.write_text(json.dumps(settings))
    before = {path: path.read_bytes() for path in (checkpoint / "model").iterdir()}
    target = exporting.export(checkpoint, tmp_path / "target")
    assert json.loads((target / "config.json").read_text())["rope_theta"] == 10000.0
    assert json.loads((target / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {path: path.read_bytes() for path in (checkpoint / "model").iterdir()} == before
