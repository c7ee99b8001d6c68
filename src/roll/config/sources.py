"""Sources of data rows, for prompts as well as for examples."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import PrivateAttr, field_validator, model_validator

from roll.config.base import FUNCTION_PATTERN, Section, option, path_option

__all__ = [
    "ConversationColumns",
    "DataEntryBase",
    "FileTable",
    "HuggingFaceTable",
    "PythonTable",
    "SumsTask",
    "validate_unique_names",
]


class DataEntryBase(Section):
    """Common keys of all entries of `data`, and the construction of user messages."""

    domain: str = option("", "Name of the source in metrics and quotas; by default the value of `source`.")
    system_prompt: str | None = option(None, "System message at the beginning of every prompt.")
    prompt_template: str = option(
        "{prompt}", "Template of the user message; `{prompt}` is replaced by the source's prompt."
    )

    @field_validator("prompt_template")
    @classmethod
    def _check_prompt_template(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError(f"prompt_template must contain {{prompt}}, got {value!r}")
        return value


class ConversationColumns(DataEntryBase):
    """Optional columns of rows in addition to messages, and the handling of malformed rows."""

    system_key: str | None = option(
        "system",
        "Column with the row's system message, which replaces `system_prompt`. By default, a column `system_prompt` "
        "is read as well.",
    )
    tools_key: str | None = option(
        "tools", "Column with the tools for the chat template: a list of JSON schemas, or this list as JSON text."
    )
    history_key: str | None = option(
        "history", "Column with the turns before the prompt: a list of `[question, answer]` pairs."
    )
    template_kwargs_key: str | None = option(
        "chat_template_kwargs", "Column with additional arguments of the chat template, such as `enable_thinking`."
    )
    images_key: str | None = option(
        "images",
        "Column with images for a vision-language model: paths (relative to the file), bytes or base64. Images "
        "replace `<image>` in the messages; without such a placeholder, they precede the first user message.",
    )
    audios_key: str | None = option(
        "audios",
        "Column with audio for an omni model: WAV files as paths (relative to the file), bytes or base64, or objects "
        "with `array` and `sampling_rate`. Audio replaces `<audio>` in the messages; without such a placeholder, it "
        "precedes the first user message.",
    )
    videos_key: str | None = option(
        "videos",
        "Column with videos for an omni model: objects with a list of `frames` and `fps`, or animated images as "
        "paths, bytes or base64. Videos replace `<video>` in the messages; without such a placeholder, they precede "
        "the first user message.",
    )
    ignored_fields: list[str] = option(
        [],
        "Names of columns, message fields and content-part fields to ignore. Any other unknown field that could "
        "change the meaning of a row is an error.",
        examples=[["images", "emotion"]],
    )
    on_bad_row: Literal["refuse", "skip"] = option(
        "refuse",
        "How to handle malformed rows. `refuse`: report them and end the run. `skip`: drop and count them.",
    )


def validate_unique_names(entries: list[Any]) -> list[Any]:
    """Validate that no two sources have the same name."""
    names = [entry.domain or entry.source for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"source names must be unique, got duplicates: {twice}. Set a different `domain` for each source"
        )
    return entries


class SumsTask(DataEntryBase):
    """Seeded sums such as `3 + 4`; training and held-out operand pairs are disjoint."""

    held_out: float = option(0.3, "Fraction of the operand pairs that is reserved for evaluation.", ge=0, lt=1)
    source: Literal["arithmetic"] = option(..., "Name of the source.")
    operations: list[Literal["+", "-", "*"]] = option(["+"], "Operations to sample from.", min_length=1)
    min_operand: int = option(1, "Smallest operand.")
    max_operand: int = option(9, "Largest operand.")

    @field_validator("operations")
    @classmethod
    def _check_operations(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"{value} contains duplicate operations: list each operation once")
        return value

    @model_validator(mode="after")
    def _check_operands(self) -> Self:
        if self.max_operand < self.min_operand:
            raise ValueError(f"max_operand must be >= min_operand, got {self.max_operand} < {self.min_operand}")
        return self


class FileTable(Section):
    """A JSONL or Parquet file."""

    source: Literal["file"] = option(..., "Name of the source.")
    path: str = path_option(..., "The file, `.jsonl` or `.parquet`.", min_length=1, examples=["data/train.jsonl"])
    held_out_path: str | None = path_option(None, "File for evaluation; if it is set, no rows of `path` are held out.")


class HuggingFaceTable(Section):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""

    source: Literal["huggingface"] = option(..., "Name of the source.")
    path: str = path_option(
        ..., "Directory (written by `save_to_disk`, or with data files) or hub id of the dataset.", min_length=1
    )
    name: str | None = option(None, "Configuration of the dataset, if it has several.")
    split: str = option("train", "Split for training.")
    held_out_split: str | None = option(None, "Split for evaluation; if it is set, no rows of `split` are held out.")


class PythonTable(Section):
    """Rows from Python: your own function or class, or the objects given to `roll.train(config, data=…)`."""

    source: Literal["python"] = option(..., "Name of the source.")
    function: str | None = path_option(
        None,
        "Import path of the function or class: `package.module:name` or `path/to/file.py:name`. It is called with "
        "`options` and returns rows. A row is a dictionary or a string; a string is a prompt without an answer, or "
        "plain text to train on. The optional attribute `held_out` of the result contains the rows for evaluation. "
        "`null` if rows are passed as objects.",
        examples=["my_package.tasks:make", "tasks.py:Sums"],
        pattern=FUNCTION_PATTERN,
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the function or class.")
    _rows: Any = PrivateAttr(None)
    _held_out_rows: Any = PrivateAttr(None)

    @property
    def passed_rows(self) -> tuple[Any, Any]:
        """The training and held-out rows that were passed as Python objects; `None` for rows that were not passed."""
        return self._rows, self._held_out_rows

    def with_rows(self, rows: Any, held_out: Any = None) -> Self:
        """Return a copy with rows as Python objects, which the resolved configuration does not include."""
        copy = self.model_copy()
        copy._rows, copy._held_out_rows = rows, held_out
        return copy
