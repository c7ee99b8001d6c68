"""The slow verifier, math-verify over sympy, kept from doing harm.

What is certain to explode is refused before; what takes long is interrupted by an alarm inside the process, so that the
worker lives on (starting one costs two seconds); only code that no alarm reaches, such as one huge power of whole
numbers, is left to the pool, which kills the worker.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["looks_explosive", "symbolically_equal"]

DEEPEST = 30
LONGEST_NUMBER = 400
"""Digits."""
SMALL = 4
"""A power whose exponent is a power of numbers above this is computed by nobody."""
_REPEAT_S = 0.05

_POWER = re.compile(r"(?:\^|\*\*)\s*\{?\s*\(?\s*-?(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*\)?\s*!")
_LONG = re.compile(rf"\d{{{LONGEST_NUMBER},}}")
_TOWER = re.compile(r"(?:\^|\*\*)\s*\{?\s*\(?\s*-?\d+\s*[)}]?\s*(?:\^|\*\*)")


def looks_explosive(text: str) -> bool:
    """Whether a formula nests deeper, or holds larger powers, factorials or numbers, than any sensible answer does."""
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > DEEPEST or _LONG.search(text):
        return True
    if any(len(digits) > 4 or int(digits) > 5_000 for digits in _POWER.findall(text)):
        return True
    if any(len(digits) > 3 for digits in _FACTORIAL.findall(text)) or "!!" in text:
        return True
    return bool(_TOWER.search(text)) and any(int(digits) > SMALL for digits in re.findall(r"\d{1,9}", text))


class _Alarm(BaseException):
    """Not an `Exception`, so that nobody on the way takes it for a failure to parse."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_Alarm` after so long, and again, should someone have swallowed it; in a main thread alone.

    The alarm is one of wall time: a worker that waits for a processor is out of luck, as with the pool's own limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: Any) -> None:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def symbolically_equal(answer: str, reference: str, limit_s: float) -> bool:
    """What math-verify says.

    Args:
        answer: LaTeX, or a plain expression.
        reference: the same.
        limit_s: longest time.

    Raises:
        TimeoutError: it took longer.
    """
    try:
        with _limited(limit_s):
            return _verify(answer, reference)
    except _Alarm:
        raise TimeoutError from None


def _verify(answer: str, reference: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        marked = text if "$" in text or "\\(" in text or "\\[" in text else f"${text}$"
        return parse(marked, extraction_config=kinds, parsing_timeout=0)

    return bool(verify(parsed(reference), parsed(answer), timeout_seconds=0))
