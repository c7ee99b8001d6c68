"""Tensor-parallel widths of engines: one width, or several widths between which a run switches."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

__all__ = ["TensorParallel", "find_widths_problem", "list_widths"]

TensorParallel: TypeAlias = int | list[int]
"""The number of devices of one engine, or several numbers, of which the run uses one at a time."""


def list_widths(value: TensorParallel) -> tuple[int, ...]:
    """Return all widths; the first one is used first."""
    return (value,) if isinstance(value, int) else tuple(value)


def find_widths_problem(value: TensorParallel) -> str:
    """Return what is wrong with the widths, with the correction; empty if they are valid."""
    widths = list_widths(value)
    if not widths:
        return "must be a number of devices or a list of numbers, got []: set it to 1"
    if any(width < 1 for width in widths):
        return f"must be at least 1, got {value}"
    if any(wide <= narrow or wide % narrow for narrow, wide in pairwise(widths)):
        return (
            f"must be ascending, and each width a multiple of the previous one, got {value}: use widths such as [1, 2] "
            "or [2, 4, 8]"
        )
    return ""
