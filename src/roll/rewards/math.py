r"""1 where the final answer is mathematically equal to the reference, else 0.

    text ──► final answer (box, formula, number)
                 both plain numbers? ─────────────► exact comparison, in place           microseconds
                 formulas known to `formulas`? ───► computed at a few points, in place   tenths of a millisecond
                 else ────────────────────────────► in a worker: math-verify (sympy)     milliseconds

The three agree where they overlap; tests compare them. A hostile answer (`10**10**10`, nested radicals) is mostly
refused by its looks or its size; the rest costs at most its time limit. The model's text is parsed, never evaluated
as Python.
"""

from __future__ import annotations

import contextlib
import logging
import re

from roll.config.rewards import MathReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.final_answer import last_boxed, last_boxes, last_formula, last_formulas, last_line, last_number
from roll.rewards.plain_number import PlainNumber, number_of, same_number, tidy
from roll.rewards.slow_math import looks_explosive, symbolically_equal
from roll.rewards.units import same_unit_factor, split_unit
from roll.types import Rollout

__all__ = ["math_verifier", "prepare_worker", "quick_verdict", "score_math"]

LONGEST_TEXT = 20_000
"""Characters of an answer that are looked at, from its end."""
LONGEST_ANSWER = 1_000
"""Characters of a final answer; a longer one is wrong."""
ALARM_AT = 0.8
"""Share of the time limit after which the slow path is interrupted from within, before the pool kills the worker."""

_CALCULATION = re.compile(r"[\d)}]\s*(?:[-+*×÷]|\\(?:times|cdot|div|pm)\b)\s*[\d({\\.]")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\s*(?:\\?%|percent)\s*\$?\s*\.?\s*$")
_EQUALS = re.compile(r"=|\\approx")
_EQUATION = re.compile(r"(?<![<>!\\])=|[<>]|\\(?:le|ge|lt|gt|ne)")
_SEVERAL = re.compile(r"^(?![\s$]*(?:\\left)?\s*[(\[]).*(?:,|;|\\pm|\bor\b|\band\b)", re.DOTALL)
"""A list or a set: the answer may spread over several boxes or formulas."""
_ALTERNATIVES = re.compile(r"^(?!.*\\begin\b).*\\\\|\\(?:lor|vee)\b", re.DOTALL)
"""Several answers in one: line breaks outside of a matrix, and the sign for `or`."""
_PROSE = re.compile(r"[^\W\d_][^\\=<>^{}$]*")
_NAMES = re.compile(r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|infty|infinity)\b", re.IGNORECASE)


def prepare_worker() -> None:
    """Import what the slow paths need, before any time limit runs."""
    import math_verify  # noqa: F401

    import roll.rewards.formulas  # noqa: F401

    # it warns that its own timer is off: ours ends what takes too long
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def score_math(text: str, reference: str, extract: str, limit_s: float | None = 4.0) -> tuple[bool, str]:
    """Whether the answer is right, and a verdict.

    Args:
        text: the model's answer; of a very long one only the end is read.
        reference: the right answer: a number, an expression, or LaTeX.
        extract: see `MathReward.extract`.
        limit_s: longest time for the slow path; `None` forbids it.
    """
    right_number = number_of(reference)
    answer = _final_answer(text[-LONGEST_TEXT:], extract, reference, right_number)
    if answer is None:
        return False, "no answer"
    if len(answer) > LONGEST_ANSWER:
        return False, "wrong"
    try:
        right = _equal(answer, reference, right_number, limit_s)
    except (MemoryError, RecursionError):  # the answer is too much for the verifier; a right one is not
        return False, "too large"
    except TimeoutError:
        return False, "timeout"
    if right is None:
        return False, "too large"
    return right, "correct" if right else "wrong"


class _NeedsWorkerError(Exception):
    """The slow path would have to be taken."""


