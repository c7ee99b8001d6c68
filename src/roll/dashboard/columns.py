"""Columns that grow, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Columns"]


class Columns:
    """Arrays of equal length, by name.

    Args:
        types: of each.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._arrays = {name: np.empty(0, dtype) for name, dtype in types.items()}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> np.ndarray:
        """A view, good until the next change.

        Raises:
            KeyError: there is none of that name.
        """
        return self._arrays[name][: self._size]

    def extend(self, num_rows: int, values: Mapping[str, Any]) -> None:
        """Append rows: for every column an array, a list, or one value for all of them."""
        end = self._size + num_rows
        for name, array in self._arrays.items():
            if end > len(array):  # memory beyond the rows is not touched, so it costs nothing
                grown = np.empty(max(1024, end + end // 4), array.dtype)
                grown[: self._size] = array[: self._size]
                array = self._arrays[name] = grown
            array[self._size : end] = values[name]
        self._size = end

    def keep(self, mask: np.ndarray) -> None:
        """Drop all rows but some."""
        self._arrays = {name: self[name][mask] for name in self._arrays}
        self._size = int(mask.sum())
