"""The reward `math`: 1 if the final answer is mathematically equal to the reference, else 0.

    text ──► final answer (box, formula, number)
                 words? ──────────────► the same words?
                 plain numbers? ──────► exact comparison
                 else ────────────────► cleaned ──► shapes ──► values by math-verify (`roll.rewards.mathematics`)

Everything here runs in a worker of the pool: the controller never parses a model's text. A malicious answer
(`10**10**10`, nested radicals) is usually rejected by its form or its size; any other takes at most the time limit. The
model's text is parsed, never evaluated as Python.
"""

from __future__ import annotations

import re

from roll.config.rewards import MathReward
from roll.protocols import WorkerPool
from roll.rewards.base import MAX_TEXT_LENGTH, Judgement, Verifier, run_in_pool
from roll.rewards.final_answer import (
    add_box_braces,
    extract_reference,
    find_last_box,
    find_last_boxed,
    find_last_formula,
    find_last_formulas,
    find_last_line,
    find_last_number,
    find_marked_answer,
    find_stated_answer,
    find_tagged_answer,
    has_open_box,
    is_sentence,
    match_spaced_number,
)
from roll.rewards.mathematics import symbolic
from roll.rewards.mathematics.compare import is_same_answer
from roll.rewards.mathematics.notation import normalize_notation
from roll.rewards.mathematics.plain_number import PlainNumber, is_same_number, parse_number
from roll.rewards.mathematics.same_text import is_text_stated, normalize_text, unwrap_text
from roll.rewards.mathematics.shape import TooDeepError, is_list
from roll.rewards.mathematics.unevaluated import is_unevaluated
from roll.types import Rollout

__all__ = ["build_math_verifier", "prepare_worker", "score_math"]

MAX_ANSWER_LENGTH = 1_000
"""Maximum number of characters of a final answer; a longer one is incorrect, unless it equals the reference's text."""
MAX_REFERENCE_LENGTH = 2_000
"""Maximum number of characters of a reference that is parsed as mathematics; a longer one is compared as plain text."""
ALARM_FRACTION = 0.8
"""Fraction of the time limit after which an alarm in the worker interrupts a comparison, before the pool kills it."""

_DECIMAL_COMMA_PATTERN = re.compile(r"-?(?:\d+,\d{1,2}|0,\d+)")
_EQUATION_PATTERN = re.compile(r"(?<![<>!\\])=|[<>]|\\(?:le|ge|lt|gt|ne)")
_REPEATED_SPACES_PATTERN = re.compile(r"\s{2,}+")
_PROSE_PATTERN = re.compile(r"[^\W\d_][^\\=<>^{}$]*")
_FUNCTION_NAME_PATTERN = re.compile(r"\b(?:sqrt|pi|sin|cos|tan|log|ln|exp|infty|infinity)\b", re.IGNORECASE)
_CONJUNCTION_PATTERN = re.compile(r"\b(?:or|and)\b", re.IGNORECASE)
_NO_SOLUTION_TEXTS = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "none",
    "empty set",
    "the empty set",
}
_EMPTY_SETS = {"\\emptyset", "\\varnothing", "\\{\\}", "\\{ \\}", "∅"}


def prepare_worker() -> None:
    """Import the packages that comparisons need, before any time limit applies."""
    symbolic.prepare()


def score_math(text: str, reference: str, extract: str, limit_s: float = 4.0) -> tuple[bool, str]:
    """Return whether the answer is correct, and a verdict.

    Args:
        text: The model's answer; only the end of a very long answer is parsed.
        reference: The correct answer: a number, an expression, or LaTeX.
        extract: Parts of the text in which to search for the answer, as in `MathReward.extract`.
        limit_s: Time limit in seconds.
    """
    try:
        return symbolic.call_with_limit(limit_s, _score, text[-MAX_TEXT_LENGTH:], reference, extract)
    except (MemoryError, RecursionError, TooDeepError):  # a correct answer would not be too large for the verifier
        return False, "too large"
    except symbolic.ComparisonTimeoutError:
        return False, "timeout"


def _score(text: str, reference: str, extract: str) -> tuple[bool, str]:
    text, reference = add_box_braces(text), extract_reference(reference)
    if len(reference) > MAX_REFERENCE_LENGTH:
        return _score_text(text, reference, extract)
    right_number = parse_number(reference)
    answer = _extract_answer(text, extract, reference, right_number)
    if answer is None or not answer.strip():  # such as `0:`, which looks like the beginning of an answer
        is_reference = extract == "auto" and normalize_text(reference) != "" and _is_reference_text(text, reference)
        return is_reference, "correct" if is_reference else "no answer"
    answer = _REPEATED_SPACES_PATTERN.sub(" ", answer.strip())
    if normalize_text(answer) == normalize_text(reference) != "":
        return True, "correct"
    if extract == "auto" and _is_reference_text(text, reference):
        return True, "correct"
    if len(answer) > MAX_ANSWER_LENGTH:
        return False, "wrong"
    if (
        right_number is None
        and _DECIMAL_COMMA_PATTERN.fullmatch(reference.strip())
        and _equals_with_decimal_comma(answer, reference)
    ):
        return True, "correct"
    right = _compare_words(answer, reference) if right_number is None else _compare_numbers(answer, right_number)
    if right is None:
        if any(map(symbolic.is_too_large, (answer, normalize_notation(answer)))):
            return False, "too large"
        right = is_same_answer(answer, reference)
    return right, "correct" if right else "wrong"


