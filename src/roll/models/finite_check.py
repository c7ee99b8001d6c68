"""Rejects NaN and infinite weights, in loaded models and in files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.errors import ModelError, shorten
from roll.models.directory import list_weight_files

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_finite", "check_stored_finite", "check_tensor_finite"]

MAX_STORED_BYTES = 4 << 30
"""Maximum size of a model whose files are read for the check, which takes a few seconds. The weights of larger models
are checked when they are loaded."""
CHUNK_BYTES = 1 << 20
"""Number of bytes that are checked at a time; small enough for the CPU cache."""
EXPONENT_MASKS = {"F64": (np.uint64, 0x7FF0 << 48), "F32": (np.uint32, 0x7F80 << 16), "F16": (np.uint16, 0x7C00)}
EXPONENT_MASKS |= {"BF16": (np.uint16, 0x7F80)}
"""Integer type and exponent bit mask, by safetensors dtype; only NaN and infinity have all exponent bits set."""


def check_finite(model: Any, path: str) -> None:
    """Reject a loaded model that has NaN or infinite parameters.

    Raises:
        ModelError: a parameter is not finite; the message names the first one.
    """
    for name, parameter in model.named_parameters():
        check_tensor_finite(parameter.detach(), name, path)


def check_tensor_finite(weight: Tensor, name: str, path: str) -> None:
    """Reject a weight, or a shard of a weight, that has NaN or infinite values.

    Raises:
        ModelError: a value is not finite; the message names the weight.
    """
    import torch

    if not weight.is_floating_point() or weight.is_meta or weight.element_size() == 1:
        return
    # The sum takes one pass without temporary memory; the values are checked one by one only if it is not finite.
    total = weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    if not torch.isfinite(total) and not torch.isfinite(weight).all():
        raise _build_non_finite_error(name, path)


def check_stored_finite(directory: Path, max_bytes: int = MAX_STORED_BYTES) -> None:
    """Reject a model whose files contain NaN or infinite values. The check is skipped for models above a size limit.

    Args:
        directory: The directory of a model that `check_directory` accepts.
        max_bytes: The maximum total size of the files; larger models are not checked.

    Raises:
        ModelError: a weight is not finite; the message names the first one.
    """
    files = list_weight_files(directory)
    if sum(file.stat().st_size for file in files) > max_bytes:
        return
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        stored = np.memmap(file, np.uint8, "r")[8 + length :]
        for name, tensor in header.items():
            if name == "__metadata__" or tensor["dtype"] not in EXPONENT_MASKS or math.prod(tensor["shape"]) == 0:
                continue
            first, end = tensor["data_offsets"]
            if _has_non_finite(stored[first:end], *EXPONENT_MASKS[tensor["dtype"]]):
                raise _build_non_finite_error(name, str(directory))


def _has_non_finite(stored: np.ndarray, width: type[np.unsignedinteger[Any]], exponent: int) -> bool:
    size, bits = np.dtype(width).itemsize, width(exponent)
    for first in range(0, len(stored), CHUNK_BYTES):
        numbers = stored[first : first + CHUNK_BYTES]
        if numbers.ctypes.data % size:  # tensors may be stored at any offset
            numbers = numbers.copy()
        # The exponent bits are compared as integers, because NumPy has no bfloat16.
        if (numbers.view(width) & bits).max() == bits:
            return True
    return False


def _build_non_finite_error(name: str, path: str) -> ModelError:
    return ModelError(
        f"weight {shorten(name)} of model '{path}' has NaN or infinite values, so the model cannot be used: "
        "copy the model again, or use another checkpoint."
    )
