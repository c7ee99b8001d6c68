"""1 if the final answer is mathematically equal to the reference, else 0.

    text ──► final answer (box, formula, number)
                 words? ──────────────► the same words?
                 plain numbers? ──────► exact comparison
                 else ────────────────► cleaned ──► shapes ──► values by math-verify (`roll.rewards.mathematics`)

All of it runs in a worker of the pool: the controller never parses a model's text. A hostile answer (`10**10**10`,
nested radicals) is usually rejected by its form or its size; the rest costs at most the time limit. The model's text is
parsed, never evaluated as Python.
"""

from __future__ import annotations

import re

from roll.config.rewards import MathReward
from roll.protocols import WorkerPool
from roll.rewards.base import LONGEST_TEXT, Judgement, Verifier, in_pool
from roll.rewards.final_answer import (
    answer_in_tag,
    box_is_open,
    boxes_with_braces,
    is_sentence,
    last_boxed,
    last_boxes,
    last_formula,
    last_formulas,
    last_line,
    last_number,
    marked_answer,
    reference_answer,
    stated_answer,
    whole_number,
)
from roll.rewards.mathematics import symbolic
from roll.rewards.mathematics.compare import same_answer
from roll.rewards.mathematics.notation import cleaned
from roll.rewards.mathematics.plain_number import PlainNumber, number_of, same_number
from roll.rewards.mathematics.restated import restates
from roll.rewards.mathematics.same_text import gives_text, normalized_text, unwrapped_text
from roll.rewards.mathematics.shape import TooDeepError, is_list
from roll.types import Rollout

__all__ = ["math_verifier", "prepare_worker", "score_math"]

LONGEST_ANSWER = 1_000
"""Most characters of a final answer; a longer one is wrong, unless it equals the reference's text."""
LONGEST_REFERENCE = 2_000
"""Most characters of a reference that is parsed as mathematics; a longer one is compared as a text."""
ALARM_AT = 0.8
"""Share of the time limit after which an alarm in the worker interrupts a comparison, before the pool kills it."""

_DECIMAL_COMMA = re.compile(r"-?(?:\d+,\d{1,2}|0,\d+)")
_EQUATION = re.compile(r"(?<![<>!\\])=|[<>]|\\(?:le|ge|lt|gt|ne)")
_BLANKS = re.compile(r"\s{2,}+")
_PROSE = re.compile(r"[^\W\d_][^\\=<>^{}$]*")
_NAMES = re.compile(r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|infty|infinity)\b", re.IGNORECASE)
_JOINED = re.compile(r"\b(?:or|and)\b", re.IGNORECASE)
_NOTHING = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "none",
    "empty set",
    "the empty set",
}
_EMPTY = {"\\emptyset", "\\varnothing", "\\{\\}", "\\{ \\}", "∅"}


def prepare_worker() -> None:
    """Import what comparisons need, before any time limit runs."""
    symbolic.prepare()


def score_math(text: str, reference: str, extract: str, limit_s: float = 4.0) -> tuple[bool, str]:
    """Return whether the answer is right, and a verdict.

    Args:
        text: The model's answer; only the end of a very long one is read.
        reference: The right answer: a number, an expression, or LaTeX.
        extract: See `MathReward.extract`.
        limit_s: Longest time.
    """
    try:
        return symbolic.limited(limit_s, _score, text[-LONGEST_TEXT:], reference, extract)
    except (MemoryError, RecursionError, TooDeepError):  # a right answer would not be too large for the verifier
        return False, "too large"
    except symbolic.SlowError:
        return False, "timeout"


def _score(text: str, reference: str, extract: str) -> tuple[bool, str]:
    text, reference = boxes_with_braces(text), reference_answer(reference)
    if len(reference) > LONGEST_REFERENCE:
        return _score_text(text, reference, extract)
    right_number = number_of(reference)
    answer = _final_answer(text, extract, reference, right_number)
    if answer is None or not answer.strip():  # such as `0:`, which looks like the beginning of an answer
        is_reference = extract == "auto" and normalized_text(reference) != "" and _says(text, reference)
        return is_reference, "correct" if is_reference else "no answer"
    answer = _BLANKS.sub(" ", answer.strip())
    if normalized_text(answer) == normalized_text(reference) != "":
        return True, "correct"
    if extract == "auto" and _says(text, reference):
        return True, "correct"
    if len(answer) > LONGEST_ANSWER:
        return False, "wrong"
    if right_number is None and _DECIMAL_COMMA.fullmatch(reference.strip()) and _same_plain(answer, reference):
        return True, "correct"
    right = _in_words(answer, reference) if right_number is None else _in_numbers(answer, right_number)
    if right is None:
        if any(map(symbolic.looks_explosive, (answer, cleaned(answer)))):
            return False, "too large"
        right = same_answer(answer, reference)
    return right, "correct" if right else "wrong"


