"""1 where the final answer is mathematically equal to the reference, else 0.

    text ──► final answer (box, formula, number) ──► both plain numbers? compare exactly, at once
                                                 └─► else math-verify (sympy)

Runs in a worker: a hostile answer (`10**10**10`, nested radicals) costs at most its time limit and its worker's memory.
The model's text is parsed, never evaluated as Python.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from roll.config.rewards import MathReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.final_answer import last_boxed, last_formula, last_line, last_number
from roll.rewards.plain_number import PlainNumber, number_of, same_number, tidy
from roll.types import Rollout

__all__ = ["math_verifier", "prepare_worker", "score_math"]

LONGEST_TEXT = 20_000
"""Characters of an answer that are looked at, from its end."""
LONGEST_ANSWER = 1_000
"""Characters of a final answer; a longer one is wrong."""

_CALCULATION = re.compile(r"[\d)}]\s*(?:[-+*×÷]|\\(?:times|cdot|div|pm)\b)\s*[\d({\\.]")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}]*)\}")


def prepare_worker() -> None:
    """Import what the slow path needs, before any time limit runs."""
    import math_verify  # noqa: F401

    # it warns that its own timer is off: the pool ends what takes too long
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def score_math(text: str, reference: str, extract: str) -> tuple[bool, str]:
    """Whether the answer is right, and a verdict.

    Args:
        text: the model's answer; of a very long one only the end is read.
        reference: the right answer: a number, an expression, or LaTeX.
        extract: see `MathReward.extract`.
    """
    right_number = number_of(reference)
    answer = _final_answer(text[-LONGEST_TEXT:], extract, right_number is not None)
    if answer is None:
        return False, "no answer"
    if len(answer) > LONGEST_ANSWER:
        return False, "wrong"
    try:
        right = _equal(answer, reference, right_number)
    except (MemoryError, RecursionError):  # the answer is too much for the verifier; a right one is not
        return False, "too large"
    return right, "correct" if right else "wrong"


def _final_answer(text: str, extract: str, wants_number: bool) -> str | None:
    if extract == "boxed":
        return last_boxed(text)
    if extract == "last_number":
        return last_number(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return last_number(text) if wants_number else last_formula(text) or last_line(text)


def _equal(answer: str, reference: str, right_number: PlainNumber | None) -> bool:
    if answer.strip() == reference.strip():
        return bool(answer.strip())
    if right_number is None:
        return _bare(answer) == _bare(reference) or _symbolically_equal(answer, reference)
    answer = re.split(r"=|\\approx", answer)[-1]
    number = number_of(answer)
    if number is not None:
        return same_number(number, right_number)
    if _CALCULATION.search(tidy(answer)):
        return False  # `3+4` restates the question; 7 answers it
    return _symbolically_equal(answer, reference)


def _bare(text: str) -> str:
    r"""Text answers without `\text{…}`, outer brackets, and case."""
    return _TEXT.sub(r"\1", text).replace("$", "").strip().strip("().* ").casefold()


def _symbolically_equal(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        marked = text if "$" in text or "\\(" in text or "\\[" in text else f"${text}$"
        return parse(marked, extraction_config=kinds, parsing_timeout=0)

    return bool(verify(parsed(reference), parsed(answer), timeout_seconds=0))


def math_verifier(config: MathReward, pool: WorkerPool) -> Verifier:
    """Scores in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text[-LONGEST_TEXT:], rollout.prompt.answer, config.extract)
        right, verdict = await in_pool(pool, score_math, *arguments, time_limit_s=config.time_limit_s)
        return Judgement(value=float(right), verdict=verdict, correct=right)

    return Verifier(judge=judge, decides=True)
