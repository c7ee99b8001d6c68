"""How answers are scored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from roll.config.base import Section, option

__all__ = [
    "ChoiceReward",
    "EnvironmentReward",
    "ExactReward",
    "LengthPenalty",
    "MathReward",
    "PythonReward",
    "ReasoningGymReward",
    "RegexReward",
    "RepetitionPenalty",
    "RewardConfig",
    "RewardList",
    "ShortAnswerReward",
    "as_reward_list",
    "check_pattern",
]


class _Reward(Section):
    name: str = option("", "Name of this component in metrics; its type if empty.")
    weight: float = option(1.0, "Factor of this component in the sum.")
    time_limit_s: float = option(
        5.0, "Longest time for one answer; beyond it the answer counts as wrong.", unit="s", gt=0
    )
    require_finished: bool = option(True, "Score 0 where the answer was cut off before the model ended it.")

    @property
    def needs_answer(self) -> bool:
        """Whether it compares with the prompt's reference answer, which must then not be empty."""
        return False


class MathReward(_Reward):
    """1 where the final answer is mathematically equal to the reference (through math-verify), else 0."""

    type: Literal["math"] = option(..., "Kind of reward.")
    extract: Literal["auto", "boxed", "last_number"] = option(
        "auto",
        "Which answer counts: `boxed`, the last number, or boxed/LaTeX first and the last number otherwise.",
    )

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class ExactReward(_Reward):
    """1 where the answer's text equals the reference."""

    type: Literal["exact"] = option(..., "Kind of reward.")
    ignore_case: bool = option(True, "Compare without regard to upper and lower case.")
    strip: bool = option(True, "Ignore white space around both.")

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class RegexReward(_Reward):
    """1 where a regular expression is found in the answer; `{answer}` in it stands for the reference."""

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


class PythonReward(_Reward):
    """A function of yours: `def reward(text, answer, metadata) -> float`.

    Annotated `-> bool`, it also decides whether the task was solved, which accuracy counts.
    """

    type: Literal["python"] = option(..., "Kind of reward.")
    function: str = option(
        ...,
        "Where it is: `package.module:function`, or a file: `path/to/file.py:function`.",
        examples=["my_package.rewards:score", "examples/rewards/short_answer.py:score"],
        pattern=r"^(?:\w+(?:\.\w+)*|[^:]+\.py):\w+$",
    )
    options: dict[str, Any] = option({}, "Further keyword arguments for the function.")


class ReasoningGymReward(_Reward):
    """The scorer that a reasoning-gym task brings along."""

    type: Literal["reasoning_gym"] = option(..., "Kind of reward.")


class EnvironmentReward(_Reward):
    """What the environment gave over all turns; for sources that have one."""

    type: Literal["environment"] = option(..., "Kind of reward.")
    solved_at: float = option(1.0, "The task counts as solved from this sum on.")
    require_finished: bool = option(False, "Score 0 where the last turn was cut off before the model ended it.")


class ChoiceReward(_Reward):
    """Multiple choice: 1 where the letter that the answer settles on is the reference's."""

    type: Literal["choice"] = option(..., "Kind of reward.")
    letters: str = option("ABCDE", "Letters that may be chosen.", pattern=r"^[A-Z]{2,26}$")

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return True


class ShortAnswerReward(_Reward):
    """Short answers to questions, compared by words without case, punctuation and articles, as SQuAD does.

    What stands between the last `<answer>` and `</answer>` counts, or else the whole text.
    """

    type: Literal["short_answer"] = option(..., "Kind of reward.")
    score: Literal["exact", "f1"] = option("f1", "1 for the same words alone, or the F1 score over words.")
    references_key: str | None = option(
        None, "Column with further reference answers, a list of texts; the best counts.", examples=["aliases"]
    )

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return self.references_key is None


class RepetitionPenalty(_Reward):
    """0 to -1 for repeated n-grams of tokens; give it a weight beside the reward that decides."""

    type: Literal["repetition"] = option(..., "Kind of reward.")
    ngram_size: int = option(4, "Tokens that are compared as one.", unit="tokens", ge=1)
    tolerance: float = option(0.1, "Share of repeated n-grams that costs nothing.", ge=0, lt=1)
    require_finished: bool = option(False, "Give 0, no penalty, where the answer was cut off.")


class LengthPenalty(_Reward):
    """0 to -1 for tokens beyond a limit; give it a weight beside the reward that decides."""

    type: Literal["length"] = option(..., "Kind of reward.")
    free_tokens: int = option(..., "Tokens that cost nothing.", unit="tokens", ge=0, examples=[256])
    full_tokens: int = option(..., "Tokens at which the penalty is -1.", unit="tokens", ge=1, examples=[512])
    require_finished: bool = option(False, "Give 0, no penalty, where the answer was cut off.")

    @model_validator(mode="after")
    def _range(self) -> LengthPenalty:
        if self.full_tokens <= self.free_tokens:
            raise ValueError(f"full_tokens {self.full_tokens} must exceed free_tokens {self.free_tokens}")
        return self


RewardConfig = Annotated[
    MathReward
    | ExactReward
    | RegexReward
    | PythonReward
    | ReasoningGymReward
    | EnvironmentReward
    | ChoiceReward
    | ShortAnswerReward
    | RepetitionPenalty
    | LengthPenalty,
    Field(discriminator="type"),
]
RewardList: TypeAlias = list[RewardConfig]


def as_reward_list(value: Any) -> Any:
    """`math` and `{type: math}` are short for `[{type: math}]`."""
    if value == []:
        raise ValueError("the list is empty: name at least one reward, such as `math`")
    entries = value if isinstance(value, list) else [value]
    return [{"type": entry} if isinstance(entry, str) else entry for entry in entries]


def check_pattern(pattern: str) -> str:
    """Return `pattern`.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern
