"""Weights that are read part by part from their files are those that loading the whole model gives, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from pieces_ranks import ROLES, run_rank
from safetensors.torch import load_file, save_file
from training_helpers import make_spec
from worlds.ranks import run_ranks

from roll.config.model import LoRAConfig
from roll.errors import ModelError
from roll.models import WeightReader, load_causal_lm
from roll.training import TorchBackend
from roll.training.checkpoint.export import export_model
from roll.training.checkpoint.shards import ShardWriter
from roll.training.memory.deferred_weights import DeferredWeights
from roll.training.network.weights import collect_adapters


def left_and_whole(path: Path, dtype: torch.dtype) -> tuple[Any, WeightReader, Any]:
    """A model without its weights, their files, and the model with them."""
    found: list[tuple[Any, WeightReader]] = []
    load_causal_lm(path, dtype, meta_init=lambda model, files: found.append((model, files)))
    return *found[0], load_causal_lm(path, dtype)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3"])  # tied; experts apart; buffers in files
def test_sharded_weights_any_box_of_a_weight_is_read_by_itself(tiny_model: Path, tmp_path: Path, name: str) -> None:
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


def shards(path: Path, model: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model in two files with an index, in which some tensors are others, or missing (`None`)."""
    shutil.copytree(model, path)
    tensors = load_file(model / "model.safetensors") | changes
    (path / "model.safetensors").unlink()
    place = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(place.values()):
        own = {name: x for name, x in tensors.items() if place[name] == file and x is not None}
        save_file(own, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return tensors


def read_in_pieces(path: Path) -> dict[str, torch.Tensor]:
    unread = DeferredWeights()
    model = load_causal_lm(path, "float32", meta_init=unread.add)
    unread.read_shards(model, torch.device("cpu"))
    return dict(model.state_dict())


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[dict[str, Any], Callable[[bytearray], object], str]] = {
    "cut short": ({}, lambda data: data.__delitem__(slice(-9, None)), "not fully covered"),
    "empty": ({}, bytearray.clear, "header too small"),
    "no header": ({}, lambda data: data.__setitem__(slice(0, 8), b"\xff" * 8), "header too large"),
    "a weight missing": ({UP: None}, len, f"is missing 1 of its weights, for example '{UP}'"),
    "a weight of another shape": ({UP: torch.ones(3, 5)}, len, rf"for example '{UP}': got \(3, 5\), expected"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_sharded_weights_corrupted_files_are_refused_alike_in_pieces_and_whole(
    tiny_model: Path, tmp_path: Path, damage: str
) -> None:
    changes, spoil, said = DAMAGES[damage]
    shards(tmp_path / "model", tiny_model, changes)
    file = tmp_path / "model" / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    spoil(data)
    file.write_bytes(data)
    for load in (read_in_pieces, lambda path: load_causal_lm(path, "float32")):
        with pytest.raises(ModelError, match=said):
            load(tmp_path / "model")


def test_sharded_weights_an_index_may_be_wrong_about_places_and_a_file_about_dtypes(
    tiny_model: Path, tmp_path: Path
) -> None:
    """What `transformers` takes, the trainer takes, and as the same numbers."""
    tensors = shards(tmp_path / "model", tiny_model, {UP: torch.arange(6).reshape(2, 3).repeat(32, 11)[:, :32].clone()})
    index = tmp_path / "model" / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": dict(zip(places, reversed([*places.values()]), strict=True))})
    )
    assert tensors[UP].dtype == torch.int64
    found, whole = read_in_pieces(tmp_path / "model"), load_causal_lm(tmp_path / "model", "float32").state_dict()
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in whole.items())


def test_sharded_weights_go_to_files_of_bounded_size_one_after_the_other(tmp_path: Path) -> None:
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


def test_sharded_weights_an_export_that_fails_leaves_nothing_and_lets_the_other_ranks_end(tmp_path: Path) -> None:
    weights = FullDisk(tmp_path)
    network = SimpleNamespace(root=torch.nn.Linear(1, 1))
    with pytest.raises(OSError, match="No space left"):
        export_model(tmp_path / "model", weights, network, "", torch.float32, trust_remote_code=False, is_first=True)
    assert weights.asked == 3
    assert not list(tmp_path.iterdir())


def test_sharded_weights_adapters_are_gathered_before_an_export_can_fail(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=LoRAConfig(rank=2)))
    asked: list[str] = []
    read = backend._read
    monkeypatch.setattr(backend, "_read", lambda name: asked.append(name) or read(name))

    def full(*unused: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("roll.training.checkpoint.export.write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        backend.export(tmp_path / "model")
    assert len(asked) == 2 * len(collect_adapters(backend.network)) > 0, "other ranks help to gather them"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sharded_weights_every_family_in_every_layout_loads_what_one_rank_loads(
    tiny_model: Path, tmp_path: Path
) -> None:
    for name, family in FAMILIES.items():
        write_model(tmp_path / name, tiny_model, family)
    run_ranks(run_rank, (tmp_path,), 2)
    for rank in range(2):
        found = torch.load(tmp_path / f"found-{rank}.pt")
        assert len(found) == len(FAMILIES) + 2 * len(ROLES)
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
