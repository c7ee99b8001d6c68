"""Prompts and examples from rows: of a file, of a Hugging Face dataset, or that Python makes."""

from __future__ import annotations

from typing import assert_never

from roll.config.data import FileData, HuggingFaceData, PythonData
from roll.config.sources import FileTable, HuggingFaceTable, PythonTable
from roll.data.files import file_tables
from roll.data.huggingface import huggingface_tables
from roll.data.python import python_tables
from roll.data.rows import PromptReader, RowItems, Table, split_rows
from roll.types import Prompt

__all__ = ["table_prompts", "tables_of"]


def table_prompts(
    config: FileData | HuggingFaceData | PythonData, domain: str, seed: int
) -> tuple[RowItems[Prompt], RowItems[Prompt]]:
    """Training and held-out prompts of a table, or of a table each.

    Raises:
        DataError: a table is missing, malformed (with the row's place), or empty.
        ConfigError: the user's function, which makes the rows, cannot be imported.
    """
    return split_rows(PromptReader(config, domain), tables_of(config, domain, config.prompt_key), seed)


def tables_of(
    config: FileTable | HuggingFaceTable | PythonTable, domain: str, text_key: str | None
) -> tuple[Table, Table | None]:
    """The table, and the one that is held out, if it is another; nothing is read yet.

    Args:
        config: the source.
        domain: its name, for messages.
        text_key: the column that a row stands for which is a text alone.

    Raises:
        DataError: one is not there, or is of another kind.
        ConfigError: the user's function, which makes the rows, cannot be imported.
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
