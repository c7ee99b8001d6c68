"""Loads prompts and examples from the rows of files, Hugging Face datasets or Python objects."""

from __future__ import annotations

import logging
from typing import assert_never

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.config.sources import FileTable, HuggingFaceTable, PythonTable
from roll.data.bad_rows import BadRowCollector
from roll.data.files import open_file_tables
from roll.data.huggingface import load_huggingface_tables
from roll.data.media import build_media_reader
from roll.data.prompts import PromptReader
from roll.data.python import build_python_tables
from roll.data.rows import RowItems, Table, split_rows
from roll.errors import DataError
from roll.media import MediaStore
from roll.types import Prompt

__all__ = ["load_table_prompts", "open_tables", "report_bad_rows"]

logger = logging.getLogger(__name__)


def load_table_prompts(
    config: FileData | HuggingFaceData | PythonData,
    domain: str,
    seed: int,
    pipeline: str = "",
    media: MediaStore | None = None,
) -> tuple[RowItems[Prompt], RowItems[Prompt]]:
    """Load training and held-out prompts from one table or from two.

    Raises:
        DataError: A table is missing, malformed (the message names the row), or empty.
        ConfigError: The user's function that returns the rows cannot be imported.
    """
    bad_rows = BadRowCollector()
    reader = PromptReader(config, domain, bad_rows, pipeline, build_media_reader(config, media))
    sides = split_rows(reader, open_tables(config, domain, config.prompt_key), seed)
    reader.media_columns.check(domain)
    bad_rows.num_rows = len(sides[0]) + len(sides[1]) + bad_rows.counts.total()
    report_bad_rows(bad_rows, config, domain)
    return sides


def report_bad_rows(bad_rows: BadRowCollector, config: FileData | HuggingFaceData | PythonData, domain: str) -> None:
    """Report unusable rows, if there are any.

    Raises:
        DataError: There are unusable rows, and they must not be skipped.
    """
    if not bad_rows.counts:
        return
    lines = list(bad_rows.format_lines(domain, "used"))
    if config.on_bad_row == "refuse":
        remedy = "Correct these rows, or skip all bad rows with `on_bad_row: skip`."
        raise DataError("\n".join(lines if bad_rows.counts.total() == bad_rows.num_rows else [*lines, remedy]))
    logger.warning("%s", "\n".join([*lines, "  They are skipped."]))


def open_tables(
    config: FileTable | HuggingFaceTable | PythonTable, domain: str, text_key: str | None
) -> tuple[Table, Table | None]:
    """Open the table, and the held-out table if there is a separate one, without reading them.

    Args:
        config: The source's entry in the configuration.
        domain: The source's name, for messages.
        text_key: Name of the column for rows that are plain strings.

    Raises:
        DataError: A table does not exist, or is of an unsupported type.
        ConfigError: The user's function that returns the rows cannot be imported.
    """
    match config:
        case FileTable():
            return open_file_tables(config)
        case HuggingFaceTable():
            return load_huggingface_tables(config)
        case PythonTable():
            return build_python_tables(config, domain, text_key)
        case _:
            assert_never(config)
