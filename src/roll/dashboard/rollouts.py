"""An index of a run's rollouts: numeric columns in memory, and previews of prompts and answers in a temporary file.

    rollouts/*.parquet ─ each file once ─► columns (about 60 bytes a rollout) ─ filter, sort ─► a page of rows

A rollout's `row` encodes step, kind (training or evaluation) and position in the file, so that links to it stay valid.
"""

from __future__ import annotations

import json
import math
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from roll.dashboard.columns import Columns
from roll.dashboard.file_columns import LABEL_COLUMNS, MAX_LABELS, NUMBER_COLUMNS, read_columns
from roll.errors import RunDirectoryError
from roll.tracking.reading.files import FileStamp, SafeDirectory
from roll.tracking.reading.rollout_files import MAX_FILE_ROWS, parse_file_name

__all__ = ["KINDS", "Rollouts", "decode_row", "decode_step", "encode_row"]

KINDS = ("train", "eval")
_BLOCK_ROWS = 64
"""Number of rollouts whose previews are compressed together."""


def encode_row(step: int, kind: str, position: int) -> int:
    """Encode step, kind and position in the file as one number below 2⁵³, which JavaScript represents exactly."""
    return (step * len(KINDS) + KINDS.index(kind)) * MAX_FILE_ROWS + position


def decode_row(row: int) -> tuple[str, int]:
    """Return the name of the file that contains a rollout, and the rollout's position in the file."""
    rest, place = divmod(row, MAX_FILE_ROWS)
    step, kind = divmod(rest, len(KINDS))
    return f"{'eval-' if kind else ''}step-{step:06d}.parquet", place


def decode_step(row: int) -> int:
    """Return the step of a rollout from its `row`."""
    return row // MAX_FILE_ROWS // len(KINDS)


@dataclass(slots=True)
class _File:
    stamp: FileStamp
    blocks: list[tuple[int, int]]
    """Offset and length of each block of previews in the temporary file."""


