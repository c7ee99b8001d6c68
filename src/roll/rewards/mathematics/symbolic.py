"""Compare values by math-verify over sympy, with bounds on time and memory.

A formula that would take too much time or memory is rejected before it is parsed. A slow comparison is
interrupted by an alarm inside the process, so that the worker survives (starting one costs two seconds). An alarm
cannot interrupt some operations, such as one huge power of integers; then the pool kills the worker. Text is parsed as
a whole: no number is extracted from text that cannot be parsed.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from typing import Any, TypeVar

from roll.rewards.mathematics import parser_caches
from roll.rewards.mathematics.notation import convert_decimals, convert_degrees
from roll.rewards.mathematics.plain_number import has_finite_decimals, parse_number

__all__ = [
    "ComparisonTimeoutError",
    "call_with_limit",
    "has_same_value",
    "is_rounding_of",
    "is_same_relation",
    "is_too_large",
    "prepare",
]

T = TypeVar("T")

MAX_DEPTH = 30
MAX_NUMBER_LENGTH = 400
"""Maximum number of digits of a number."""
MAX_POWER = 5_000
MAX_NESTED_POWER_BASE = 4
"""A power is not computed if its exponent is itself a power of numbers above this."""
MIN_DECIMALS = 4
"""Minimum number of decimals of a number that stands for a value without finite decimals."""
MAX_SIGNS = 12
"""Maximum number of consecutive signs."""
MAX_BARS = 24
MAX_INTEGRALS = 6
"""Maximum total number of integrals, sums, products and limits."""
MAX_LENGTH = 4_000
"""Maximum number of characters of a cleaned text (`½` is 11 of them)."""
NUM_SAMPLE_POINTS = 3
_ALARM_INTERVAL_S = 0.05

_POWER_PATTERN = re.compile(r"(?:\^|\*\*)[\s{(]*+-?(\d++)")
_FACTORIAL_PATTERN = re.compile(r"(?<!\d)(\d++)[\s)]*+!")
_LONG_NUMBER_PATTERN = re.compile(rf"\d{{{MAX_NUMBER_LENGTH},}}")
_POWER_TOWER_PATTERN = re.compile(r"(?:\^|\*\*)[\s{(]*+-?\d++[\s)}]*+(?:\^|\*\*)")
_LONG_POWER_TOWER_PATTERN = re.compile(r"(?:[\^_][\s{]*+[a-zA-Z0-9][\s}]*+){5}")
_LARGE_ARGUMENT_PATTERN = re.compile(r"\\[dt]?binom[\s{]*+(\d++)|\\exp[\s(]*+\\exp|\\Gamma[\s(]*+(\d{4,}+)")
_REPEATED_SIGNS_PATTERN = re.compile(rf"(?:(?:[-+±]|\\pm|\\mp)\s*+){{{MAX_SIGNS},}}")
_INTEGRAL_PATTERN = re.compile(r"\\(?:i{0,2}int|oint|sum|prod|lim)(?![a-zA-Z])")
_IMAGINARY_UNIT_PATTERN = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|(?<=[\d}])i|\\i(?![a-zA-Z])")
_FUNCTIONS_PATTERN = re.compile(
    r"\\(?:sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|pi|min|lim|in|Phi|phi|psi|xi|chi)(?![a-zA-Z])"
)


def is_too_large(text: str) -> bool:
    """Return whether a formula is too long, too deeply nested, or has too many or too large numbers.

    Every pattern is possessive, so the run time is linear in the length.
    """
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or len(text) > MAX_LENGTH or text.count("|") > MAX_BARS:
        return True
    if any(
        pattern.search(text) for pattern in (_LONG_NUMBER_PATTERN, _LONG_POWER_TOWER_PATTERN, _REPEATED_SIGNS_PATTERN)
    ):
        return True
    if len(_INTEGRAL_PATTERN.findall(text)) > MAX_INTEGRALS:
        return True
    if any(len(digits) > 4 or int(digits) > MAX_POWER for digits in _POWER_PATTERN.findall(text)):
        return True
    if any(len(digits) > 3 for digits in _FACTORIAL_PATTERN.findall(text)) or "!!" in text or ")!)!" in text:
        return True
    if any(not found or len(found) > 3 for groups in _LARGE_ARGUMENT_PATTERN.findall(text) for found in [max(groups)]):
        return True
    return bool(_POWER_TOWER_PATTERN.search(text)) and any(
        int(digits) > MAX_NESTED_POWER_BASE for digits in re.findall(r"\d{1,9}", text)
    )


class _Alarm(BaseException):
    """The time limit is over. It is not an `Exception`, so that the parser does not catch it as a parse error."""


class ComparisonTimeoutError(Exception):
    """A comparison took too long and was interrupted."""


def call_with_limit(seconds: float, function: Callable[..., T], *args: Any) -> T:
    """Call `function(*args)`, interrupt it after `seconds`, and return its result.

    Outside the main thread, the function runs without a limit.

    The alarm measures wall time, like the pool's timeout, so a worker that waits for a CPU may be interrupted early. An
    alarm may fire while the function returns or raises, but not after `call_with_limit` has returned.

    Raises:
        ComparisonTimeoutError: The function took longer than `seconds`.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args)
    armed = False

    def raise_timeout(_signal: int, _frame: Any) -> None:
        if armed:
            raise _Alarm

    before = signal.signal(signal.SIGALRM, raise_timeout)
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_report_unraisable, hook)
    try:
        armed = True
        # The alarm repeats, in case a handler inside the function swallowed it.
        signal.setitimer(signal.ITIMER_REAL, seconds, _ALARM_INTERVAL_S)
        return function(*args)
    except _Alarm:
        armed = False
        raise ComparisonTimeoutError from None
    finally:
        # The first instruction after the call disarms the alarm, and the interpreter handles no signal before it. The
        # end of a `with` would be a call, at whose entry signals are handled: an alarm there would end the process.
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _report_unraisable(hook: Callable[[sys.UnraisableHookArgs], Any], unraisable: sys.UnraisableHookArgs) -> None:
    """Ignore an alarm that was raised in a destructor, since the alarm repeats; pass any other exception to `hook`."""
    if unraisable.exc_type is not _Alarm:
        hook(unraisable)


