"""Sources of training examples: conversations, plain text, and preference pairs."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Tag, field_validator

from roll.config.base import option
from roll.config.sources import ConversationColumns, DataEntryBase, FileTable, HuggingFaceTable, PythonTable, SumsTask

__all__ = [
    "ArithmeticExamples",
    "ExampleColumns",
    "ExampleDataConfig",
    "FileExamples",
    "HuggingFaceExamples",
    "PythonExamples",
    "TooLongHandling",
]

TooLongHandling: TypeAlias = Literal["refuse", "cut", "skip"]


class _ExampleSource(DataEntryBase):
    weight: float | None = option(
        None,
        "Fraction of each step's examples, relative to the other sources; `null`: proportional to the number of "
        "examples in the source, so that every example is drawn once in an epoch.",
        gt=0,
    )
    too_long: TooLongHandling = option(
        "refuse",
        "Handling of an example with more tokens than the context: `refuse` ends the run, `cut` removes the end of the "
        "answer, `skip` drops the example.",
    )


class ArithmeticExamples(SumsTask, _ExampleSource):
    """Seeded sums such as `3 + 4`, each with its answer; training and held-out operand pairs are disjoint."""

    answer_template: str = option(
        "{answer}", "Template of the answer: `{answer}` is the number, `{sum}` the task, such as `3 + 4`."
    )

    @field_validator("answer_template")
    @classmethod
    def _check_answer_template(cls, value: str) -> str:
        if "{answer}" not in value:
            raise ValueError(f"answer_template must contain {{answer}}, got {value!r}")
        return value


class ExampleColumns(ConversationColumns, _ExampleSource):
    """Columns with the text of an example; `null` disables a key.

    If a row has several of these columns, the first one in the order of the keys is used.
    """

    held_out: float = option(
        0.1,
        "Fraction of the source that is reserved for evaluation. It is ignored if the source has a separate split or "
        "file for evaluation.",
        ge=0,
        lt=1,
    )
    messages_key: str | None = option("messages", "Column with a whole conversation: a list of chat messages.")
    conversations_key: str | None = option(
        "conversations", "Column with a whole conversation in ShareGPT's format: a list of `{from, value}`."
    )
    prompt_key: str | None = option("prompt", "Column with the prompt: text, or a list of chat messages.")
    completion_key: str | None = option(
        "completion", "Column with the answer: text, a list of chat messages, or the whole conversation."
    )
    chosen_key: str = option("chosen", "Column with the chosen answer, in any form that `completion_key` accepts.")
    rejected_key: str = option("rejected", "Column with the rejected answer, in the same forms.")
    instruction_key: str | None = option(
        "instruction", "Column with the instruction, in Alpaca's format; the row's `input`, if any, is appended."
    )
    input_key: str | None = option("input", "Column with the input of the instruction, in Alpaca's format.")
    output_key: str | None = option("output", "Column with the answer to the instruction.")
    text_key: str | None = option("text", "Column with plain text; the model is trained on all of its tokens.")
    label_key: str = option("label", "Column with the label of a single answer: desirable (true, 1) or not (false, 0).")
    margin_key: str | None = option(
        "margin", "Column with the margin by which the chosen answer is better; optional in a row."
    )
    score_key: str = option("score", "Column with the target score of an answer, for a reward model with regression.")
    limit: int | None = option(None, "Use only the first N rows.", ge=1)


class FileExamples(FileTable, ExampleColumns):
    """A JSONL or Parquet file."""


class HuggingFaceExamples(HuggingFaceTable, ExampleColumns):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""


class PythonExamples(PythonTable, ExampleColumns):
    """Rows from Python: your own function or class, or the objects passed to `roll.train(config, data=…)`."""


ExampleDataConfig = Annotated[
    Annotated[ArithmeticExamples, Tag("arithmetic")]
    | Annotated[FileExamples, Tag("file")]
    | Annotated[HuggingFaceExamples, Tag("huggingface")]
    | Annotated[PythonExamples, Tag("python")],
    Discriminator("source"),
]
