"""Values of formulas: exact fractions as long as possible, else numbers of 40 digits; never anything large.

Every operation looks at the size of its result before it computes it, so `10^{10^{10}}` costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath

from roll.rewards.formulas.nodes import Node, NotUnderstoodError, Number, Symbol, TooLargeError

__all__ = ["Value", "compute", "inexact", "same_value"]

Value: TypeAlias = "Fraction | mpmath.mpf | mpmath.mpc"
"""Exact, or to `DIGITS` digits."""

DIGITS = 40
LARGEST_BITS = 40_000
"""Of numerator or denominator of an exact value."""
LARGEST_EXPONENT = 100_000
"""Of an inexact value, to the base of 2."""
LARGEST_ANGLE = 10**12
LARGEST_FACTORIAL = 2_000
TOLERANCE = 1e-25
"""Relative difference of two inexact values that are taken for the same."""

_context = mpmath.MPContext()
_context.dps = DIGITS
_CONSTANTS: dict[str, Any] = {"pi": _context.pi, "e": _context.e, "i": _context.mpc(0, 1)}


class _Undefined(NotUnderstoodError):
    """A division by zero, a logarithm of zero."""


def compute(node: Node, at: Mapping[str, Fraction]) -> Value:
    """The value of a formula.

    Args:
        node: the formula.
        at: a value for each of its variables.

    Raises:
        TooLargeError: it, or something on the way to it, is larger than any sensible answer.
        NotUnderstoodError: it has no value here.
    """
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Symbol):
        if node.name in at:
            return at[node.name]
        if node.name in _CONSTANTS:
            return +_CONSTANTS[node.name]
        raise NotUnderstoodError
    args = [compute(arg, at) for arg in node.args]
    try:
        return _OPERATIONS[node.name](*args)
    except KeyError:
        raise NotUnderstoodError from None
    except (ZeroDivisionError, ValueError):
        raise _Undefined from None
    except OverflowError:
        raise TooLargeError from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise TooLargeError
    return value


def inexact(value: Value) -> Any:
    """To 40 digits."""
    if isinstance(value, Fraction):
        return _context.mpf(value.numerator) / value.denominator
    return value


def _both(exact: Callable[[Fraction, Fraction], Fraction], other: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    def apply(a: Value, b: Value) -> Value:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            return _bounded(exact(a, b))
        return _small(other(inexact(a), inexact(b)))

    return apply


def _magnitude(value: Any) -> float:
    """Base-2 logarithm of an inexact value's size, to a bit; -inf of 0."""
    mag = _context.mag(value)
    return float(mag) if mag > -_context.inf else -math.inf


def _small(value: Any) -> Any:
    if _magnitude(value) > LARGEST_EXPONENT:
        raise TooLargeError
    return value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _exact_power(base, exponent.numerator)
        if base == 0:
            return _zero_power(exponent > 0)
        if base < 0 and exponent.denominator % 2:  # the real root, as people write it
            root = _power(-base, exponent)
            return -root if exponent.numerator % 2 else root
    if exponent == 0:
        return Fraction(1)
    base, exponent = inexact(base), inexact(exponent)
    if base == 0:
        return _zero_power(_context.re(exponent) > 0)
    size = abs(_context.log(base))
    if not _context.isfinite(exponent) or _magnitude(exponent) > 64 or abs(exponent) * size > LARGEST_EXPONENT:
        raise TooLargeError
    return _small(base**exponent)


def _zero_power(positive: bool) -> Fraction:
    if not positive:
        raise _Undefined
    return Fraction(0)


def _exact_power(base: Fraction, exponent: int) -> Fraction:
    if base == 0:
        return Fraction(1) if exponent == 0 else _zero_power(exponent > 0)
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * (bits - 1) > LARGEST_BITS:
        raise TooLargeError
    return base**exponent


def _root(value: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 1_000:
        raise NotUnderstoodError
    n = int(degree)
    if isinstance(value, Fraction):
        sign = -1 if value < 0 else 1
        if sign > 0 or n % 2:
            top, bottom = _whole_root(abs(value.numerator), n), _whole_root(value.denominator, n)
            if top is not None and bottom is not None:
                return Fraction(sign * top, bottom)
            return sign * _context.root(inexact(abs(value)), n)
    return _context.root(inexact(value), n)


def _whole_root(value: int, n: int) -> int | None:
    if n == 2:
        root = math.isqrt(value)
    elif value.bit_length() > 2_000:
        return None
    else:
        root = round(_context.root(value, n)) if value else 0
    return root if root**n == value else None


def _angle(function: Callable[[Any], Any]) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        value = inexact(value)
        if abs(value) > LARGEST_ANGLE:
            raise TooLargeError
        return _small(_clean(function(value)))

    return apply


def _clean(value: Any) -> Any:
    """0 for what is 0 but for rounding (`sin(pi)`), so that dividing by it is noticed."""
    return _context.mpf(0) if abs(value) < 10.0 ** (5 - DIGITS) else value


def _plain(function: Callable[[Any], Any]) -> Callable[[Value], Value]:
    return lambda value: _small(function(inexact(value)))


def _logarithm(value: Value) -> Value:
    if value == 0:
        raise _Undefined
    return Fraction(0) if value == 1 else _context.log(inexact(value))


def _whole(value: Value, largest: int) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise NotUnderstoodError
    if value > largest:
        raise TooLargeError
    return int(value)


def _rounded(function: Callable[[Any], Any]) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        if not isinstance(value, Fraction):
            if _context.im(value) != 0 or _magnitude(value) > 100:
                raise NotUnderstoodError
            value = _context.re(value)
        return Fraction(int(function(value)))

    return apply


def _reciprocal(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: 1 / _clean(function(value))


def _tangent(value: Any) -> Any:
    return _context.sin(value) / _clean(_context.cos(value))


def _absolute(value: Value) -> Value:
    return abs(value)


def _binomial(n: Value, k: Value) -> Value:
    return Fraction(math.comb(_whole(n, LARGEST_FACTORIAL), _whole(k, LARGEST_FACTORIAL)))


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _both(lambda a, b: a + b, lambda a, b: a + b),
    "mul": _both(lambda a, b: a * b, lambda a, b: a * b),
    "div": _both(lambda a, b: a / b, lambda a, b: a / b),
    "neg": lambda a: -a,
    "pow": _power,
    "root": _root,
    "abs": _absolute,
    "floor": _rounded(math.floor),
    "ceiling": _rounded(math.ceil),
    "factorial": lambda a: Fraction(math.factorial(_whole(a, LARGEST_FACTORIAL))),
    "binomial": _binomial,
    "ln": _logarithm,
    "log": _logarithm,
    "sin": _angle(_context.sin),
    "cos": _angle(_context.cos),
    "tan": _angle(_tangent),
    "cot": _angle(lambda x: _context.cos(x) / _clean(_context.sin(x))),
    "sec": _angle(_reciprocal(_context.cos)),
    "csc": _angle(_reciprocal(_context.sin)),
    "arcsin": _plain(_context.asin),
    "arccos": _plain(_context.acos),
    "arctan": _plain(_context.atan),
    "sinh": _angle(_context.sinh),
    "cosh": _angle(_context.cosh),
    "tanh": _angle(_context.tanh),
}


def same_value(a: Value, b: Value) -> bool:
    """Whether they are equal: exactly, or to `TOLERANCE` where one is not exact."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = inexact(a), inexact(b)
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 10.0 ** (10 - DIGITS)))
