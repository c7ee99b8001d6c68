"""Rewards that compare an answer's text with a reference, or penalize its length or repetitions."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.rewards.adaptive import PooledReward
from roll.config.rewards.base import RewardSection, build_auto_reasoning_option, check_pattern

__all__ = [
    "ChoiceReward",
    "ExactReward",
    "LengthPenalty",
    "MathReward",
    "RegexReward",
    "RepetitionPenalty",
    "ShortAnswerReward",
]


class MathReward(PooledReward):
    """1 if the final answer is mathematically equivalent to the reference, otherwise 0."""

    type: Literal["math"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    extract: Literal["auto", "boxed", "last_number"] = option(
        "auto",
        "How the final answer is extracted. `boxed`: the content of `\\boxed`. `last_number`: the last number. "
        "`auto`: a boxed or LaTeX expression if there is one, otherwise the last number.",
    )

    @property
    def needs_answer(self) -> bool:
        """Always true: the answer is compared with the reference."""
        return True


class ExactReward(RewardSection):
    """1 if the answer's text equals the reference, otherwise 0."""

    type: Literal["exact"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    ignore_case: bool = option(True, "Whether the comparison ignores case.")
    strip: bool = option(True, "Whether the comparison ignores leading and trailing whitespace.")

    @property
    def needs_answer(self) -> bool:
        """Always true: the answer is compared with the reference."""
        return True


class RegexReward(PooledReward):
    """1 if a regular expression matches somewhere in the answer, otherwise 0. `{answer}` in the expression is replaced
    by the reference.
    """

    type: Literal["regex"] = option(..., "Reward type.")
    pattern: str = option(..., "The regular expression (Python's syntax).", min_length=1, examples=["Answer: {answer}"])

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        check_pattern(value.replace("{answer}", "x"))
        return value

    @property
    def needs_answer(self) -> bool:
        """True if the pattern contains `{answer}`."""
        return "{answer}" in self.pattern


class ChoiceReward(PooledReward):
    """Multiple choice: 1 if the answer selects the reference's letter, otherwise 0."""

    type: Literal["choice"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    letters: str = option("ABCDE", "Letters that may be chosen.", pattern=r"^[A-Z]{2,26}$")

    @property
    def needs_answer(self) -> bool:
        """Always true: the answer is compared with the reference."""
        return True


class ShortAnswerReward(PooledReward):
    """Compares a short answer with the reference by words, ignoring case, punctuation and articles, as in SQuAD.

    The text between the last `<answer>` and `</answer>` is compared, or the whole text without these tags.
    """

    type: Literal["short_answer"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    score: Literal["exact", "f1"] = option(
        "f1", "`exact`: 1 if the words are equal, otherwise 0. `f1`: F1 score over words."
    )
    references_key: str | None = option(
        None,
        "Column with additional reference answers: a string, a list of strings (or this list as JSON text), or an "
        "object with the answers under `text`, `value` or `aliases`. It is null in rows without additional answers. "
        "The best match counts.",
        examples=["aliases"],
    )

    @property
    def needs_answer(self) -> bool:
        """True if the source's reference answer is the only reference."""
        return self.references_key is None


class RepetitionPenalty(PooledReward):
    """A penalty between 0 and -1 for repeated token n-grams. Set its weight relative to the main reward."""

    type: Literal["repetition"] = option(..., "Reward type.")
    ngram_size: int = option(4, "Number of tokens per n-gram.", unit="tokens", ge=1)
    tolerance: float = option(0.1, "Fraction of repeated n-grams that is not penalized.", ge=0, lt=1)
    require_finished: bool = option(False, "Whether truncated answers are not penalized.")


class LengthPenalty(RewardSection):
    """A penalty between 0 and -1 for tokens beyond a limit. Set its weight relative to the main reward."""

    type: Literal["length"] = option(..., "Reward type.")
    free_tokens: int = option(
        ..., "Number of tokens up to which there is no penalty.", unit="tokens", ge=0, examples=[256]
    )
    full_tokens: int = option(..., "Number of tokens at which the penalty is -1.", unit="tokens", ge=1, examples=[512])
    require_finished: bool = option(False, "Whether truncated answers are not penalized.")

    @model_validator(mode="after")
    def _check_limits(self) -> LengthPenalty:
        if self.full_tokens <= self.free_tokens:
            raise ValueError(f"full_tokens {self.full_tokens} must exceed free_tokens {self.free_tokens}")
        return self
