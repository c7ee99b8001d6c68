"""Return free heap memory to the kernel with `malloc_trim`, for trainers that compute on a CPU.

    layer done ─► pages in its heaps > most in use so far + MAX_FREE_FRACTION x most in use so far? ─► malloc_trim
    last layer done, gradient of the first ─► … > in use now + MAX_FREE_FRACTION x most in use so far? ─► malloc_trim

glibc extends its heaps for a tensor if no free piece is large enough. The piece that a freed tensor leaves is often too
small for the next tensor of the same size, because `posix_memalign` requests up to 96 bytes more. Therefore a pass with
many live tensors fragments the heap: in measurements, the free pieces took up to twice the memory of the tensors. The
kernel clears every page before it is used again, so memory is returned only when too much of it is free.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["MAX_FREE_FRACTION", "Heap", "trim_heap_after_layers"]

MAX_FREE_FRACTION = 1 / 8
"""Maximum amount of free heap memory, as a fraction of the memory in use."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """Measures the total and the used heap memory of this process, and trims the heap.

    Args:
        library: Glibc.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._non_heap_bytes = 0
        """Bytes of the process that do not belong to the C library."""
        self._max_in_use = 0
        self._max_in_heaps = 0
        """Largest number of bytes in use in the heaps, not counting memory that is mapped for a single large tensor."""
        self._trim()

    def trim_if_fragmented(self, *, ignore_peak: bool = False) -> bool:
        """Trim the heaps if too much of their memory is free; return whether they were trimmed.

        Args:
            ignore_peak: If True, all memory that is currently unused is treated as free, not only memory beyond the
                peak. Set it before an allocation that is too large for any free piece of a heap.
        """
        in_pieces, mapped = self._measure_bytes_in_use()
        self._max_in_heaps = max(self._max_in_heaps, in_pieces)
        self._max_in_use = max(self._max_in_use, in_pieces + mapped)
        expected = in_pieces if ignore_peak else self._max_in_heaps
        too_many = (
            _read_anonymous_bytes() - mapped > self._non_heap_bytes + expected + MAX_FREE_FRACTION * self._max_in_use
        )
        if too_many:
            self._trim()
        return too_many

    def _trim(self) -> None:
        self._library.malloc_trim(0)
        self._non_heap_bytes = _read_anonymous_bytes() - sum(self._measure_bytes_in_use())

    def _measure_bytes_in_use(self) -> tuple[int, int]:
        """Return the bytes of allocations in the C library's heaps, and of allocations with a separate mapping."""
        usage = self._library.mallinfo2()
        return usage.uordblks, usage.hblkhd


def trim_heap_after_layers(layers: Iterable[nn.Module], embeddings: nn.Module | None = None) -> Heap | None:
    """Register hooks that trim the heap after each layer's forward pass with gradients, if too much of the heap is
    free.

    Two allocations are too large for any free piece of a heap: the logits, after the last layer, and the gradient of
    the embeddings, at the end of the backward pass. Before these two allocations, all memory that is currently unused
    is treated as free; elsewhere, only memory beyond the peak so far is treated as free.

    Returns:
        The heap, or `None` if the C library is not supported.
    """
    library = _load_glibc()
    if library is None:
        return None
    heap, all_layers = Heap(library), list(layers)

    def trim_after_layer(layer: nn.Module, *call: Any) -> None:
        if torch.is_grad_enabled():
            heap.trim_if_fragmented(ignore_peak=layer is all_layers[-1])

    def trim_before_gradient(gradient: torch.Tensor) -> None:
        heap.trim_if_fragmented(ignore_peak=True)

    def register_gradient_hook(module: nn.Module, call: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(trim_before_gradient)

    for layer in all_layers:
        layer.register_forward_hook(trim_after_layer)
    if embeddings is not None:
        embeddings.register_forward_hook(register_gradient_hook)
    return heap


class _MallocInfo(ctypes.Structure):
    """The C struct `mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        *((name, ctypes.c_size_t) for name in ("hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


@cache
def _load_glibc() -> Any:
    """Return glibc, or `None` if it is older than 2.33 or the pages of this process cannot be counted."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallocInfo
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        _read_anonymous_bytes()
    except (OSError, AttributeError):
        return None
    return library


def _read_anonymous_bytes() -> int:
    """Return the bytes of resident pages that do not belong to a file."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES
