r"""Detect an answer that is an unevaluated calculation: `17 \cdot 23` instead of 391.

A number is written with digits, a sign, one fraction, a power, a root, a name (`\pi`). Any notation that leaves two
values to be combined (a sum, a difference, a product, a quotient, a greatest common divisor) is a calculation, however
its operation is written. The check reads the tokens of the cleaned formula once, so the time is linear in its length.
"""

from __future__ import annotations

import re

from roll.rewards.mathematics.notation import normalize_notation
from roll.rewards.mathematics.plain_number import parse_number
from roll.rewards.mathematics.shape import split_outside, strip_brackets
from roll.rewards.mathematics.symbolic import is_rounding_of
from roll.rewards.mathematics.units import split_percent, split_unit

__all__ = ["is_unevaluated"]

_TOKEN_PATTERN = re.compile(r"\d+(?:[.,]\d+)*|\\[a-zA-Z]+|\\.|[a-zA-Z]+|\S")
_OPERATORS = {"+", "-", "\\cdot", "\\times", "/", "\\pm", "\\mp", "\\bmod", "\\mod", "\\pmod", ":", "%"}
_UNEVALUATED_TOKENS = {
    "\\gcd",
    "\\lcm",
    "\\max",
    "\\min",
    "gcd",
    "lcm",
    "max",
    "min",
    "mod",
    "\\sum",
    "\\prod",
    "\\int",
    "\\frac",
    "\\lfloor",
    "\\lceil",
    "⌊",
    "⌈",
}
"""Tokens that make a formula a calculation, wherever they occur; fractions of numbers are recognized first."""
_OPENING = {"(", "[", "{", "|", "\\{", "^", "_", "\\sqrt", "\\binom", "\\log", "\\ln", ","}
_FACTORS = {"(", "\\sqrt", "\\binom", "\\log", "\\ln"}
_MODULUS_PATTERN = re.compile(r"\\pmod\s*\{?\s*\d+\s*\}?|\(\s*\\mod\s*\d+\s*\)")
_SLASH_PATTERN = re.compile(r"-?\s*(\d+)\s*/\s*(\d+)")
_NUMBER_PATTERN = re.compile(
    r"-?\s*\\frac\s*\{\s*-?\s*[\d.]+\s*\}\s*\{\s*-?\s*[\d.]+\s*\}"  # a fraction
    r"|-?\s*\d+\s*\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|-?\d+ \d+/\d+"  # a mixed number
    r"|-?\s*[\d.]+\s*(?:\\cdot|x)\s*10\s*\^\s*(?:\{\s*-?\s*\d+\s*\}|\d)"  # scientific notation
)


def is_unevaluated(answer: str) -> bool:
    r"""Return whether the part of an answer after its last `=` is an unevaluated calculation.

    `\frac{84}{2}` is a fraction, although not in lowest terms; `84/2` is a division, but `3/4` is a fraction.
    `3\sqrt{13} \approx 10.82` is evaluated, because it states the number.
    """
    last = split_outside(normalize_notation(answer), {"=", "\\equiv"})[0][-1]
    exact, *rounded = split_outside(last, {"\\approx"})[0]
    if rounded and not re.search(r"\d", exact):
        exact, rounded = rounded[-1], []  # `x \approx 11`
    return _is_unevaluated_text(exact) and not (rounded and is_rounding_of(rounded[-1], exact, min_decimals=0))


def _is_unevaluated_text(text: str) -> bool:
    text = _strip_unit(text)
    if slash := _SLASH_PATTERN.fullmatch(text):
        top, bottom = int(slash[1]), int(slash[2])
        return bottom > 1 and top % bottom == 0
    if _NUMBER_PATTERN.fullmatch(text) or parse_number(text) is not None:
        return False
    return _is_calculation(_TOKEN_PATTERN.findall(text))


def _strip_unit(text: str) -> str:
    """Remove a modulus (`mod 7`), a unit, a percent sign, and brackets around the whole text."""
    text = _MODULUS_PATTERN.sub("", text.replace("\\times", "\\cdot")).strip().rstrip(".").strip()
    text = split_percent(split_unit(text)[0])[0].strip()
    while (found := strip_brackets(text))[1:] in (("(", ")"), ("{", "}")):
        text = found[0].strip()
    return text


def _is_calculation(tokens: list[str]) -> bool:
    """Return whether the tokens of a formula contain an operation that is not evaluated.

    Examples are an operator between two operands, two adjacent factors, or a token such as `\\gcd` or `\\lfloor`.
    """
    before = ""  # the previous token if it ended an operand, else empty
    for token in tokens:
        if token in _UNEVALUATED_TOKENS:
            return True
        if token in _OPERATORS:
            if before or token not in ("+", "-"):
                return True
        elif token == "|" and before:
            before = "group"
        elif token in _OPENING:
            if before == ")" and token == "(":
                return True  # (17)(23)
            if before == "number" and token in _FACTORS:
                return True  # 17(23), 6\sqrt{49}
            before = ""
        elif token in ")}" or token == "]":
            before = ")" if token == ")" else "group"
        else:
            if before == ")" and token[0].isdigit():
                return True  # (17)23
            before = "number" if token[0].isdigit() else "operand"
    return False
