"""Rewards for following instructions, a format, or a schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.rewards.adaptive import PooledReward
from roll.config.rewards.base import AUTO_REASONING, build_auto_reasoning_option, check_pattern

__all__ = ["FormatReward", "InstructionsReward"]


class InstructionsReward(PooledReward):
    """Verifiable instructions in IFEval's format. Each instruction has its own metric."""

    type: Literal["instructions"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    score: Literal["all", "share"] = option(
        "all", "`all`: 1 if all instructions are followed, otherwise 0. `share`: the fraction that is followed."
    )
    loose: bool = option(
        False,
        "Whether an answer is also accepted if it follows the instructions without its first line, its last line or "
        "its asterisks.",
    )
    ids_key: str = option("instruction_id_list", "Column with the list of the instructions' names.")
    arguments_key: str = option(
        "kwargs", "Column with the list of the instructions' arguments; each entry is a mapping."
    )


class FormatReward(PooledReward):
    """Score 1 for an answer in the required format, and 0 otherwise, whether or not it is correct. With
    `gate: true`, the total reward of an answer in another format is 0.
    """

    type: Literal["format"] = option(..., "Reward type.")
    reasoning: str = option(
        AUTO_REASONING,
        "Part of the answer from which JSON is read. `auto`: the text after the model's reasoning. `keep`: the whole "
        "answer. Any other value is a closing tag: the text after its last occurrence. Tags and pattern always apply "
        "to the whole answer.",
        examples=["auto", "keep", "</reasoning>"],
    )
    tags: list[str] = option(
        [],
        "Tags that must occur in this order, each exactly once, with content and a closing tag.",
        examples=[["think", "answer"]],
    )
    only_tags: bool = option(False, "Whether only whitespace is allowed outside the tags.")
    first_tag_open: bool = option(
        False, "Whether the prompt ends with the first tag, so that the answer begins inside it."
    )
    pattern: str | None = option(
        None, "Regular expression (Python's syntax; `.` also matches line ends) that the whole answer must match."
    )
    json_schema: dict[str, Any] | None = option(
        None, "JSON Schema of the answer, or of the content of `json_tag`; a code fence around the JSON is allowed."
    )
    json_tag: str | None = option(None, "Tag that contains the JSON.", examples=["answer"])
    partial: bool = option(False, "Whether the reward is the fraction of fulfilled requirements instead of 1 or 0.")

    @property
    def scores_reasoning(self) -> bool:
        """Always true: tags and pattern apply to the whole answer, and reasoning is removed only from JSON."""
        return True

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, value: list[str]) -> list[str]:
        for tag in value:
            if not tag or not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"'{tag}' is not a valid tag name: expected a name without brackets, such as 'answer'")
        if len(set(value)) < len(value):
            raise ValueError(f"{value} contains duplicate tags: list each tag once")
        return value

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @model_validator(mode="after")
    def _check_requirements(self) -> FormatReward:
        if not self.tags and self.pattern is None and self.json_schema is None:
            raise ValueError("at least one of tags, pattern and json_schema must be set")
        if (self.only_tags or self.first_tag_open) and not self.tags:
            raise ValueError("only_tags and first_tag_open require tags: set tags")
        if self.json_tag is not None and (self.json_schema is None or self.json_tag not in self.tags):
            raise ValueError(
                f"json_tag requires json_schema and must be one of the tags {self.tags}, got '{self.json_tag}'"
            )
        return self
