"""Calls of `malloc_trim`, which return free heap memory to the kernel, for trainers that compute on a CPU.

    layer done ─► pages in its heaps > most in use so far + MAX_FREE_SHARE x most in use so far? ─► malloc_trim
    last layer done, gradient of the first ─► … > in use now + MAX_FREE_SHARE x most in use so far? ─► malloc_trim

glibc extends its heaps for a tensor if no free piece is large enough. The piece that a freed tensor leaves is often too
small for the next one of its size: `posix_memalign` requests up to 96 bytes more. So a pass that keeps many tensors
leaves holes between them, measured at up to twice their size. The kernel clears every page that is needed again, so
memory is returned only when too much of it is free.
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

__all__ = ["MAX_FREE_SHARE", "Heap", "trim_heap_after"]

MAX_FREE_SHARE = 1 / 8
"""Largest share of free memory, relative to the memory in use."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """The heap memory of this process, and the part of it that is in use.

    Args:
        library: glibc.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._non_heap_bytes = 0
        """Bytes of the process that do not belong to the C library."""
        self._max_in_use = 0
        self._max_in_heaps = 0
        """Largest use of the heaps alone: memory mapped for a single tensor never lies in a hole."""
        self._trim()

    def trim_if_fragmented(self, *, beyond_now: bool = False) -> bool:
        """Return free pages to the kernel if there are too many; return whether there were.

        Args:
            beyond_now: Whether to compare with the memory that is in use now instead of the largest use so far. Set it
                before an allocation that is larger than any hole.
        """
        in_pieces, mapped = self._bytes_in_use()
        self._max_in_heaps = max(self._max_in_heaps, in_pieces)
        self._max_in_use = max(self._max_in_use, in_pieces + mapped)
        expected = in_pieces if beyond_now else self._max_in_heaps
        too_many = _anonymous_bytes() - mapped > self._non_heap_bytes + expected + MAX_FREE_SHARE * self._max_in_use
        if too_many:
            self._trim()
        return too_many

    def _trim(self) -> None:
        self._library.malloc_trim(0)
        self._non_heap_bytes = _anonymous_bytes() - sum(self._bytes_in_use())

    def _bytes_in_use(self) -> tuple[int, int]:
        """Return the bytes in use from the C library: those in its heaps, and those mapped one by one."""
        found = self._library.mallinfo2()
        return found.uordblks, found.hblkhd


def trim_heap_after(layers: Iterable[nn.Module], embeddings: nn.Module | None = None) -> Heap | None:
    """Return free memory after each layer call that needs a gradient; return `None` where the C library is not
    supported.

    After the last layer come the vocabulary's logits, and in the backward pass after the first layer the gradient of
    the embeddings. Both are larger than any hole.
    """
    library = _glibc()
    if library is None:
        return None
    heap, all_layers = Heap(library), list(layers)

    def trim_after_layer(layer: nn.Module, *call: Any) -> None:
        if torch.is_grad_enabled():
            heap.trim_if_fragmented(beyond_now=layer is all_layers[-1])

    def trim_before_gradient(gradient: torch.Tensor) -> None:
        heap.trim_if_fragmented(beyond_now=True)

    def register_gradient_hook(module: nn.Module, call: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(trim_before_gradient)

    for layer in all_layers:
        layer.register_forward_hook(trim_after_layer)
    if embeddings is not None:
        embeddings.register_forward_hook(register_gradient_hook)
    return heap


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        *((name, ctypes.c_size_t) for name in ("hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


@cache
def _glibc() -> Any:
    """Load glibc 2.33 or newer on a system where the pages of this process can be counted; else return `None`."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _MallocInfo
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        _anonymous_bytes()
    except (OSError, AttributeError):
        return None
    return library


def _anonymous_bytes() -> int:
    """Return the bytes of resident pages that do not belong to a file."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE
