"""A calculator: exact for integers, floating point otherwise, and bounded in time and memory.

Grammar, from loosest to tightest binding: sum (`+ -`), product (`* / // % ×  ÷`), sign, power (`^ **`, right to left),
`!`, and a number, a constant, a function call, or brackets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from roll.envs.tools.base import ToolError

__all__ = ["Calculator", "calculate"]

Number: TypeAlias = int | float

LONGEST = 1_000
"""Most characters of an expression."""
DEEPEST = 50
"""Most nested brackets, signs and powers."""
MOST_BITS = 4_096
"""Most bits of an integer, about 1,233 digits."""
_TOKEN = re.compile(
    r"\s*(?:(\d{1,400}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,4})?|\.\d{1,400}(?:[eE][+-]?\d{1,4})?)"
    r"|([A-Za-z_]\w{0,15})|(\*\*|//|[-+*/%^!(),×÷]))",
    re.ASCII,
)


def _factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise ToolError("a factorial is of a whole number from 0 to 500")
    return math.factorial(value)


def _whole(function: Callable[..., int]) -> Callable[..., Number]:
    def applied(*values: Number) -> Number:
        if not all(isinstance(value, int) and abs(value) <= 10_000 for value in values):
            raise ToolError("this function takes whole numbers up to 10000")
        return function(*values)

    return applied


def _gcd(*values: Number) -> Number:
    if not all(isinstance(value, int) for value in values):
        raise ToolError("gcd and lcm take whole numbers")
    return math.gcd(*values)  # type: ignore[arg-type]


def _lcm(*values: Number) -> Number:
    _gcd(*values)
    return math.lcm(*values)  # type: ignore[arg-type]


def _sqrt(value: Number) -> Number:
    root = math.isqrt(value) if isinstance(value, int) and value >= 0 else None
    return root if root is not None and root * root == value else math.sqrt(value)


def _rounded(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolError("round takes a number, and a whole number of digits")
    return round(value, digits) if digits else round(value)


FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "sqrt": _sqrt,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _rounded,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "log": math.log,
    "ln": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "gcd": _gcd,
    "lcm": _lcm,
    "factorial": _factorial,
    "comb": _whole(lambda n, k: math.comb(n, k) if n <= 2_000 else _too_large()),
    "perm": _whole(lambda n, k: math.perm(n, k) if k <= 400 else _too_large()),
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def _too_large() -> Any:
    raise ToolError("the result is too large")


def calculate(expression: str) -> Number:
    """Compute the value of an expression.

    Raises:
        ToolError: The expression is malformed, has no value, or its value is too large.
    """
    if len(expression) > LONGEST:
        raise ToolError(f"an expression has at most {LONGEST} characters, this one has {len(expression)}")
    reader = _Reader(_tokens(expression))
    try:
        value = reader.sum()
        if reader.next:
            raise ToolError(f"'{reader.next}' is not expected after '{' '.join(reader.read[-3:])}'")
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"it has no value: {error}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(expression.rstrip())
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ToolError(f"'{expression[position:].strip()[:1]}' is nothing that a calculator knows")
        tokens.append(match[match.lastindex or 0])
        position = match.end()
    return tokens


class _Reader:
    """Recursive-descent parser over tokens, with bounded depth."""

    def __init__(self, tokens: list[str]) -> None:
        self._left = tokens[::-1]
        self.read: list[str] = []
        self._depth = 0

    @property
    def next(self) -> str:
        return self._left[-1] if self._left else ""

    def _take(self) -> str:
        if not self._left:
            raise ToolError("the expression ends too early")
        self.read.append(self._left.pop())
        return self.read[-1]

    def _expect(self, token: str) -> None:
        if self.next != token:
            raise ToolError(f"'{token}' is missing")
        self._take()

    def sum(self) -> Number:
        value = self._product()
        while self.next in ("+", "-"):
            value = _bounded(value + self._product() if self._take() == "+" else value - self._product())
        return value

    def _product(self) -> Number:
        value = self._signed()
        while self.next in _PRODUCTS:
            value = _bounded(_PRODUCTS[self._take()](value, self._signed()))
        return value

    def _signed(self) -> Number:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ToolError(f"it is nested deeper than {DEEPEST} levels")
        try:
            if self.next in ("+", "-"):
                return -self._signed() if self._take() == "-" else self._signed()
            return self._power()
        finally:
            self._depth -= 1

    def _power(self) -> Number:
        value = self._atom()
        while self.next == "!":
            self._take()
            value = _factorial(value)
        if self.next in ("^", "**"):
            self._take()
            return _bounded(_raised(value, self._signed()))
        return value

    def _atom(self) -> Number:
        token = self._take()
        if token == "(":
            value = self.sum()
            self._expect(")")
            return value
        if token[0].isdigit() or token[0] == ".":
            return int(token) if token.isdigit() else float(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token in FUNCTIONS:
            return _bounded(FUNCTIONS[token](*self._arguments()))
        if token[0].isalpha():
            raise ToolError(f"there is no '{token}'; functions: {', '.join(FUNCTIONS)}; constants: pi, e")
        raise ToolError(f"'{token}' is not expected here")

    def _arguments(self) -> list[Number]:
        self._expect("(")
        values = [self.sum()]
        while self.next == ",":
            self._take()
            values.append(self.sum())
        self._expect(")")
        return values


_PRODUCTS: Mapping[str, Callable[[Number, Number], Number]] = {
    "*": lambda a, b: a * b,
    "×": lambda a, b: a * b,
    "/": lambda a, b: _divided(a, b),
    "÷": lambda a, b: _divided(a, b),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def _divided(a: Number, b: Number) -> Number:
    """Divide, exactly if possible."""
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def _raised(base: Number, power: Number) -> Number:
    whole = isinstance(base, int) and isinstance(power, int)
    if whole and abs(power) * (base.bit_length() - 1) > MOST_BITS:  # type: ignore[union-attr]
        raise ToolError("the result is too large")
    value = base**power
    if isinstance(value, complex):
        raise ToolError("a negative number has no such real power")
    return value


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ToolError("the result is too large")
    return value


class Calculator:
    """A `Tool`."""

    name = "calculator"
    description = "Computes an arithmetic expression, such as (3 + 4) * 2^5 / sqrt(16)."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }

    def call(self, arguments: Mapping[str, Any], /) -> str:
        """See `Tool`."""
        value = calculate(arguments["expression"])
        return str(value) if isinstance(value, int) else repr(value).removesuffix(".0")
