"""Returning free memory of the C library's heap to the kernel, for trainers whose weights and activations are on the
host.

    layer done ─► pages in its heaps > most in use so far + SHARE x most in use so far? ─► malloc_trim
    last layer done, gradient of the first ─► … > in use now + SHARE x most in use so far? ─► malloc_trim

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

__all__ = ["SHARE", "Heap", "close_heap_after"]

SHARE = 1 / 8
"""Largest share of free memory, relative to the memory in use."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heap:
    """The heap memory of this process, and the part of it that is in use.

    Args:
        library: glibc.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._besides = 0
        """Bytes of the process that do not belong to the C library."""
        self._most_alive = 0
        self._most_in_pieces = 0
        """Largest use of the heaps alone: memory mapped for a single tensor never lies in a hole."""
        self._give_back()

    def close_holes(self, *, beyond_now: bool = False) -> bool:
        """Return free pages to the kernel if there are too many; return whether there were.

        Args:
            beyond_now: Whether to compare with the memory that is in use now instead of the largest use so far. Set it
                before an allocation that is larger than any hole.
        """
        in_pieces, mapped = self._alive()
        self._most_in_pieces = max(self._most_in_pieces, in_pieces)
        self._most_alive = max(self._most_alive, in_pieces + mapped)
        expected = in_pieces if beyond_now else self._most_in_pieces
        too_many = _own_bytes() - mapped > self._besides + expected + SHARE * self._most_alive
        if too_many:
            self._give_back()
        return too_many

    def _give_back(self) -> None:
        self._library.malloc_trim(0)
        self._besides = _own_bytes() - sum(self._alive())

    def _alive(self) -> tuple[int, int]:
        """Return the bytes in use from the C library: those in its heaps, and those mapped one by one."""
        found = self._library.mallinfo2()
        return found.uordblks, found.hblkhd


def close_heap_after(layers: Iterable[nn.Module], embeddings: nn.Module | None = None) -> Heap | None:
    """Return free memory after each layer call that needs a gradient; return `None` where the C library is not
    supported.

    After the last layer come the vocabulary's logits, and in the backward pass after the first layer the gradient of
    the embeddings. Both are larger than any hole.
    """
    library = _glibc()
    if library is None:
        return None
    heap, all_layers = Heap(library), list(layers)

    def look(layer: nn.Module, *call: Any) -> None:
        if torch.is_grad_enabled():
            heap.close_holes(beyond_now=layer is all_layers[-1])

    def close(gradient: torch.Tensor) -> None:
        heap.close_holes(beyond_now=True)

    def look_before_gradient(module: nn.Module, call: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(close)

    for layer in all_layers:
        layer.register_forward_hook(look)
    if embeddings is not None:
        embeddings.register_forward_hook(look_before_gradient)
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
        _own_bytes()
    except (OSError, AttributeError):
        return None
    return library


def _own_bytes() -> int:
    """Return the bytes of resident pages that do not belong to a file."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE
