"""Sources of data rows, for prompts as well as for examples."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import PrivateAttr, field_validator, model_validator

from roll.config.base import FUNCTION, Section, option, path_option

__all__ = [
    "ConversationColumns",
    "FileTable",
    "HuggingFaceTable",
    "PythonTable",
    "Share",
    "SumsTask",
    "validate_unique_names",
]


class Share(Section):
    """What all entries of `data` have in common, and how their user messages are built."""

    domain: str = option("", "Name under which metrics and quotas are kept; the source's own name if empty.")
    system_prompt: str | None = option(None, "System message put before every prompt.")
    prompt_template: str = option(
        "{prompt}", "How the user message is built; `{prompt}` stands for the source's own text."
    )

    @field_validator("prompt_template")
    @classmethod
    def _template(cls, value: str) -> str:
        if "{prompt}" not in value:
            raise ValueError(f"{value!r} does not contain '{{prompt}}': the prompt's text would be lost")
        return value


class ConversationColumns(Share):
    """Optional columns of rows in addition to messages, and how unreadable rows are treated."""

    system_key: str | None = option(
        "system",
        "Column with a row's own system message, which comes in the place of `system_prompt`; by default a column "
        "`system_prompt` is read as well.",
    )
    tools_key: str | None = option(
        "tools", "Column with the tools that the chat template shows: a list of JSON schemas, or its text."
    )
    history_key: str | None = option(
        "history", "Column with earlier turns, a list of `[question, answer]`: context of what is asked."
    )
    template_kwargs_key: str | None = option(
        "chat_template_kwargs", "Column with further arguments of the chat template, such as `enable_thinking`."
    )
    ignored_fields: list[str] = option(
        [],
        "Columns, and fields of messages and of content parts, that are left unread; any other that could change what "
        "a row means is refused by its name.",
        examples=[["images", "emotion"]],
    )
    on_bad_row: Literal["refuse", "skip"] = option(
        "refuse",
        "What becomes of malformed rows: `refuse` names them and ends the run, `skip` leaves them out and counts them.",
    )


def validate_unique_names(entries: list[Any]) -> list[Any]:
    """Validate that no two sources have the same name (for every pipeline's `data`)."""
    names = [entry.domain or entry.source for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several sources are called {twice}: give each its own `domain`")
    return entries


class SumsTask(Share):
    """Seeded sums such as `3 + 4`; training and held-out operand pairs are disjoint."""

    held_out: float = option(0.3, "Share of the operand pairs kept for evaluation.", ge=0, lt=1)
    source: Literal["arithmetic"] = option(..., "Name of the source.")
    operations: list[Literal["+", "-", "*"]] = option(["+"], "Operations to draw from.", min_length=1)
    min_operand: int = option(1, "Smallest operand.")
    max_operand: int = option(9, "Largest operand.")

    @field_validator("operations")
    @classmethod
    def _different(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"{value} names an operation twice")
        return value

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.max_operand < self.min_operand:
            raise ValueError(f"max_operand {self.max_operand} is below min_operand {self.min_operand}")
        return self


class FileTable(Section):
    """A JSONL or Parquet file."""

    source: Literal["file"] = option(..., "Name of the source.")
    path: str = path_option(..., "The file, `.jsonl` or `.parquet`.", min_length=1, examples=["data/train.jsonl"])
    held_out_path: str | None = path_option(None, "Another file for evaluation; then nothing is held out of `path`.")


class HuggingFaceTable(Section):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""

    source: Literal["huggingface"] = option(..., "Name of the source.")
    path: str = path_option(..., "A directory (of `save_to_disk`, or data files) or a hub id.", min_length=1)
    name: str | None = option(None, "Configuration of the dataset, where it has several.")
    split: str = option("train", "Split for training.")
    held_out_split: str | None = option(None, "Split for evaluation; then nothing is held out of `split`.")


class PythonTable(Section):
    """Rows from Python: your own function or class, or the objects given to `roll.train(config, data=…)`."""

    source: Literal["python"] = option(..., "Name of the source.")
    function: str | None = path_option(
        None,
        "Where it is: `package.module:name`, or a file: `path/to/file.py:name`. Called with `options`, it gives rows: "
        "dictionaries, or texts, which are prompts without an answer, or plain texts to learn. Rows for evaluation "
        "alone are its `held_out`, if it has that. `null` where rows are given as objects.",
        examples=["my_package.tasks:make", "tasks.py:Sums"],
        pattern=FUNCTION,
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the function or class.")
    _rows: Any = PrivateAttr(None)
    _held_out_rows: Any = PrivateAttr(None)

    @property
    def given(self) -> tuple[Any, Any]:
        """Training and held-out rows if they were passed as objects, otherwise `None`."""
        return self._rows, self._held_out_rows

    def with_rows(self, rows: Any, held_out: Any = None) -> Self:
        """Return a copy that carries these objects; the resolved configuration does not include them."""
        copy = self.model_copy()
        copy._rows, copy._held_out_rows = rows, held_out
        return copy
