"""Read a checkpoint's index without running code from it.

`torch.distributed.checkpoint` stores and loads the index of a checkpoint (`.metadata`) as a pickle, and a pickle may
run any command. Entries that are not tensors are pickles as well.

    .metadata ──► an unpickler whose only classes are stand-ins of this module ──► checked ──► DCP's own records

Invariants: no class or function that a file names is imported. Each of the dozen names that DCP writes has a stand-in,
which is created for each file; any other name raises an error. An index may name only whole tensors, in files of its
own directory.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["SafeReader"]

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORD_CLASSES = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_PATH_CLASSES = {(module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")}


class _Unpickler(pickle.Unpickler):
    """An unpickler that builds stand-ins for the classes of a checkpoint index, and rejects all other names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New classes for each file: a pickle can set attributes of any class that it names.
        self._records = {name: type(name[1], (_Record,), {}) for name in _RECORD_CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for the class or function `name` of `module`.

        Raises:
            pickle.UnpicklingError: The name has no stand-in.
        """
        if (module, name) in self._records:
            return self._records[module, name]
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) in _PATH_CLASSES:
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) in ((_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")):
            return lambda value: value
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"the index references '{module}.{name}', which is not a class of a checkpoint index"
        )


class _Record:
    """A stand-in for an instance of DCP's metadata classes, which stores the pickled state unchecked."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class SafeReader(FileSystemReader):
    """Reads tensors from a checkpoint of DCP, and rejects entries that are not tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index and rebuild it from checked values.

        Raises:
            pickle.UnpicklingError: The file is not an index of tensors.
            OSError: The file cannot be read.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = _read_state(_Unpickler(file).load(), "Metadata")
        return Metadata(
            state_dict_metadata={
                _check_type(str, name): _read_tensor(entry) for name, entry in index["state_dict_metadata"].items()
            },
            storage_data={_read_index(key): _read_byte_range(info) for key, info in index["storage_data"].items()},
            storage_meta=StorageMeta(load_id=self.load_id),
            version=str(index.get("version")),
        )


def _read_state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        what = type(record).__name__
        raise pickle.UnpicklingError(f"the index has a '{what}' instead of a '{kind}'; only tensors are loaded")
    return record.__dict__["state"]


def _check_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise pickle.UnpicklingError(f"the index has a '{type(value).__name__}' instead of a '{kind.__name__}'")
    return value


def _read_size(value: Any) -> torch.Size:
    return torch.Size([_check_type(int, each) for each in _check_type(tuple, value)])


def _read_tensor(record: Any) -> TensorStorageMetadata:
    state = _read_state(record, "TensorStorageMetadata")
    dtype = _check_type(torch.dtype, _read_state(state["properties"], "TensorProperties")[0])
    found = [_read_state(chunk, "ChunkStorageMetadata") for chunk in _check_type(list, state["chunks"])]
    chunks = [ChunkStorageMetadata(_read_size(chunk["offsets"]), _read_size(chunk["sizes"])) for chunk in found]
    size = _read_size(state["size"])
    _check_coverage(size, chunks)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _check_coverage(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that the chunks cover a tensor of this size exactly once.

    Entries of the tensor that no chunk covers would silently stay unset.

    Chunks of shards form a grid: in every dimension each chunk ends where the next one begins.
    """
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        raise pickle.UnpicklingError(
            f"the index has a chunk whose number of dimensions differs from that of the tensor, of size {[*size]}"
        )
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    begins = [sorted({chunk.offsets[dim] for chunk in filled}) for dim in range(len(size))]
    ends = [dict(zip(cuts, [*cuts[1:], end], strict=False)) for cuts, end in zip(begins, size, strict=True)]
    for chunk in filled:
        spans = zip(ends, chunk.offsets, chunk.sizes, strict=True)
        if any(first < 0 or length < 1 or first + length != end[first] for end, first, length in spans):
            raise pickle.UnpicklingError(f"the index has overlapping chunks, or gaps, for a tensor of size {[*size]}")
    is_whole = sum(math.prod(chunk.sizes) for chunk in filled) == math.prod(size)
    if not is_whole or len({chunk.offsets for chunk in filled}) < len(filled):
        raise pickle.UnpicklingError(f"the index has missing or duplicate chunks of a tensor of size {[*size]}")


def _read_index(record: Any) -> MetadataIndex:
    state = _read_state(record, "MetadataIndex")
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _check_type(str, state["fqn"]),
        None if offset is None else _read_size(offset),
        None if number is None else _check_type(int, number),
    )


def _read_byte_range(record: Any) -> _StorageInfo:
    """Return the file and byte range of a tensor."""
    state = _read_state(record, "_StorageInfo")
    name = _check_type(str, state["relative_path"])
    if PurePath(name).name != name:
        raise pickle.UnpicklingError(
            f"the index references the file '{name}', which is not in the checkpoint's directory"
        )
    if state.get("transform_descriptors"):
        raise pickle.UnpicklingError("the index has transformed tensors, which are not supported")
    return _StorageInfo(name, _check_type(int, state["offset"]), _check_type(int, state["length"]))
