"""1 where the final answer is mathematically equal to the reference, else 0.

Plain numbers (`1,234`, `3.50`, `7/8`, `$5`, `40%`) are compared exactly and at once; everything else goes through math-verify.
Runs in a worker: a hostile answer (`10**10**10`, nested radicals) costs at most its time limit.
"""

from __future__ import annotations

import re
from fractions import Fraction

from roll.config.rewards import MathReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["last_boxed", "last_number", "math_verifier", "prepare_worker", "score_math"]

LONGEST_TEXT = 20_000
"""Characters of an answer that are looked at, from its end."""
LONGEST_ANSWER = 1_000
"""Characters of a final answer; a longer one is wrong."""

_NUMBER = re.compile(r"[-+]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?%?|[-+]?\.\d+%?")
_PLAIN = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+))?(%?)")


def prepare_worker() -> None:
    """Import what the slow path needs, before any time limit runs."""
    import math_verify  # noqa: F401


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`, braces balanced; `None` where there is none or it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number in the text, as written."""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    match = found[-1]
    before = text[match.start() - 1 : match.start()]
    number = match.group().replace(" ", "")
    # in `3-4` the sign is an operator, in `x = -4` it belongs to the number
    return number.lstrip("+-") if before and (before.isalnum() or before == ")") else number


def _plain(text: str) -> tuple[Fraction, bool] | None:
    """A plain number's value and whether it is a percentage; `None` for anything else."""
    cleaned = (
        text.strip()
        .replace("\\%", "%")
        .replace("\\$", "")
        .replace("$", "")
        .replace("\\,", "")
        .strip()
        .rstrip(".")
    )
    match = _PLAIN.fullmatch(cleaned.replace(" ", ""))
    if match is None or not (match.group(2) or match.group(3)) or len(cleaned) > LONGEST_ANSWER:
        return None
    sign, whole, decimals, denominator, percent = match.groups()
    if denominator is not None and int(denominator) == 0:
        return None
    value = Fraction(f"{(whole or '0').replace(',', '')}{decimals or ''}") / int(denominator or 1)
    return (-value if sign == "-" else value), bool(percent)


def _equal(answer: str, reference: str) -> bool:
    left, right = _plain(answer), _plain(reference)
    if left is not None and right is not None:
        (a, a_percent), (b, b_percent) = left, right
        if a == b:
            return True
        return a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)
    if answer.strip() == reference.strip():
        return bool(answer.strip())
    return _symbolically_equal(answer, reference)


def _symbolically_equal(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]

    def parsed(text: str) -> list[object]:
        marked = text if "$" in text or "\\(" in text or "\\[" in text else f"${text}$"
        # no timer of its own: the pool ends what takes too long
        return parse(marked, extraction_config=kinds, parsing_timeout=None)

    return bool(verify(parsed(reference), parsed(answer), timeout_seconds=None))


def _final_answer(text: str, extract: str) -> str | None:
    if extract != "last_number":
        boxed = last_boxed(text)
        if boxed is not None or extract == "boxed":
            return boxed
    return last_number(text)


def score_math(text: str, reference: str, extract: str) -> tuple[bool, str]:
    """Whether the answer is right, and a verdict.

    Args:
        text: the model's answer; of a very long one only the end is read.
        reference: the right answer: a number, an expression, or LaTeX.
        extract: see `MathReward.extract`.
    """
    answer = _final_answer(text[-LONGEST_TEXT:], extract)
    if (answer is None or _plain(reference) is None) and extract == "auto":
        whole = _last_formula(text[-LONGEST_TEXT:])
        answer = last_boxed(text[-LONGEST_TEXT:]) or whole or answer
    if answer is None:
        return False, "no answer"
    if len(answer) > LONGEST_ANSWER:
        return False, "wrong"
    right = _equal(answer, reference)
    return right, "correct" if right else "wrong"


_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def _last_formula(text: str) -> str | None:
    """Content of the last LaTeX formula; of an equation, what stands after its last `=`."""
    found = _FORMULA.findall(text)
    if not found:
        return None
    formula = next(part for part in found[-1] if part)
    return formula.rsplit("=", 1)[-1].strip() or None


def math_verifier(config: MathReward, pool: WorkerPool) -> Verifier:
    """Scores in the pool."""

    async def verify(rollout: Rollout) -> Judgement:
        right, verdict = await in_pool(
            pool,
            score_math,
            rollout.text,
            rollout.prompt.answer,
            config.extract,
            time_limit_s=config.time_limit_s,
        )
        return Judgement(value=float(right), verdict=verdict, correct=right)

    return verify
