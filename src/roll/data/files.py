"""Prompts from a JSONL or Parquet file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.data import FileData
from roll.data.rows import prompt_of_row, split_held_out
from roll.errors import DataError
from roll.registry import nearest
from roll.types import Prompt

__all__ = ["file_prompts", "read_rows"]


def file_prompts(config: FileData, domain: str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts of a file, or of a file each.

    Raises:
        DataError: a file is missing, malformed (with its line), or empty.
    """
    prompts = _read(config, Path(config.path), domain, "")
    if config.held_out_path is None:
        return split_held_out(prompts, config.held_out, seed)
    return prompts, _read(config, Path(config.held_out_path), domain, "held_out/")


def _read(config: FileData, path: Path, domain: str, prefix: str) -> list[Prompt]:
    rows = itertools.islice(read_rows(path), config.limit)
    prompts = [prompt_of_row(config, domain, row, f"{prefix}{number}", where) for number, where, row in rows]
    if not prompts:
        raise DataError(f"'{path}' holds no rows: give a file with at least one prompt.")
    return prompts


def read_rows(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Rows of a file one after the other: number from 1, its place in words, and its columns.

    Raises:
        DataError: the file is missing, cannot be read, or a row is malformed.
    """
    if not path.is_file():
        raise DataError(_missing(path))
    match path.suffix:
        case ".jsonl" | ".json" | ".ndjson":
            yield from _read_jsonl(path)
        case ".parquet":
            yield from _read_parquet(path)
        case _:
            raise DataError(
                f"'{path}' is neither .jsonl nor .parquet: convert it, or rename it to what it is."
            )


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"'{path}' is a directory: name a file in it, or use `source: huggingface` for a dataset's directory."
    if not path.parent.is_dir():
        return f"data file '{path}' does not exist, nor does its directory: check the path (from where the command runs)."
    return f"data file '{path}' does not exist.{nearest(path.name, [p.name for p in path.parent.iterdir()])}"


def _read_jsonl(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"'{path}', line {number}"
                    yield number, where, _object(line, where)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from error


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text (byte {error.start}): {line[:40]!r}.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {line[:60]!r}.") from None
    except ValueError as error:  # an integer with too many digits for Python
        raise DataError(f"{where}: {error}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, got {type(value).__name__}: {line[:60]!r}.")
    return value


def _read_parquet(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, f"'{path}', row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"'{path}' is not a readable Parquet file: {str(error).splitlines()[0]}") from error
