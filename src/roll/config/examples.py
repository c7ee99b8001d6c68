"""Sources of examples: conversations, texts and compared answers, which are trained on as they are."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Tag, field_validator

from roll.config.base import option
from roll.config.sources import ConversationColumns, FileTable, HuggingFaceTable, PythonTable, Share, SumsTask

__all__ = [
    "ArithmeticExamples",
    "ExampleColumns",
    "ExampleDataConfig",
    "FileExamples",
    "HuggingFaceExamples",
    "PythonExamples",
    "TooLong",
]

TooLong: TypeAlias = Literal["refuse", "cut", "skip"]


class _Examples(Share):
    weight: float | None = option(
        None,
        "Share of each step's examples, relative to the other sources; `null`: as many as it has, so that every "
        "example comes once in an epoch.",
        gt=0,
    )
    too_long: TooLong = option(
        "refuse",
        "What becomes of an example with more tokens than the context: `refuse` ends the run, `cut` leaves out the end "
        "of its answer, `skip` leaves out the example.",
    )


class ArithmeticExamples(SumsTask, _Examples):
    """Seeded sums such as `3 + 4`, each with its answer; training and held-out operand pairs are disjoint."""

    answer_template: str = option(
        "{answer}", "What is answered: `{answer}` is the number, `{sum}` what was asked for, such as `3 + 4`."
    )

    @field_validator("answer_template")
    @classmethod
    def _has_answer(cls, value: str) -> str:
        if "{answer}" not in value:
            raise ValueError(f"answer_template {value!r} leaves out the number: put {{answer}} into it")
        return value


class ExampleColumns(ConversationColumns, _Examples):
    """Meaning of a row's columns. If several could apply, the first of these keys decides; `null` turns one off."""

    held_out: float = option(
        0.1,
        "Share of the source kept for evaluation alone (unless a separate `split` or file is given).",
        ge=0,
        lt=1,
    )
    messages_key: str | None = option("messages", "Column with a whole conversation: a list of chat messages.")
    conversations_key: str | None = option(
        "conversations", "Column with a whole conversation as ShareGPT writes it: a list of `{from, value}`."
    )
    prompt_key: str | None = option("prompt", "Column with what is asked: text, or a list of chat messages.")
    completion_key: str | None = option(
        "completion", "Column with the answer: text, a list of chat messages, or the whole conversation."
    )
    chosen_key: str = option("chosen", "Column with the preferred answer, in any form that `completion_key` takes.")
    rejected_key: str = option("rejected", "Column with the other answer.")
    instruction_key: str | None = option(
        "instruction", "Column with what is asked, as Alpaca writes it; `input`, if it has one, comes below it."
    )
    input_key: str | None = option("input", "Column with what the instruction is about.")
    output_key: str | None = option("output", "Column with the answer to the instruction.")
    text_key: str | None = option("text", "Column with plain text, every token of which is trained.")
    label_key: str = option("label", "Column that says whether an answer is wanted: true or false, 1 or 0.")
    margin_key: str | None = option(
        "margin", "Column that says by how much the preferred answer is better; optional in a row."
    )
    score_key: str = option("score", "Column with an answer's score, which a reward model should give.")
    limit: int | None = option(None, "Use only the first N rows.", ge=1)


class FileExamples(FileTable, ExampleColumns):
    """A JSONL or Parquet file."""


class HuggingFaceExamples(HuggingFaceTable, ExampleColumns):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""


class PythonExamples(PythonTable, ExampleColumns):
    """Rows from Python: your own function or class, or the objects given to `roll.train(config, data=…)`."""


ExampleDataConfig = Annotated[
    Annotated[ArithmeticExamples, Tag("arithmetic")]
    | Annotated[FileExamples, Tag("file")]
    | Annotated[HuggingFaceExamples, Tag("huggingface")]
    | Annotated[PythonExamples, Tag("python")],
    Discriminator("source"),
]
