"""Prompts and examples from rows of a file, of a Hugging Face dataset, or of Python objects."""

from __future__ import annotations

import logging
from typing import assert_never

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.config.sources import FileTable, HuggingFaceTable, PythonTable
from roll.data.bad_rows import BadRows
from roll.data.files import file_tables
from roll.data.huggingface import huggingface_tables
from roll.data.prompts import PromptReader
from roll.data.python import python_tables
from roll.data.rows import RowItems, Table, split_rows
from roll.errors import DataError
from roll.types import Prompt

__all__ = ["table_prompts", "tables_of", "warn_of_bad_rows"]

logger = logging.getLogger(__name__)


def table_prompts(
    config: FileData | HuggingFaceData | PythonData, domain: str, seed: int, pipeline: str = ""
) -> tuple[RowItems[Prompt], RowItems[Prompt]]:
    """Return training and held-out prompts, from one table or from a table each.

    Raises:
        DataError: A table is missing, malformed (with the row's place), or empty.
        ConfigError: The user's function, which returns the rows, cannot be imported.
    """
    bad = BadRows()
    sides = split_rows(PromptReader(config, domain, bad, pipeline), tables_of(config, domain, config.prompt_key), seed)
    bad.num_rows = len(sides[0]) + len(sides[1]) + bad.counts.total()
    warn_of_bad_rows(bad, config, domain)
    return sides


def warn_of_bad_rows(bad: BadRows, config: FileData | HuggingFaceData | PythonData, domain: str) -> None:
    """Report the rows that cannot be used, if any.

    Raises:
        DataError: The rows must not be skipped.
    """
    if not bad.counts:
        return
    lines = list(bad.lines(domain, "used"))
    if config.on_bad_row == "refuse":
        raise DataError("\n".join([*lines, "Correct them, or leave them out with `on_bad_row: skip`."]))
    logger.warning("%s", "\n".join([*lines, "  They are left out."]))


def tables_of(
    config: FileTable | HuggingFaceTable | PythonTable, domain: str, text_key: str | None
) -> tuple[Table, Table | None]:
    """Return the table, and the held-out table if it is another one; nothing is read yet.

    Args:
        config: The source.
        domain: The source's name, for messages.
        text_key: The column for rows that are a text alone.

    Raises:
        DataError: A table does not exist, or is of an unsupported type.
        ConfigError: The user's function, which returns the rows, cannot be imported.
    """
    match config:
        case FileTable():
            return file_tables(config)
        case HuggingFaceTable():
            return huggingface_tables(config)
        case PythonTable():
            return python_tables(config, domain, text_key)
        case _:
            assert_never(config)
