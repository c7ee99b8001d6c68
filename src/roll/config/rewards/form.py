"""Rewards for following instructions, a format, or a schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.rewards.base import AUTO, RewardSection, check_pattern, reasoning_left_out

__all__ = ["FormatReward", "InstructionsReward"]


class InstructionsReward(RewardSection):
    """Verifiable instructions, as the data set IFEval lists them in every row; each has a metric."""

    type: Literal["instructions"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    score: Literal["all", "share"] = option(
        "all", "1 where all instructions are followed, or the share of them that is."
    )
    loose: bool = option(
        False, "Accept an answer that follows once its first or last line, or its asterisks, are taken away."
    )
    ids_key: str = option("instruction_id_list", "Column with the instructions' names, a list.")
    arguments_key: str = option("kwargs", "Column with the arguments of each, a list of mappings.")


class FormatReward(RewardSection):
    """1 if the answer has the required format, otherwise 0; has no verdict. With `gate: true`, all or nothing."""

    type: Literal["format"] = option(..., "Kind of reward.")
    reasoning: str = option(
        AUTO,
        "Where the JSON is read: `auto`, in what follows the model's reasoning; `keep`, in the whole answer; or in "
        "what follows the last of a closing tag. Tags and the pattern are those of the whole answer.",
        examples=["auto", "keep", "</reasoning>"],
    )
    tags: list[str] = option(
        [], "Tags that occur once each, closed, with content, in this order.", examples=[["think", "answer"]]
    )
    only_tags: bool = option(False, "Nothing but white space may stand outside the tags.")
    first_tag_open: bool = option(False, "The prompt already opens the first tag, so the answer begins inside it.")
    pattern: str | None = option(
        None, "A regular expression (Python's syntax, `.` also for line ends) that the whole answer must match."
    )
    json_schema: dict[str, Any] | None = option(
        None, "JSON Schema of the answer, or of what stands in `json_tag`; a code fence around it is fine."
    )
    json_tag: str | None = option(None, "The tag that holds the JSON.", examples=["answer"])
    partial: bool = option(False, "Give the share of requirements that are met, instead of 1 for all of them.")

    @property
    def scores_reasoning(self) -> bool:
        """See the base class."""
        return True

    @field_validator("tags")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for tag in value:
            if not tag or not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"'{tag}' is not the name of a tag: write it without brackets, such as 'answer'")
        if len(set(value)) < len(value):
            raise ValueError(f"{value} names a tag twice")
        return value

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @model_validator(mode="after")
    def _asks_for_something(self) -> FormatReward:
        if not self.tags and self.pattern is None and self.json_schema is None:
            raise ValueError("it asks for nothing: set tags, pattern or json_schema")
        if (self.only_tags or self.first_tag_open) and not self.tags:
            raise ValueError("only_tags and first_tag_open need tags: name them")
        if self.json_tag is not None and (self.json_schema is None or self.json_tag not in self.tags):
            raise ValueError(f"json_tag '{self.json_tag}' needs json_schema, and to be one of tags {self.tags}")
        return self
