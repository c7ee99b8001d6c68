"""Reads and writes WAV files; the standard library's module `wave` does not read floating-point samples."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError

__all__ = ["is_wav", "read_wav", "write_wav"]

_PCM_FORMAT, _FLOAT_FORMAT, _EXTENSIBLE_FORMAT = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0xFFFFFFFF
"""Size field of the data chunk in files that were written to a pipe."""


def is_wav(data: bytes) -> bool:
    """Return whether the data begins with the header of a WAV file."""
    return data[:4] == b"RIFF" and data[8:12] == b"WAVE"


def read_wav(data: bytes, label: str) -> tuple[NDArray[np.float32], int]:
    """Read the samples of a WAV file.

    Args:
        data: The content of the file.
        label: Name of the file in error messages.

    Returns:
        Samples from -1 to 1, float32 [n, channels], and their rate in Hz.

    Raises:
        DataError: The file is truncated, or its samples are compressed.
    """
    form: bytes | None = None
    for name, start, size in _iter_chunks(data):
        if name == b"fmt ":
            form = data[start : start + size]
        elif name == b"data":
            if form is None or len(form) < 16:
                break
            if size == _UNKNOWN_SIZE:
                size = len(data) - start
            if size > len(data) - start:
                raise DataError(
                    f"{label} is truncated: its header specifies {size:,} bytes of samples, but it has "
                    f"{len(data) - start:,}."
                )
            return _read_samples(form, data[start : start + size], label)
    raise DataError(f"{label} is a WAV file without a format or without samples.")


def write_wav(samples: NDArray[np.float32], rate: int) -> bytes:
    """Encode float32 samples [n] as a WAV file with one channel."""
    content = np.ascontiguousarray(samples, "<f4").tobytes()
    form = struct.pack("<HHIIHH", _FLOAT_FORMAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _iter_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, the start and the size of each chunk."""
    position = 12
    while position + 8 <= len(data):
        name, size = data[position : position + 4], struct.unpack_from("<I", data, position + 4)[0]
        yield name, position + 8, size
        position += 8 + size + size % 2


def _read_samples(form: bytes, content: bytes, label: str) -> tuple[NDArray[np.float32], int]:
    kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE_FORMAT and len(form) >= 26:
        kind = struct.unpack_from("<H", form, 24)[0]
    supported = (kind == _PCM_FORMAT and bits in (8, 16, 24, 32)) or (kind == _FLOAT_FORMAT and bits in (32, 64))
    if not supported or not channels or not rate or block != channels * bits // 8:
        raise DataError(
            f"{label} is a WAV file with format {kind}, {channels} channels and {bits} bits at {rate} Hz: it must have "
            "integer samples of 8, 16, 24 or 32 bits, or floating-point samples of 32 or 64 bits."
        )
    content = content[: len(content) // block * block]
    if kind == _FLOAT_FORMAT:
        values = np.frombuffer(content, f"<f{bits // 8}")
    elif bits == 8:
        values = (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    elif bits == 24:
        wide = np.zeros((len(content) // 3, 4), np.uint8)  # the three bytes become the upper ones of an int32
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0] / 2**31
    else:
        values = np.frombuffer(content, f"<i{bits // 8}") / 2 ** (bits - 1)
    return values.astype(np.float32).reshape(-1, channels), rate