class Rollouts:
    """The index of a run's rollouts: numeric columns, labels and previews, read file by file.

    Args:
        run_dir: the run's directory.
        version_before: returns the trainer's policy version at the start of a step; NaN if it is unknown.
    """

    def __init__(self, run_dir: SafeDirectory, version_before: Callable[[int], float]) -> None:
        self._run_dir = run_dir
        self._version_before = version_before
        self._spool = tempfile.TemporaryFile(prefix="roll-dashboard-")  # noqa: SIM115  (it is the index's)
        self._codes: dict[str, dict[str, int]] = {label: {"": 0} for label in LABEL_COLUMNS}
        self._files: dict[str, _File] = {}
        self._failed: dict[str, tuple[FileStamp, str]] = {}
        types: dict[str, Any] = {
            "row": np.int64,
            "step": np.int32,
            "kind": np.int8,
            "staleness": np.float32,
            **NUMBER_COLUMNS,
        }
        self._columns = Columns(types | dict.fromkeys(LABEL_COLUMNS, np.int16))

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def problems(self) -> list[str]:
        """Problems of files that could not be read."""
        return [problem for _, problem in self._failed.values()]

    def get_column(self, name: str) -> np.ndarray:
        """Return a column for all rollouts, shape [number of rollouts], in the order of the index."""
        return self._columns[name]

    def get_label_values(self, label: str) -> list[str]:
        """Return the values of a label, such as `domain`; the column has indices into this list."""
        return list(self._codes[label])

    def list_pending(self) -> list[tuple[str, FileStamp]]:
        """Return the files that are not indexed yet, by step, and remove deleted and replaced files from the index."""
        there = {name: stamp for name, stamp in self._run_dir.list_stamps("rollouts").items() if parse_file_name(name)}
        gone = [name for name, file in self._files.items() if there.get(name) != file.stamp]
        if gone:
            self._remove_files(gone)
        self._failed = {name: entry for name, entry in self._failed.items() if there.get(name) == entry[0]}
        missing = (name for name in there if name not in self._files and name not in self._failed)
        return [(name, there[name]) for name in sorted(missing, key=_get_sort_key)]

    def add(self, name: str, stamp: FileStamp, num_files_left: int = 0) -> None:
        """Add the rollouts of a file to the index; if it cannot be read, record the problem.

        Args:
            name: name of the file.
            stamp: stamp of the file, from `list_pending`.
            num_files_left: number of files left to read, including this file; it determines how much memory is
                reserved.
        """
        previews = _PreviewSpool(self._spool)
        try:
            columns = read_columns(self._run_dir, name, previews.add)
        except RunDirectoryError as error:
            self._spool.truncate(previews.begin)
            self._failed[name] = (stamp, str(error))
            return
        step, kind = _parse_name(name)
        put: dict[str, Any] = {
            "row": encode_row(step, kind, 0) + np.arange(columns.num_rows),
            "step": step,
            "kind": KINDS.index(kind),
        }
        version = self._version_before(step) if kind == "train" else math.nan
        put["staleness"] = version - columns.numbers["policy_version"]
        put |= columns.numbers | {label: self._encode_labels(label, *columns.labels[label]) for label in LABEL_COLUMNS}
        if num_files_left:
            self._columns.reserve(len(self) + num_files_left * columns.num_rows)
        self._columns.extend(columns.num_rows, put)
        self._files[name] = _File(stamp, previews.finish())

    def read_previews(self, rows: Sequence[int]) -> list[tuple[str, str]]:
        """Return previews of the prompt and the answer of each row."""
        blocks: dict[tuple[str, int], list[list[str]]] = {}
        found = []
        for row in rows:
            name, place = decode_row(row)
            key = (name, place // _BLOCK_ROWS)
            if key not in blocks:
                offset, length = self._files[name].blocks[key[1]]
                self._spool.seek(offset)
                blocks[key] = json.loads(zlib.decompress(self._spool.read(length)))
            prompt, text = blocks[key][place % _BLOCK_ROWS]
            found.append((prompt, text))
        return found

    def find_position(self, row: int) -> int:
        """Return the position of a row in the index.

        Raises:
            KeyError: the row does not exist.
        """
        found = np.flatnonzero(self.get_column("row") == row)
        if not len(found):
            raise KeyError(row)
        return int(found[0])

    def _encode_labels(self, label: str, codes: np.ndarray, texts: list[str]) -> np.ndarray:
        known = self._codes[label]
        for text in texts:
            if len(known) < MAX_LABELS:
                known.setdefault(text, len(known))
        return np.array([known.get(text, 0) for text in texts], np.int16)[codes]

    def _remove_files(self, names: Sequence[str]) -> None:
        for name in names:
            del self._files[name]
        gone = np.array([encode_row(*_parse_name(name), 0) // MAX_FILE_ROWS for name in names])
        self._columns.filter_rows(~np.isin(self.get_column("row") // MAX_FILE_ROWS, gone))


class _PreviewSpool:
    """Writes previews of one file's prompts and answers to a temporary file, in compressed blocks."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self._waiting: list[tuple[str, str]] = []
        self._blocks: list[tuple[int, int]] = []
        self.begin = spool.seek(0, 2)

    def add(self, previews: list[tuple[str, str]]) -> None:
        """Add previews, and write all complete blocks to the file."""
        self._waiting += previews
        whole = len(self._waiting) // _BLOCK_ROWS * _BLOCK_ROWS
        for start in range(0, whole, _BLOCK_ROWS):
            self._write_block(self._waiting[start : start + _BLOCK_ROWS])
        del self._waiting[:whole]

    def finish(self) -> list[tuple[int, int]]:
        """Write the last block, and return the offset and length of each block."""
        if self._waiting:
            self._write_block(self._waiting)
        return self._blocks

    def _write_block(self, block: list[tuple[str, str]]) -> None:
        packed = zlib.compress(json.dumps(block).encode(), 1)
        self._blocks.append((self._spool.tell(), len(packed)))
        self._spool.write(packed)


def _parse_name(name: str) -> tuple[int, str]:
    place = parse_file_name(name)
    assert place is not None, name
    return place


def _get_sort_key(name: str) -> tuple[int, str]:
    return _parse_name(name)