def _score_text(text: str, reference: str, extract: str) -> tuple[bool, str]:
    """Compare an answer, as text, with a reference that is too long to parse.

    Return whether they are equal, and a verdict.
    """
    answer = find_last_box(text)
    if answer is None and (extract == "boxed" or has_open_box(text)):
        return False, "no answer"
    same = normalize_text(answer or "") == normalize_text(reference) != ""
    right = same or (extract == "auto" and _is_reference_text(text, reference))
    return right, "correct" if right else "wrong"


def _extract_answer(text: str, extract: str, reference: str, reference_number: PlainNumber | None) -> str | None:
    if extract == "boxed":
        return find_last_box(text)
    with_unit = reference_number is not None and reference_number.unit is not None
    if extract == "last_number":
        return find_last_number(text, with_unit=with_unit)
    tagged = find_tagged_answer(text)
    if tagged is not None and tagged != text:
        return _extract_answer(tagged, extract, reference, reference_number) if is_sentence(tagged) else tagged
    several = reference_number is None and is_list(normalize_notation(reference))
    boxed = find_stated_answer(text) or find_last_boxed(text, allow_several=several) or find_marked_answer(text)
    if boxed is not None:
        return boxed
    if has_open_box(text):  # the answer was truncated inside the box
        return None
    if reference_number is not None:
        return match_spaced_number(text) or find_last_number(text, with_unit=with_unit)
    if several:
        return find_last_formulas(text) or find_last_line(text, whole=True)
    whole = bool(_EQUATION_PATTERN.search(reference))
    return find_last_formula(text, whole=whole) or find_last_line(text, whole=whole)


def _is_reference_text(text: str, reference: str) -> bool:
    """Return whether the `<answer>` tag, or the whole text if there is no tag, states the reference as text.

    The result is false for a text with a box or a "The final answer is …".
    """
    if find_stated_answer(text) or find_last_box(text) is not None:
        return False
    return is_text_stated(find_tagged_answer(text) or text, reference)


def _compare_words(answer: str, reference: str) -> bool | None:
    """Return whether answer and reference are the same words; `None` if they are not only words."""
    plain, given = _strip_layout(reference), _strip_layout(answer)
    if given == plain:
        return bool(given)
    if given in _NO_SOLUTION_TEXTS and (plain in _NO_SOLUTION_TEXTS or reference.strip() in _EMPTY_SETS):
        return True
    if plain in _NO_SOLUTION_TEXTS and answer.strip() in _EMPTY_SETS:
        return True
    if _is_prose(plain) or _is_prose(given):
        return False  # different words
    return None


def _strip_layout(text: str) -> str:
    r"""Return a text in lower case, without `\text{…}`, dollar signs, and parentheses or periods around it."""
    return unwrap_text(text).replace("$", "").strip().strip("().* ").casefold()


def _is_prose(plain: str) -> bool:
    is_words = _PROSE_PATTERN.fullmatch(plain) and re.search(r"[^\W\d_]{3}", plain)
    is_list_of_letters = _CONJUNCTION_PATTERN.search(plain) and not re.search(r"[^\W\d_]{4}", plain)
    return (
        bool(is_words)
        and not is_list_of_letters
        and not _FUNCTION_NAME_PATTERN.search(plain)
        and not re.search(r"\d", plain)
    )


def _compare_numbers(answer: str, reference: PlainNumber) -> bool | None:
    """Return whether an answer equals the reference number; `None` if the answer is not a plain number."""
    number = parse_number(answer)
    if number is None and _DECIMAL_COMMA_PATTERN.fullmatch(answer.strip()):
        number = parse_number(answer.replace(",", "."))
    if number is not None:
        return not is_unevaluated(answer) and is_same_number(number, reference)
    return False if is_unevaluated(answer) else None


def _equals_with_decimal_comma(answer: str, reference: str) -> bool:
    """Return whether a number equals a reference with a decimal comma (`1,22`)."""
    number, right = parse_number(answer), parse_number(reference.replace(",", "."))
    return number is not None and right is not None and is_same_number(number, right)


def build_math_verifier(config: MathReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `math`, which runs in the worker pool."""
    limit_s = ALARM_FRACTION * config.time_limit_s

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text[-MAX_TEXT_LENGTH:], rollout.prompt.answer, config.extract, limit_s)
        right, verdict = await run_in_pool(pool, score_math, *arguments, time_limit_s=config.time_limit_s)
        return Judgement(value=float(right), verdict=verdict, correct=right)

    return Verifier(judge=judge, decides_correctness=True)
