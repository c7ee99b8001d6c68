"""Lossless deltas between two versions of a tensor's bytes. Pure functions over NumPy arrays.

A payload has two parts: the positions of the changed elements, then their values.

    gaps8, gaps16   the number of unchanged elements before each changed element, as uint8 or uint16. The largest value
                    M of the type means M unchanged elements and a continued gap
    bitmap          one bit per element
    dense           no positions: the new values of all elements
    none            no payload: no element changed

A value is the difference between the new and the old bit pattern, both read as unsigned integers. A small training step
changes a bfloat16 number by one or two units in the last place, so most differences are 1 or -1. They are stored in
zigzag order (0, -1, 1, -2, …) and split into planes of bytes, which zlib then compresses well. Arithmetic on bit
patterns is exact for every value, including NaN payloads and -0.0.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Encoding", "TensorDelta", "apply_delta", "count_changes", "encode_delta", "encode_full"]

ByteArray: TypeAlias = NDArray[np.uint8]
UIntArray: TypeAlias = NDArray[np.unsignedinteger]
Encoding: TypeAlias = Literal["none", "gaps8", "gaps16", "bitmap", "dense"]

ZLIB_LEVEL = 1
"""Compression level; higher levels take several times as long and save less than a tenth of the bytes."""
_GAP_TYPES: dict[str, type[np.unsignedinteger]] = {"gaps8": np.uint8, "gaps16": np.uint16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDelta:
    """The changes of one tensor."""

    encoding: Encoding
    num_changed: int
    is_compressed: bool = False
    payload: memoryview | bytes = field(default=b"", repr=False)


def count_changes(old: ByteArray, new: ByteArray, itemsize: int) -> int:
    """Return the number of elements whose bytes differ."""
    return int(np.count_nonzero(_to_integers(old, itemsize) != _to_integers(new, itemsize)))


def encode_full(new: ByteArray, num_changed: int) -> TensorDelta:
    """Return a delta with all values of a tensor. It needs no earlier version, and refers to the memory of `new`."""
    return TensorDelta(encoding="dense", num_changed=num_changed, payload=new.data)


def encode_delta(old: ByteArray, new: ByteArray, itemsize: int) -> TensorDelta:
    """Return the smallest delta that turns `old` into `new`.

    Args:
        old: The bytes of the earlier version.
        new: The bytes of the new version, with the size of `old`. A dense delta refers to this memory.
        itemsize: The number of bytes of an element.
    """
    before, after = _to_integers(old, itemsize), _to_integers(new, itemsize)
    changed = np.flatnonzero(before != after)
    if not changed.size:
        return TensorDelta(encoding="none", num_changed=0)
    gaps = np.diff(changed, prepend=-1) - 1
    sizes: dict[Encoding, int] = {
        "gaps8": _compute_gap_bytes(gaps, np.uint8),
        "gaps16": _compute_gap_bytes(gaps, np.uint16),
        "bitmap": -(-before.size // 8),
    }
    encoding = min(sizes, key=sizes.__getitem__)
    if sizes[encoding] + changed.size * before.itemsize >= new.size:
        return encode_full(new, int(changed.size))
    if encoding == "bitmap":
        positions = np.packbits(before != after).tobytes()
    else:
        positions = _encode_gaps(gaps, _GAP_TYPES[encoding]).tobytes()
    payload = positions + _encode_values(before[changed], after[changed])
    packed = zlib.compress(payload, ZLIB_LEVEL)
    is_compressed = len(packed) < len(payload)
    return TensorDelta(
        encoding=encoding,
        num_changed=int(changed.size),
        is_compressed=is_compressed,
        payload=packed if is_compressed else payload,
    )


def apply_delta(target: ByteArray, delta: TensorDelta, itemsize: int) -> None:
    """Turn the earlier version of a tensor into the new version, in place.

    Raises:
        ValueError: the payload does not fit the tensor.
    """
    if delta.encoding == "none":
        return
    payload = zlib.decompress(delta.payload) if delta.is_compressed else delta.payload
    data = np.frombuffer(payload, np.uint8)
    if delta.encoding == "dense":
        if data.size != target.size:
            raise ValueError(f"{data.size} bytes for a tensor of {target.size} bytes")
        target[:] = data
        return
    numbers = _to_integers(target, itemsize)
    num_value_bytes = delta.num_changed * numbers.itemsize
    positions, values = data[: data.size - num_value_bytes], data[data.size - num_value_bytes :]
    if delta.encoding == "bitmap":
        changed = np.flatnonzero(np.unpackbits(positions, count=numbers.size))
    else:
        changed = _decode_gaps(positions.view(_GAP_TYPES[delta.encoding]))
    if changed.size != delta.num_changed or changed[-1] >= numbers.size:
        raise ValueError(f"positions of {changed.size} elements, expected {delta.num_changed} of {numbers.size}")
    numbers[changed] += _decode_values(values, numbers.dtype)


def _to_integers(data: ByteArray, itemsize: int) -> UIntArray:
    """View the bytes of a tensor as unsigned integers of the element's size, at most 8 bytes."""
    return data.view(f"u{min(itemsize, 8)}")


def _compute_gap_bytes(gaps: NDArray[np.int64], kind: type[np.unsignedinteger]) -> int:
    largest = np.iinfo(kind).max
    return int(gaps.size + (gaps // largest).sum()) * np.dtype(kind).itemsize


def _encode_gaps(gaps: NDArray[np.int64], kind: type[np.unsignedinteger]) -> UIntArray:
    largest = np.iinfo(kind).max
    quotients = gaps // largest
    ends = np.cumsum(quotients + 1) - 1
    encoded = np.full(ends[-1] + 1, largest, kind)
    encoded[ends] = gaps - quotients * largest
    return encoded


def _decode_gaps(encoded: UIntArray) -> NDArray[np.int64]:
    """Return the positions of the changed elements."""
    ends = np.flatnonzero(encoded != np.iinfo(encoded.dtype).max)
    num_unchanged = np.cumsum(encoded, dtype=np.int64)[ends]
    return num_unchanged + np.arange(ends.size)


def _encode_values(before: UIntArray, after: UIntArray) -> bytes:
    difference = after - before
    sign = difference >> (8 * before.itemsize - 1)
    zigzag = (difference << 1) ^ np.negative(sign)
    return zigzag.view(np.uint8).reshape(-1, before.itemsize).T.tobytes()


def _decode_values(data: ByteArray, dtype: np.dtype[np.unsignedinteger]) -> UIntArray:
    zigzag: UIntArray = np.ascontiguousarray(data.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
    return np.bitwise_xor(zigzag >> 1, np.negative(zigzag & 1), dtype=dtype)
