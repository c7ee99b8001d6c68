"""Weights that are read part by part from their files are those that loading the whole model gives, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from families import FAMILIES, write_model
from pieces_ranks import ROLES, run_rank
from safetensors.torch import load_file
from training_helpers import make_spec

from roll.config.model import LoRAConfig
from roll.models import WeightFiles, load_causal_lm
from roll.training import TorchBackend
from roll.training.export import export_model
from roll.training.shards import ShardWriter
from roll.training.weights import adapters_of


def left_and_whole(path: Path, dtype: torch.dtype) -> tuple[Any, WeightFiles, Any]:
    """A model without its weights, their files, and the model with them."""
    found: list[tuple[Any, WeightFiles]] = []
    load_causal_lm(path, dtype, left=lambda model, files: found.append((model, files)))
    return *found[0], load_causal_lm(path, dtype)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3"])  # tied; experts apart; buffers in files
def test_any_box_of_a_weight_is_read_by_itself(tiny_model: Path, tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "model", tiny_model, FAMILIES[name])
    model, files, whole = left_and_whole(path, torch.bfloat16)
    expected = whole.state_dict()
    weights = dict(model.named_parameters())
    assert all(weight.is_meta for weight in weights.values())
    for place, weight in weights.items():
        assert weight.dtype == expected[place].dtype
        boxes = [
            [(0, size) for size in weight.shape],
            [(size // 4, max(size // 2, 1)) for size in weight.shape],
            [(0, 0), *((0, size) for size in weight.shape[1:])],
        ]
        for box in boxes:
            part = expected[place][tuple(slice(a, a + n) for a, n in box)]
            assert torch.equal(files.read(place, box), part)
    for (place, buffer), (_, other) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert place in files or torch.equal(buffer, other)  # what no file has is there


def test_weights_go_to_files_of_bounded_size_one_after_the_other(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(5, 7).to(torch.bfloat16) for i in range(4)}
    tensors |= {"odd": torch.randn(3).to(torch.bfloat16), "bias": torch.randn(9), "one": torch.tensor(2.0)}
    writer = ShardWriter(tmp_path, list(tensors), shard_bytes=150)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3  # two of bfloat16, one of float32
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in tensors.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"]["bias"] == next(f.name for f in files if "bias" in load_file(f))


class FullDisk:
    """Weights of which the second cannot be written; every one is asked for, since other ranks help to gather it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.asked = directory, 0

    def names(self) -> list[str]:
        return ["a", "b", "c"]

    def __iter__(self) -> Any:
        for name in self.names():
            self.asked += 1
            yield name, (torch.ones(2) if name != "b" else Unwritable())


class Unwritable:
    """Stands for a tensor that finds no room."""

    nbytes = 8

    def element_size(self) -> int:
        return 4

    def detach(self) -> torch.Tensor:
        raise OSError(28, "No space left on device")


def test_an_export_that_fails_leaves_nothing_and_lets_the_other_ranks_end(tmp_path: Path) -> None:
    weights = FullDisk(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        export_model(tmp_path / "model", weights, None, "", torch.float32, trust_remote_code=False, is_first=True)
    assert weights.asked == 3
    assert not list(tmp_path.iterdir())


def test_adapters_are_gathered_before_an_export_can_fail(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=LoRAConfig(rank=2)))
    asked: list[str] = []
    read = backend._read
    monkeypatch.setattr(backend, "_read", lambda name: asked.append(name) or read(name))

    def full(*unused: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roll.training.export._write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        backend.export(tmp_path / "model")
    assert len(asked) == 2 * len(adapters_of(backend.network)) > 0, "other ranks help to gather them"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_family_in_every_layout_loads_what_one_rank_loads(tiny_model: Path, tmp_path: Path) -> None:
    for name, family in FAMILIES.items():
        write_model(tmp_path / name, tiny_model, family)
    mp.spawn(run_rank, (tmp_path,), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        found = torch.load(tmp_path / f"found-{rank}.pt")
        assert len(found) == len(FAMILIES) + 2 * len(ROLES)
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