def quick_verdict(text: str, reference: str, extract: str) -> tuple[bool, str] | None:
    """What `score_math` says, where it need not take its slow path; `None` elsewhere.

    It takes less of the controller's time than sending the text to a worker, and at most some hundredths of a second.
    """
    try:
        return score_math(text, reference, extract, None)
    except _NeedsWorkerError:
        return None


def _final_answer(text: str, extract: str, reference: str, right_number: PlainNumber | None) -> str | None:
    if extract == "boxed":
        return last_boxed(text)
    with_unit = right_number is not None and right_number.unit is not None
    if extract == "last_number":
        return last_number(text, with_unit=with_unit)
    several = right_number is None and _SEVERAL.search(reference) is not None
    boxed = last_boxes(text) if several else last_boxed(text)
    if boxed is not None:
        return boxed
    if right_number is not None:
        return last_number(text, with_unit=with_unit)
    if several:
        return last_formulas(text) or last_line(text, whole=True)
    whole = bool(_EQUATION.search(reference))
    return last_formula(text, whole=whole) or last_line(text, whole=whole)


def _equal(answer: str, reference: str, right_number: PlainNumber | None, limit_s: float | None) -> bool | None:
    """Whether they are; `None` where the answer is too large to be told."""
    if answer.strip() == reference.strip():
        return bool(answer.strip())
    if right_number is None:
        bare, given = _bare(reference), _bare(answer)
        if given == bare:
            return True
        if _is_prose(bare) or _is_prose(given):
            return False  # words, and not these
        return _same_formula(answer, reference, limit_s)
    answer = _EQUALS.split(answer)[-1]
    number = number_of(answer)
    if number is not None:
        return same_number(number, right_number)
    if _CALCULATION.search(tidy(answer)):
        return False  # `3+4` restates the question; 7 answers it
    return _same_formula(answer, reference, limit_s)


def _bare(text: str) -> str:
    r"""Text answers without `\text{…}`, outer brackets, and case."""
    return _TEXT.sub(r"\1", text).replace("$", "").strip().strip("().* ").casefold()


def _is_prose(bare: str) -> bool:
    is_words = _PROSE.fullmatch(bare) and re.search(r"[^\W\d_]{3}", bare)
    return bool(is_words) and not _NAMES.search(bare) and not re.search(r"\d", bare)


def _same_formula(answer: str, reference: str, limit_s: float | None) -> bool | None:
    from roll.rewards.formulas import NotUnderstoodError, TooLargeError, same_answer

    given, given_unit = split_unit(answer)
    right, right_unit = split_unit(reference)
    factor = same_unit_factor(given_unit, right_unit)
    if factor is None:
        return False
    if factor != 1:
        given = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}} * ({given})"
    bare = _PERCENT.sub("", given), _PERCENT.sub("", right)
    try:
        if same_answer(*bare):
            return True
        if (bare[0] == given) == (bare[1] == right):
            return False
        # one in percent: `50%` is 0.5 too
        form = f"\\frac{{{bare[0]}}}{{100}}" if bare[0] != given else f"100 * ({bare[0]})"
        with contextlib.suppress(NotUnderstoodError):
            return same_answer(form, bare[1])
        return False
    except NotUnderstoodError:
        pass
    except TooLargeError:
        return None
    if looks_explosive(answer):
        return None
    if _ALTERNATIVES.search(answer) and not _ALTERNATIVES.search(reference):
        return False  # the slow path would be content with one of them
    if limit_s is None:
        raise _NeedsWorkerError
    return symbolically_equal(answer, reference, limit_s)


def math_verifier(config: MathReward, pool: WorkerPool) -> Verifier:
    """Compares numbers and formulas in place; what needs the slow path goes to the pool."""
    limit_s = ALARM_AT * config.time_limit_s

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text[-LONGEST_TEXT:], rollout.prompt.answer, config.extract)
        found = quick_verdict(*arguments)
        right, verdict = found or await in_pool(pool, score_math, *arguments, limit_s, time_limit_s=config.time_limit_s)
        return Judgement(value=float(right), verdict=verdict, correct=right)

    return Verifier(judge=judge, decides=True)
