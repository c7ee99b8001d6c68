"""Tables of rows in Hugging Face datasets, which are directories or hub IDs, through `datasets`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.sources import HuggingFaceTable
from roll.data.cells import ArrowRow, Row
from roll.data.rows import Table
from roll.errors import DataError
from roll.registry import did_you_mean, format_search_directory

__all__ = ["DatasetTable", "load_huggingface_tables"]

MAX_CHECKED_FILES = 64
"""Maximum number of files whose modification times are checked before a row is read, in about 0.1 ms."""


def load_huggingface_tables(config: HuggingFaceTable) -> tuple[Table, Table | None]:
    """Load the table of the training split, and the held-out table if a separate split is configured.

    Raises:
        DataError: The dataset or a split does not exist.
    """
    splits = _load_splits(config)
    table = DatasetTable(config, splits, config.split)
    return table, None if config.held_out_split is None else DatasetTable(config, splits, config.held_out_split)


class DatasetTable:
    """One split of a Hugging Face dataset; its rows stay in the Arrow files that `datasets` maps into memory."""

    def __init__(self, config: HuggingFaceTable, splits: Mapping[str, Any], split: str) -> None:
        if split not in splits:
            raise DataError(
                f"dataset '{config.path}' has no split '{split}'.{did_you_mean(split, list(splits))} Available "
                f"splits: {', '.join(splits)}."
            )
        self.name = f"dataset '{config.path}', split '{split}'"
        self._rows = splits[split]
        _disable_decoding(getattr(self._rows, "info", self._rows).features)  # `features` of the dataset is a copy
        self._files = [(name, _get_identity(name)) for name in _list_mapped_files(self._rows)]
        self._next = 0
        """Index of the file that is checked next."""

    def scan(self, limit: int | None) -> Iterator[Row]:
        """Yield the rows, at most `limit`; see `Table.scan`."""
        try:
            for number, row in enumerate(itertools.islice(self._rows, limit)):
                if number % 1024 == 0:
                    self._check_unchanged()
                yield ArrowRow(row)
        except DataError:
            raise
        except Exception as error:  # decoders of other features may raise anything
            raise DataError(f"{self.name} cannot be read: {_get_first_line(error)}") from error

    def read_row(self, index: int) -> Row:
        """Return one row, by its index."""
        # A file that is written to while it is mapped returns other rows, or crashes the process if it has become
        # shorter. So a row is read only if the files are unchanged.
        self._check_unchanged()
        return ArrowRow(self._rows[index])

    def _check_unchanged(self) -> None:
        """Check that the files are unchanged; each call checks the next `MAX_CHECKED_FILES` files at most.

        Raises:
            DataError: A file has changed. (If a file was removed or replaced, the mapping keeps its old content.)
        """
        for _ in range(min(len(self._files), MAX_CHECKED_FILES)):
            name, before = self._files[self._next]
            self._next = (self._next + 1) % len(self._files)
            now = _get_identity(name)
            if now != before and now is not None and before is not None and now[0] == before[0]:
                raise DataError(f"'{name}' changed while the run was using it: start a new run with the changed file.")

    def get_key(self, index: int) -> str:
        """Return the row's 1-based number."""
        return str(index + 1)

    def describe_location(self, index: int) -> str:
        """Return the dataset, the split and the row's 1-based number."""
        return f"{self.name}, row {index + 1}"


def _load_splits(config: HuggingFaceTable) -> Mapping[str, Any]:
    """Load the dataset's splits by name."""
    import datasets

    loaded: Any
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would overwrite the run's display
    try:
        path = Path(config.path).expanduser()
        if _is_saved_to_disk(path):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else config.path, name=config.name)
    except Exception as error:  # readers and the network may raise anything about the user's source
        raise DataError(
            f"dataset '{config.path}'{format_search_directory(config.path)} cannot be loaded: "
            f"{_get_first_line(error)} Specify a directory (written by `save_to_disk`, or with data files) or a Hub "
            "ID that this machine can reach."
        ) from error
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
    # a split that was saved alone is used for any requested split
    if not isinstance(loaded, Mapping):
        return {config.split: loaded}
    return {str(name): rows for name, rows in loaded.items()}


def _disable_decoding(feature: Any) -> None:
    """Configure a dataset to return images, audio and video as bytes and path; ROLL decodes them with its own limits.

    If `datasets` decoded them, one corrupted image would make the whole dataset unreadable, not only its row.
    """
    if isinstance(feature, Mapping):
        for inner in feature.values():
            _disable_decoding(inner)
    elif isinstance(feature, list | tuple):
        for inner in feature:
            _disable_decoding(inner)
    elif type(feature).__name__ in ("Image", "Audio", "Video"):
        feature.decode = False
    elif hasattr(feature, "feature"):  # a list
        _disable_decoding(feature.feature)


def _list_mapped_files(rows: Any) -> list[str]:
    return [str(file["filename"]) for file in getattr(rows, "cache_files", ())]


def _get_identity(name: str) -> tuple[tuple[int, int], int, int] | None:
    """Return a file's device and inode, its size, and its modification time; `None` if it does not exist."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns


def _is_saved_to_disk(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json"))


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
