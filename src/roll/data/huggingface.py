"""Prompts and examples from a Hugging Face dataset: a directory or a hub id, through `datasets`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.sources import HuggingFaceTable
from roll.data.cells import ArrowRow, Row
from roll.data.rows import Table
from roll.errors import DataError
from roll.registry import looked_from, nearest

__all__ = ["DatasetTable", "huggingface_tables"]


def huggingface_tables(config: HuggingFaceTable) -> tuple[Table, Table | None]:
    """The split, and the one that is held out, if it is another.

    Raises:
        DataError: the dataset or a split is not there.
    """
    splits = _load(config)
    table = DatasetTable(config, splits, config.split)
    return table, None if config.held_out_split is None else DatasetTable(config, splits, config.held_out_split)


class DatasetTable:
    """One split; its rows stay in the Arrow files that `datasets` maps into memory."""

    def __init__(self, config: HuggingFaceTable, splits: Mapping[str, Any], split: str) -> None:
        if split not in splits:
            raise DataError(
                f"dataset '{config.path}' has no split '{split}'.{nearest(split, list(splits))} "
                f"It has: {', '.join(splits)}."
            )
        self.name = f"dataset '{config.path}', split '{split}'"
        self._rows = splits[split]

    def scan(self, limit: int | None) -> Iterator[Row]:
        """See `Table.scan`."""
        try:
            yield from map(ArrowRow, itertools.islice(self._rows, limit))
        except DataError:
            raise
        except Exception as error:  # decoders of its features (images, audio) raise what they like
            raise DataError(f"{self.name} cannot be read: {_first_line(error)}") from error

    def row(self, index: int) -> Row:
        """See `Table.row`."""
        return ArrowRow(self._rows[index])

    def key(self, index: int) -> str:
        """The row's number from 1."""
        return str(index + 1)

    def where(self, index: int) -> str:
        """Dataset, split, and the row's number from 1."""
        return f"{self.name}, row {index + 1}"


def _load(config: HuggingFaceTable) -> Mapping[str, Any]:
    """The dataset's splits by name."""
    import datasets

    loaded: Any
    were_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would write over the run's display
    try:
        path = Path(config.path).expanduser()
        if _saved_to_disk(path):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else config.path, name=config.name)
    except Exception as error:  # its readers and the network raise what they like; all of it is the user's source
        raise DataError(
            f"dataset '{config.path}'{looked_from(config.path)} cannot be loaded: {_first_line(error)} Give a "
            "directory (of `save_to_disk`, or with data files) or a hub id that this machine can reach."
        ) from error
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
    # a single split that was saved alone serves as whichever is asked for
    if not isinstance(loaded, Mapping):
        return {config.split: loaded}
    return {str(name): rows for name, rows in loaded.items()}


def _saved_to_disk(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("dataset_dict.json", "state.json"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