def prepare() -> None:
    """Import and warm up the packages that comparisons need, before any time limit applies."""
    import_module("math_verify")
    # math-verify warns that its own timer is off, but ROLL's alarm ends slow comparisons
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for text in (r"\frac{1}{2}x^{2}-3\sqrt{x}", r"2\pi r(r+h)", r"\log_{2} 8+e^{2i}", "y=2x+3"):
        _parse(text)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    """Return a sympy expression with exact numbers; `None` if the text cannot be parsed."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy.logic.boolalg import BooleanAtom

    text = convert_decimals(convert_degrees(text))
    is_complex = _IMAGINARY_UNIT_PATTERN.search(_FUNCTIONS_PATTERN.sub(" ", text)) is not None
    try:
        expression = latex2sympy(
            text,
            is_real=not is_complex,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        expression = _replace_imaginary_unit(expression) if is_complex else expression
        return None if isinstance(expression, BooleanAtom) else expression  # two false relations are not equal
    except (Exception, RecursionError):  # on a model's text the parser may raise anything
        return None
    finally:
        # The parser has ended here, so the caches may be cleared.
        parser_caches.limit_caches()


def _replace_imaginary_unit(expression: Any) -> Any:
    import sympy

    units = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.subs(units) if units else expression


def has_same_value(answer: str, reference: str) -> bool:
    """Return whether two cleaned formulas have the same value for all values of their variables.

    Raises:
        ComparisonTimeoutError: The comparison exceeds the time limit of `call_with_limit`.
    """
    import sympy

    ours, theirs = _parse(answer), _parse(reference)
    if ours is None or theirs is None:
        return False
    if _differ_at_sample_points(ours, theirs):
        return False
    return _is_variable(ours, theirs) if isinstance(theirs, sympy.Symbol) else _compare_by_math_verify(ours, theirs)


def is_same_relation(answer: str, reference: str) -> bool:
    """Return whether two equations or inequalities are equivalent.

    Equations in one variable are equivalent if one is a multiple of the other. Comparing real solutions, as math-verify
    does, would accept any two equations without real solutions.
    """
    import sympy

    ours, theirs = _parse(answer), _parse(reference)
    if ours is None or theirs is None:
        return False
    if isinstance(ours, sympy.Eq) and isinstance(theirs, sympy.Eq):
        names = ours.free_symbols | theirs.free_symbols
        if not names:
            pairs = ((ours.lhs, theirs.lhs), (ours.rhs, theirs.rhs))
            return all(not _differ_at_sample_points(a, b) and _compare_by_math_verify(a, b) for a, b in pairs)
        if len(names) == 1:
            return _is_multiple(ours, theirs)
    return _compare_by_math_verify(ours, theirs)


def _is_multiple(answer: Any, reference: Any) -> bool:
    """Return whether one equation is a nonzero multiple of the other, evaluated at a few points."""
    import sympy

    ratios = []
    try:
        a, b = answer.lhs - answer.rhs, reference.lhs - reference.rhs
        for at in _make_sample_points(answer.free_symbols | reference.free_symbols):
            ours, theirs = sympy.N(a.subs(at), 25), sympy.N(b.subs(at), 25)
            if not (ours.is_finite and theirs.is_finite) or theirs == 0 or ours == 0:
                return False
            ratios.append(ours / theirs)
        return all(abs(ratio - ratios[0]) <= sympy.Float("1e-12") * abs(ratios[0]) for ratio in ratios)
    except (Exception, RecursionError):
        return False


def _compare_by_math_verify(answer: Any, reference: Any) -> bool:
    # math-verify's own timer stays off (0): it would replace the alarm of `call_with_limit`, which is the same signal.
    from math_verify import verify

    try:
        return bool(verify(reference, answer, float_rounding=15, timeout_seconds=0))
    except (Exception, RecursionError):
        return False


def _is_variable(formula: Any, variable: Any) -> bool:
    """Return whether a formula simplifies to a variable.

    math-verify compares variables by name, and so rejects `x + 1 - 1` for `x`.
    """
    import sympy

    try:
        return bool(sympy.expand(formula.doit()) == variable)
    except (Exception, RecursionError):  # sets, relations, and other values without numbers
        return False


def _differ_at_sample_points(a: Any, b: Any) -> bool:
    """Return whether two formulas have different values at one of a few points.

    The result is false if the values cannot be computed. This check is much faster than a proof of equality.
    """
    import sympy

    try:
        names = a.free_symbols | b.free_symbols
        if not names and (difference := (a - b).doit()).is_Rational:
            return bool(difference != 0)  # 2^-100 is not 2^-101
        for at in _make_sample_points(names):
            ours, theirs = (sympy.N(value.subs(at) if at else value, 25) for value in (a, b))
            if not (ours.is_number and theirs.is_number and ours.is_finite and theirs.is_finite):
                return False
            if abs(ours - theirs) > sympy.Float("1e-12") * (1 + abs(theirs)):
                return True
    except (Exception, RecursionError):  # sets, relations, and other values without numbers
        return False
    return False


def _make_sample_points(symbols: set[Any]) -> list[dict[Any, Any]]:
    """Return the points at which formulas are compared: dicts from each variable to a value.

    Without variables, return one empty dict.
    """
    import sympy

    names = sorted(symbols, key=str)
    return [
        {name: sympy.Rational(7 + 4 * place + 5 * number, 6 + number) for place, name in enumerate(names)}
        for number in range(NUM_SAMPLE_POINTS if names else 1)
    ]


def is_rounding_of(decimal: str, exact: str, *, min_decimals: int = MIN_DECIMALS) -> bool:
    """Return whether a plain decimal is the correct rounding of a constant that has no finite decimal form.

    Args:
        decimal: A plain number; for any other text, the result is false.
        exact: The constant.
        min_decimals: Minimum number of decimals; with fewer decimals, the result is false.
    """
    number = parse_number(decimal)
    if number is None or number.num_decimals < min_decimals:
        return False
    value = _compute_constant(exact)
    return value is not None and abs(value - number.value) <= Fraction(1, 2 * 10**number.num_decimals)


def _compute_constant(text: str) -> Fraction | None:
    """Return the value of a constant without finite decimals, to 30 digits.

    Return `None` if the text is not a real constant, or is a rational number with finite decimals.
    """
    import sympy

    number = parse_number(text)
    if number is not None:
        return None if has_finite_decimals(number.value) else number.value
    expression = _parse(text)
    try:
        if expression is None or expression.free_symbols:
            return None
        value = sympy.nsimplify(expression) if expression.is_Rational else sympy.N(expression, 30)
        found = Fraction(str(value))
        return None if expression.is_Rational and has_finite_decimals(found) else found
    except (Exception, RecursionError):
        return None
