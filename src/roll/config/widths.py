"""Tensor-parallel widths of engines: one width, or several widths between which a run switches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from pydantic import field_validator

from roll.config.base import Section

__all__ = ["EngineWidthsSection", "TensorParallel", "find_widths_conflict", "find_widths_problem", "list_widths"]

TensorParallel: TypeAlias = int | list[int]
"""The number of devices of one engine, or several numbers, of which the run uses one at a time."""


class EngineWidthsSection(Section):
    """A section with a field `tensor_parallel`, which each subclass describes."""

    if TYPE_CHECKING:
        tensor_parallel: TensorParallel

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of devices of an engine; the first one is used first."""
        return list_widths(self.tensor_parallel)

    @property
    def width(self) -> int:
        """Number of devices of an engine at the start of the run."""
        return self.widths[0]

    @field_validator("tensor_parallel", check_fields=False)
    @classmethod
    def _check_widths(cls, value: TensorParallel) -> TensorParallel:
        if problem := find_widths_problem(value):
            raise ValueError(problem)
        return value


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
    if isinstance(value, list) and len(widths) == 1:
        return f"must be a number, or a list of at least two numbers, got {value}: set it to {widths[0]}"
    if any(wide <= narrow or wide % narrow for narrow, wide in pairwise(widths)):
        return (
            f"must be ascending, and each width a multiple of the previous one, got {value}: use widths such as [1, 2] "
            "or [2, 4, 8]"
        )
    return ""


def find_widths_conflict(widths: Sequence[int], *, sharing: str, is_elastic: bool, has_classes: bool) -> str:
    """Return the reason why a run cannot switch between widths, and a remedy; empty if it can.

    Args:
        widths: Widths of the run's engines.
        sharing: Value of `cluster.sharing`.
        is_elastic: Whether the run has engines that join and leave.
        has_classes: Whether the run has device classes.
    """
    if len(widths) == 1:
        return ""
    key, one = f"inference.tensor_parallel {list(widths)}", "set tensor_parallel to one number"
    if sharing not in ("auto", "disaggregated", "colocated"):
        return (
            f"{key} cannot be combined with cluster.sharing {sharing}, which releases only some engines: {one}, or set "
            "sharing to colocated or disaggregated"
        )
    if is_elastic:
        return f"{key} cannot be combined with cluster.elastic, whose engines have one width: {one}, or remove elastic"
    if has_classes:
        return (
            f"{key} cannot be combined with cluster.device_classes, because engines of different widths may belong to "
            f"different classes: {one}, or remove device_classes"
        )
    return ""
