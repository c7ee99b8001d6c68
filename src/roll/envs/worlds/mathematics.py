"""Mathematics questions, generated from the seed; the answer is a number, compared exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, check_names, extract_answer

__all__ = ["KINDS", "MathQuestion", "parse_number"]

_NUMBER_PATTERN = re.compile(r"([+-]?\d{1,30})(?:\.(\d{1,30}))?(?:\s?/\s?(\d{1,30}))?")
_FRACTION_PATTERN = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d{1,30})\}\{(\d{1,30})\}")


def parse_number(answer: str) -> Fraction | None:
    """Parse a number: an integer, a decimal or a fraction; thousands separators, `$` and `%` are accepted."""
    bare = answer.replace(",", "").replace("$", "").replace("\\%", "").replace("%", "").strip().rstrip(".")
    fraction = _FRACTION_PATTERN.fullmatch(bare)
    if fraction:
        return (
            Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] == "-" else 1)
            if int(fraction[3])
            else None
        )
    match = _NUMBER_PATTERN.fullmatch(bare)
    if match is None or (match[2] and match[3]) or (match[3] and not int(match[3])):
        return None
    if match[2]:
        return Fraction(f"{match[1]}.{match[2]}")
    return Fraction(int(match[1]), int(match[3] or 1))


def _make_arithmetic_task(random: Random, level: int) -> tuple[str, Fraction]:
    most = 10**level
    a, b, c = (random.randint(2, most) for _ in range(3))
    if random.random() < 0.5:
        return f"What is {a} + {b} * {c}?", Fraction(a + b * c)
    return f"What is ({a} - {b}) * {c}?", Fraction((a - b) * c)


def _make_equation_task(random: Random, level: int) -> tuple[str, Fraction]:
    a, x = random.randint(2, 9 * level), random.randint(-10 * level, 10 * level)
    b = random.randint(1, 20 * level)
    return f"Solve for x: {a}x + {b} = {a * x + b}.", Fraction(x)


def _make_fractions_task(random: Random, level: int) -> tuple[str, Fraction]:
    a, b, c, d = (random.randint(1, 4 + 4 * level) for _ in range(4))
    value = Fraction(a, b + 1) + Fraction(c, d + 1)
    return f"What is {a}/{b + 1} + {c}/{d + 1}, as a fraction in lowest terms?", value


def _make_percentage_task(random: Random, level: int) -> tuple[str, Fraction]:
    price, off = random.randint(1, 20 * level) * 20, random.randint(1, 19) * 5
    question = f"A coat that costs {price} dollars is sold at {off}% off. How many dollars does it cost now?"
    return question, Fraction(price * (100 - off), 100)


def _make_divisor_task(random: Random, level: int) -> tuple[str, Fraction]:
    common, a, b = random.randint(2, 6 * level), random.randint(2, 9 * level), random.randint(2, 9 * level)
    question = f"What is the greatest common divisor of {common * a} and {common * b}?"
    return question, Fraction(math.gcd(common * a, common * b))


def _make_remainder_task(random: Random, level: int) -> tuple[str, Fraction]:
    base, power, modulus = random.randint(2, 9), random.randint(2, 4 * level), random.randint(3, 5 + 6 * level)
    return f"What is the remainder of {base}^{power} divided by {modulus}?", Fraction(pow(base, power, modulus))


def _make_journey_task(random: Random, level: int) -> tuple[str, Fraction]:
    first, second = random.randint(2, 6 + level), random.randint(1, 5)
    fast, slow = random.randint(6, 10 * (level + 1)) * 5, random.randint(1, 5) * 5
    question = f"A train goes {first} hours at {fast} km/h, then {second} hours at {slow} km/h. How many km in all?"
    return question, Fraction(first * fast + second * slow)


def _make_series_task(random: Random, level: int) -> tuple[str, Fraction]:
    start, step, count = random.randint(1, 9), random.randint(2, 4 * level), random.randint(5, 10 * level)
    listed = ", ".join(str(start + step * n) for n in range(3))
    total = count * (2 * start + (count - 1) * step) // 2
    return f"What is the sum of the first {count} terms of {listed}, …?", Fraction(total)


KINDS: Mapping[str, Callable[[Random, int], tuple[str, Fraction]]] = {
    "arithmetic": _make_arithmetic_task,
    "equation": _make_equation_task,
    "fractions": _make_fractions_task,
    "percentage": _make_percentage_task,
    "divisor": _make_divisor_task,
    "remainder": _make_remainder_task,
    "journey": _make_journey_task,
    "series": _make_series_task,
}


@dataclass(eq=False)
class MathQuestion(World):
    r"""A question with one answer in `\boxed{}`. A correct answer gives 1, an incorrect answer 0, and no number −0.1.

    Args:
        level: Size of the numbers, 1 to 4.
        kinds: Types of questions, from `KINDS`; all by default.
    """

    level: int = 1
    kinds: Collection[str] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 4:
            raise ValueError(f"level must be from 1 to 4, got {self.level}")
        self._kinds = check_names("kinds", self.kinds, KINDS)

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        question, self._answer = KINDS[self.random.choice(self._kinds)](self.random, self.level)
        return f"{question} Put your answer into \\boxed{{}}.", {"state": question}

    def step(self, action: str) -> StepResult:
        """See `Env`."""
        answer = extract_answer(action)
        number = None if answer is None else parse_number(answer)
        info: dict[str, Any] = {"state": "answered", "correct": number == self._answer}
        if number is None:
            return "There is no number in \\boxed{}.", FORMAT_ERROR_REWARD, True, False, info
        return ("Right." if number == self._answer else "Wrong."), float(number == self._answer), True, False, info

    def sample_random_action(self) -> str:
        """Return a random number."""
        return f"\\boxed{{{self.action_random.randint(-100, 100)}}}"

    def solution(self) -> str:
        """Return an expert's action."""
        return f"\\boxed{{{self._answer}}}"
