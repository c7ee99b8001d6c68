"""Rewards that compare an answer's text with a reference, or check its form."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.rewards.base import RewardSection, check_pattern, reasoning_left_out

__all__ = [
    "ChoiceReward",
    "ExactReward",
    "LengthPenalty",
    "MathReward",
    "RegexReward",
    "RepetitionPenalty",
    "ShortAnswerReward",
]


class MathReward(RewardSection):
    """1 if the final answer is mathematically equal to the reference, otherwise 0."""

    type: Literal["math"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    extract: Literal["auto", "boxed", "last_number"] = option(
        "auto",
        "Which answer counts: `boxed`, the last number, or boxed/LaTeX first and the last number otherwise.",
    )

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class ExactReward(RewardSection):
    """1 if the answer's text equals the reference, otherwise 0."""

    type: Literal["exact"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    ignore_case: bool = option(True, "Compare without regard to upper and lower case.")
    strip: bool = option(True, "Ignore white space around both.")

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class RegexReward(RewardSection):
    """1 if a regular expression matches in the answer, otherwise 0; `{answer}` in it is replaced by the reference."""

    type: Literal["regex"] = option(..., "Kind of reward.")
    pattern: str = option(..., "The regular expression (Python's syntax).", min_length=1, examples=["Answer: {answer}"])

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        check_pattern(value.replace("{answer}", "x"))
        return value

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return "{answer}" in self.pattern


class ChoiceReward(RewardSection):
    """Multiple choice: 1 if the letter that the answer chooses is the reference's, otherwise 0."""

    type: Literal["choice"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    letters: str = option("ABCDE", "Letters that may be chosen.", pattern=r"^[A-Z]{2,26}$")

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class ShortAnswerReward(RewardSection):
    """Short answers to questions, compared by words without case, punctuation and articles, as in SQuAD.

    The text between the last `<answer>` and `</answer>` is compared, or the whole text without these tags.
    """

    type: Literal["short_answer"] = option(..., "Kind of reward.")
    reasoning: str = reasoning_left_out()
    score: Literal["exact", "f1"] = option("f1", "1 for the same words alone, or the F1 score over words.")
    references_key: str | None = option(
        None,
        "Column with further reference answers: a text, a list of texts (also as JSON), or an object with them under "
        "`text`, `value` or `aliases`; null where there are none. The best counts.",
        examples=["aliases"],
    )

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return self.references_key is None


class RepetitionPenalty(RewardSection):
    """0 to -1 for repeated n-grams of tokens; give it a weight next to the main reward."""

    type: Literal["repetition"] = option(..., "Kind of reward.")
    ngram_size: int = option(4, "Tokens that are compared as one.", unit="tokens", ge=1)
    tolerance: float = option(0.1, "Share of repeated n-grams that costs nothing.", ge=0, lt=1)
    require_finished: bool = option(False, "Give 0, no penalty, where the answer was cut off.")


class LengthPenalty(RewardSection):
    """0 to -1 for tokens beyond a limit; give it a weight next to the main reward."""

    type: Literal["length"] = option(..., "Kind of reward.")
    free_tokens: int = option(..., "Tokens that cost nothing.", unit="tokens", ge=0, examples=[256])
    full_tokens: int = option(..., "Tokens at which the penalty is -1.", unit="tokens", ge=1, examples=[512])
    require_finished: bool = option(False, "Give 0, no penalty, where the answer was cut off.")

    @model_validator(mode="after")
    def _range(self) -> LengthPenalty:
        if self.full_tokens <= self.free_tokens:
            raise ValueError(f"full_tokens {self.full_tokens} must exceed free_tokens {self.free_tokens}")
        return self
