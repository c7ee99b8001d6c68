"""Write a model's weights as safetensors files of bounded size, with one tensor in memory at a time.

    8 bytes: length of the header ─ header: JSON, then spaces ─ tensors, one after the other

The header lists the offset of every tensor, so space is reserved for it and it is written last. All tensors of a file
have one element size: readers map the file, so each tensor must begin at a multiple of its element size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ShardWriter"]

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a file in bytes, unless a single tensor is larger."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAX_ENTRY_BYTES = 200
"""Maximum size of a tensor's header entry without its name, in bytes."""


class ShardWriter:
    """Writes `model.safetensors`, or `model-00001-of-00002.safetensors` … with their index.

    Args:
        directory: The directory of the files.
        names: The names of all tensors that will be written.
        shard_bytes: See `MAX_SHARD_BYTES`.
        stem: The beginning of the files' names.
    """

    def __init__(
        self, directory: Path, names: Sequence[str], shard_bytes: int = MAX_SHARD_BYTES, *, stem: str = "model"
    ) -> None:
        self._directory = directory
        self._stem = stem
        # A multiple of 8, as safetensors writes headers: tensors are then aligned for every dtype.
        self._header_bytes = -(-sum(len(json.dumps(name)) + _MAX_ENTRY_BYTES for name in names) // 8) * 8 + 64
        self._limit = shard_bytes
        self._open: dict[int, _Shard] = {}
        """The open shards, by element size."""
        self._shards: list[_Shard] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor.

        Raises:
            OSError: The tensor could not be written.
        """
        width = tensor.element_size()
        shard = self._open.get(width)
        if shard is None or (shard.size and shard.size + tensor.nbytes > self._limit):
            if shard is not None:
                shard.close()
            shard = self._open[width] = _Shard(self._directory / f"part-{len(self._shards)}", self._header_bytes)
            self._shards.append(shard)
        shard.add(name, tensor)

    def close(self) -> None:
        """Write headers and the index, and rename the files to their final names.

        Raises:
            OSError: A file could not be written.
        """
        for shard in self._open.values():
            shard.close()
        count = len(self._shards)
        places: dict[str, str] = {}
        for number, shard in enumerate(self._shards, 1):
            name = f"{self._stem}{'' if count == 1 else f'-{number:05}-of-{count:05}'}.safetensors"
            shard.path.rename(self._directory / name)
            places |= dict.fromkeys(shard.entries, name)
        if count > 1:
            total = sum(shard.size for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self._directory / f"{self._stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class _Shard:
    """One safetensors file that is being written."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        self.size = 0
        self._header_bytes = header_bytes
        self._file = path.open("wb")
        self._file.seek(8 + header_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous()
        place = [self.size, self.size + data.nbytes]
        self.entries[name] = {"dtype": _DTYPES[data.dtype], "shape": list(data.shape), "data_offsets": place}
        self._file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        self.size += data.nbytes

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.entries, separators=(",", ":")).encode()
        assert len(header) <= self._header_bytes, "the header exceeds the space reserved for it"
        with self._file as file:
            file.seek(0)
            file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))