def _score_text(text: str, reference: str, extract: str) -> tuple[bool, str]:
    """Return whether an answer is the text of a reference that is too long to parse, and a verdict."""
    answer = last_boxed(text)
    if answer is None and (extract == "boxed" or box_is_open(text)):
        return False, "no answer"
    same = normalized_text(answer or "") == normalized_text(reference) != ""
    right = same or (extract == "auto" and _says(text, reference))
    return right, "correct" if right else "wrong"


def _final_answer(text: str, extract: str, reference: str, right_number: PlainNumber | None) -> str | None:
    if extract == "boxed":
        return last_boxed(text)
    with_unit = right_number is not None and right_number.unit is not None
    if extract == "last_number":
        return last_number(text, with_unit=with_unit)
    tagged = answer_in_tag(text)
    if tagged is not None and tagged != text:
        return _final_answer(tagged, extract, reference, right_number) if is_sentence(tagged) else tagged
    several = right_number is None and is_list(cleaned(reference))
    boxed = stated_answer(text) or last_boxes(text, several=several) or marked_answer(text)
    if boxed is not None:
        return boxed
    if box_is_open(text):  # the answer was cut off inside the box
        return None
    if right_number is not None:
        return whole_number(text) or last_number(text, with_unit=with_unit)
    if several:
        return last_formulas(text) or last_line(text, whole=True)
    whole = bool(_EQUATION.search(reference))
    return last_formula(text, whole=whole) or last_line(text, whole=whole)


def _says(text: str, reference: str) -> bool:
    """Return whether an answer without a box, or the content of its tag, equals the reference's text."""
    if stated_answer(text) or last_boxed(text) is not None:
        return False
    return gives_text(answer_in_tag(text) or text, reference)


def _in_words(answer: str, reference: str) -> bool | None:
    """Return whether answers in words are the same; `None` if they are not in words."""
    bare, given = _bare(reference), _bare(answer)
    if given == bare:
        return bool(given)
    if given in _NOTHING and (bare in _NOTHING or reference.strip() in _EMPTY):
        return True
    if bare in _NOTHING and answer.strip() in _EMPTY:
        return True
    if _is_prose(bare) or _is_prose(given):
        return False  # words, and different ones
    return None


def _bare(text: str) -> str:
    r"""Return a text without `\text{…}` and outer brackets, in lower case."""
    return unwrapped_text(text).replace("$", "").strip().strip("().* ").casefold()


def _is_prose(bare: str) -> bool:
    is_words = _PROSE.fullmatch(bare) and re.search(r"[^\W\d_]{3}", bare)
    is_list_of_letters = _JOINED.search(bare) and not re.search(r"[^\W\d_]{4}", bare)
    return bool(is_words) and not is_list_of_letters and not _NAMES.search(bare) and not re.search(r"\d", bare)


def _in_numbers(answer: str, right: PlainNumber) -> bool | None:
    """Return whether an answer equals the reference number; `None` if plain numbers are not enough to decide."""
    number = number_of(answer)
    if number is None and _DECIMAL_COMMA.fullmatch(answer.strip()):
        number = number_of(answer.replace(",", "."))
    if number is not None:
        return not restates(answer) and same_number(number, right)
    return False if restates(answer) else None


def _same_plain(answer: str, reference: str) -> bool:
    """Return whether a number equals the reference, if its comma is read as a decimal comma (`1,22`)."""
    number, right = number_of(answer), number_of(reference.replace(",", "."))
    return number is not None and right is not None and same_number(number, right)


def math_verifier(config: MathReward, pool: WorkerPool) -> Verifier:
    """Return the verifier, which compares in the pool."""
    limit_s = ALARM_AT * config.time_limit_s

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text[-LONGEST_TEXT:], rollout.prompt.answer, config.extract, limit_s)
        right, verdict = await in_pool(pool, score_math, *arguments, time_limit_s=config.time_limit_s)
        return Judgement(value=float(right), verdict=verdict, correct=right)

    return Verifier(judge=judge, decides=True)
