"""Loading a checkpoint runs nothing that is in it: a hostile directory is refused, a real one loads as it did."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from training_helpers import make_spec

from roll.errors import CheckpointError
from roll.training import TorchBackend
from roll.training.checkpoint.reader import SafeReader

TENSORS = {
    "weight/a": torch.arange(6, dtype=torch.float32).reshape(3, 2),
    "weight/b": torch.ones(2, 0, dtype=torch.bfloat16),
    "counters": torch.tensor([3, 0]),
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "rng/0/cpu": torch.arange(5, dtype=torch.uint8),
}


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def _saved(path: Path) -> Path:
    dcp.save(dict(TENSORS), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def test_checkpoint_reader_a_real_index_reads_as_pytorch_reads_it(tmp_path: Path) -> None:
    path = _saved(tmp_path / "state")
    ours, theirs = SafeReader(path).read_metadata(), dcp.FileSystemReader(path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version
    empty = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(empty, storage_reader=SafeReader(path), no_dist=True)
    assert all(torch.equal(empty[name], tensor) for name, tensor in TENSORS.items())


def _index(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def _command_as_index(index: Metadata, canary: Path, path: Path) -> Any:
    return Command(canary)


def _command_in_unused_field(index: Metadata, canary: Path, path: Path) -> Any:
    index.planner_data = {"weight/a": Command(canary)}
    return index


def _command_as_offset(index: Metadata, canary: Path, path: Path) -> Any:
    for info in index.storage_data.values():
        info.offset = Command(canary)
    return index


def _entry_that_is_a_pickle(index: Metadata, canary: Path, path: Path) -> Any:
    """DCP gives what is not a tensor to `torch.load(weights_only=False)`."""
    buffer = io.BytesIO()
    torch.save(Command(canary), buffer)
    (path / "entry").write_bytes(buffer.getvalue())
    index.state_dict_metadata["counters"] = BytesStorageMetadata()
    index.storage_data[MetadataIndex("counters")] = _StorageInfo("entry", 0, len(buffer.getvalue()))
    return index


def _file_elsewhere(index: Metadata, canary: Path, path: Path) -> Any:
    for info in index.storage_data.values():
        info.relative_path = f"../{path.name}/{info.relative_path}"
    return index


def _part_missing(index: Metadata, canary: Path, path: Path) -> Any:
    """What is not read stays as it was."""
    cast(TensorStorageMetadata, index.state_dict_metadata["weight/model.norm.weight"]).chunks.clear()
    return index


def _part_in_the_place_of_another(index: Metadata, canary: Path, path: Path) -> Any:
    entry = cast(TensorStorageMetadata, index.state_dict_metadata["weight/model.norm.weight"])
    half = ChunkStorageMetadata(torch.Size([0]), torch.Size([entry.size[0] // 2]))
    entry.chunks = [half, half]
    return index


def _part_beyond_the_end(index: Metadata, canary: Path, path: Path) -> Any:
    entry = cast(TensorStorageMetadata, index.state_dict_metadata["weight/model.norm.weight"])
    entry.chunks[0] = ChunkStorageMetadata(torch.Size([-1]), entry.size)
    return index


def _parts_that_overlap(index: Metadata, canary: Path, path: Path) -> Any:
    """As long as the whole together, and of a gap."""
    entry = cast(TensorStorageMetadata, index.state_dict_metadata["weight/model.norm.weight"])
    half = torch.Size([entry.size[0] // 2])
    entry.chunks = [ChunkStorageMetadata(torch.Size([first]), half) for first in (0, 1)]
    return index


def _part_of_other_dimensions(index: Metadata, canary: Path, path: Path) -> Any:
    entry = cast(TensorStorageMetadata, index.state_dict_metadata["weight/model.norm.weight"])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, entry.size[0]]))]
    return index


HOSTILE: list[Callable[[Metadata, Path, Path], Any]] = [
    _command_as_index,
    _command_in_unused_field,
    _command_as_offset,
    _entry_that_is_a_pickle,
    _file_elsewhere,
    _part_missing,
    _part_in_the_place_of_another,
    _part_beyond_the_end,
    _parts_that_overlap,
    _part_of_other_dimensions,
]


@pytest.mark.parametrize("forge", HOSTILE)
def test_checkpoint_reader_a_hostile_index_is_refused_and_runs_nothing(
    tiny_model: Path, tmp_path: Path, forge: Callable[[Metadata, Path, Path], Any]
) -> None:
    backend, path, canary = TorchBackend(make_spec(tiny_model)), tmp_path / "trainer", tmp_path / "ran"
    backend.save(path)
    forged = pickle.dumps(forge(_index(path), canary, path))
    (path / ".metadata").write_bytes(forged)
    with pytest.raises(CheckpointError, match="cannot be read: the index "):
        backend.load(path)
    assert not canary.exists()


def test_checkpoint_reader_a_tensor_file_that_is_another_pickle_runs_nothing(tiny_model: Path, tmp_path: Path) -> None:
    backend, path, canary = TorchBackend(make_spec(tiny_model)), tmp_path / "trainer", tmp_path / "ran"
    backend.save(path)
    buffer = io.BytesIO()
    torch.save(Command(canary), buffer)
    index = _index(path)
    for info in index.storage_data.values():
        info.offset, info.length = 0, len(buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))
    for data in path.glob("*.distcp"):
        data.write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load(path)
    assert not canary.exists()


def test_checkpoint_reader_no_class_of_pytorch_can_be_changed_by_a_file(tmp_path: Path) -> None:
    """A pickle may set attributes of classes (BUILD with two states), not only of what it makes."""
    path = _saved(tmp_path / "state")
    setting = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}S'changed'\nI1\ns\x86b."
    (path / ".metadata").write_bytes(setting)
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        SafeReader(path).read_metadata()
    assert not hasattr(Metadata, "changed")
