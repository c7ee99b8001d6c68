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

MAX_LENGTH = 1_000
"""Maximum length of an expression, in characters."""
MAX_DEPTH = 50
"""Maximum nesting of brackets, signs and powers."""
MAX_BITS = 4_096
"""Maximum number of bits of an integer: about 1,233 digits."""
_TOKEN_PATTERN = re.compile(
    r"\s*(?:(\d{1,400}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,4})?|\.\d{1,400}(?:[eE][+-]?\d{1,4})?)"
    r"|([A-Za-z_]\w{0,15})|(\*\*|//|[-+*/%^!(),×÷]))",
    re.ASCII,
)


def _compute_factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= 500:
        raise ToolError("the argument of factorial must be an integer from 0 to 500")
    return math.factorial(value)


def _require_integers(function: Callable[..., int]) -> Callable[..., Number]:
    def apply(*values: Number) -> Number:
        if not all(isinstance(value, int) and abs(value) <= 10_000 for value in values):
            raise ToolError("the arguments of comb and perm must be integers from -10000 to 10000")
        return function(*values)

    return apply


def _compute_gcd(*values: Number) -> Number:
    if not all(isinstance(value, int) for value in values):
        raise ToolError("the arguments of gcd and lcm must be integers")
    return math.gcd(*values)  # type: ignore[arg-type]


def _compute_lcm(*values: Number) -> Number:
    _compute_gcd(*values)
    return math.lcm(*values)  # type: ignore[arg-type]


def _compute_sqrt(value: Number) -> Number:
    root = math.isqrt(value) if isinstance(value, int) and value >= 0 else None
    return root if root is not None and root * root == value else math.sqrt(value)


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolError("the number of digits in round must be an integer from -100 to 100")
    return round(value, digits) if digits else round(value)


FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "sqrt": _compute_sqrt,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
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
    "gcd": _compute_gcd,
    "lcm": _compute_lcm,
    "factorial": _compute_factorial,
    "comb": _require_integers(lambda n, k: math.comb(n, k) if n <= 2_000 else _raise_too_large()),
    "perm": _require_integers(lambda n, k: math.perm(n, k) if k <= 400 else _raise_too_large()),
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def _raise_too_large() -> Any:
    raise ToolError("the result is too large")


def calculate(expression: str) -> Number:
    """Compute the value of an expression.

    Raises:
        ToolError: The expression is malformed, has no value, or its value is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"an expression must have at most {MAX_LENGTH} characters, got {len(expression)}")
    reader = _Parser(_tokenize(expression))
    try:
        value = reader.parse_sum()
        if reader.next:
            raise ToolError(f"'{reader.next}' is not expected after '{' '.join(reader.read[-3:])}'")
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"the expression has no value: {error}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def _tokenize(expression: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(expression.rstrip())
    while position < end:
        match = _TOKEN_PATTERN.match(expression, position)
        if match is None:
            raise ToolError(f"unexpected character '{expression[position:].strip()[:1]}'")
        tokens.append(match[match.lastindex or 0])
        position = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser over tokens, with bounded depth."""

    def __init__(self, tokens: list[str]) -> None:
        self._left = tokens[::-1]
        self.read: list[str] = []
        self._depth = 0

    @property
    def next(self) -> str:
        return self._left[-1] if self._left else ""

    def _pop_token(self) -> str:
        if not self._left:
            raise ToolError("the expression ends too early")
        self.read.append(self._left.pop())
        return self.read[-1]

    def _expect(self, token: str) -> None:
        if self.next != token:
            raise ToolError(f"'{token}' is missing")
        self._pop_token()

    def parse_sum(self) -> Number:
        value = self._parse_product()
        while self.next in ("+", "-"):
            value = _check_size(
                value + self._parse_product() if self._pop_token() == "+" else value - self._parse_product()
            )
        return value

    def _parse_product(self) -> Number:
        value = self._parse_signed()
        while self.next in _PRODUCT_OPERATORS:
            value = _check_size(_PRODUCT_OPERATORS[self._pop_token()](value, self._parse_signed()))
        return value

    def _parse_signed(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested deeper than {MAX_DEPTH} levels")
        try:
            if self.next in ("+", "-"):
                return -self._parse_signed() if self._pop_token() == "-" else self._parse_signed()
            return self._parse_power()
        finally:
            self._depth -= 1

    def _parse_power(self) -> Number:
        value = self._parse_atom()
        while self.next == "!":
            self._pop_token()
            value = _compute_factorial(value)
        if self.next in ("^", "**"):
            self._pop_token()
            return _check_size(_raise_to_power(value, self._parse_signed()))
        return value

    def _parse_atom(self) -> Number:
        token = self._pop_token()
        if token == "(":
            value = self.parse_sum()
            self._expect(")")
            return value
        if token[0].isdigit() or token[0] == ".":
            return int(token) if token.isdigit() else float(token)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token in FUNCTIONS:
            return _check_size(FUNCTIONS[token](*self._parse_arguments()))
        if token[0].isalpha():
            raise ToolError(f"unknown name '{token}'; functions: {', '.join(FUNCTIONS)}; constants: pi, e")
        raise ToolError(f"'{token}' is not expected here")

    def _parse_arguments(self) -> list[Number]:
        self._expect("(")
        values = [self.parse_sum()]
        while self.next == ",":
            self._pop_token()
            values.append(self.parse_sum())
        self._expect(")")
        return values


_PRODUCT_OPERATORS: Mapping[str, Callable[[Number, Number], Number]] = {
    "*": lambda a, b: a * b,
    "×": lambda a, b: a * b,
    "/": lambda a, b: _divide(a, b),
    "÷": lambda a, b: _divide(a, b),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def _divide(a: Number, b: Number) -> Number:
    """Divide `a` by `b`; return an integer if both are integers and the quotient is whole."""
    return a // b if isinstance(a, int) and isinstance(b, int) and b and a % b == 0 else a / b


def _raise_to_power(base: Number, power: Number) -> Number:
    whole = isinstance(base, int) and isinstance(power, int)
    if whole and abs(power) * (base.bit_length() - 1) > MAX_BITS:  # type: ignore[union-attr]
        raise ToolError("the result is too large")
    value = base**power
    if isinstance(value, complex):
        raise ToolError("a power of a negative number must have an integer exponent")
    return value


def _check_size(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the result is too large")
    return value


class Calculator:
    """The tool `calculator`."""

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
