"""NumPy columns to which rows can be appended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["ColumnBlocks", "Columns"]

_BLOCK_ROWS = 2**17


class Columns:
    """A table to which rows can be appended, with one NumPy array per column.

    Args:
        types: dtype of each column.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._arrays = {name: np.empty(0, dtype) for name, dtype in types.items()}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column as a view, which is valid until the table changes.

        Raises:
            KeyError: the column does not exist.
        """
        return self._arrays[name][: self._size]

    def reserve(self, num_rows: int) -> None:
        """Reserve space for `num_rows` rows, so that they can be appended without a copy."""
        # Unused space costs nothing: the kernel allocates pages of `np.empty` on first write.
        for name, array in self._arrays.items():
            if num_rows > len(array):
                grown = np.empty(num_rows, array.dtype)
                grown[: self._size] = array[: self._size]
                self._arrays[name] = grown

    def extend(self, num_rows: int, values: Mapping[str, Any]) -> None:
        """Append rows; `values` has an array, a list, or one value for all rows, for every column."""
        end = self._size + num_rows
        if any(end > len(array) for array in self._arrays.values()):
            self.reserve(max(1024, end + end // 4))
        for name, array in self._arrays.items():
            array[self._size : end] = values[name]
        self._size = end

    def filter_rows(self, mask: np.ndarray) -> None:
        """Keep only the rows for which `mask` is true."""
        self._arrays = {name: self[name][mask] for name in self._arrays}
        self._size = int(mask.sum())


class ColumnBlocks:
    """A table with very many rows, stored in blocks: appending rows never copies earlier rows.

    Args:
        types: dtype of each column.
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        self._types = dict(types)
        self._blocks: list[Columns] = []

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks)

    def __iter__(self) -> Iterator[Columns]:
        return iter(self._blocks)

    def extend(self, num_rows: int, values: Mapping[str, np.ndarray]) -> None:
        """Append rows; `values` has an array for every column."""
        at = 0
        while at < num_rows:
            if not self._blocks or len(self._blocks[-1]) == _BLOCK_ROWS:
                self._blocks.append(Columns(self._types))
                self._blocks[-1].reserve(_BLOCK_ROWS)
            end = min(num_rows, at + _BLOCK_ROWS - len(self._blocks[-1]))
            self._blocks[-1].extend(end - at, {name: column[at:end] for name, column in values.items()})
            at = end
