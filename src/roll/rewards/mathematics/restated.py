r"""Detect an answer that only restates the question: `17 \cdot 23` instead of 391.

A number is written with digits, a sign, one fraction, a power, a root, a name (`\pi`). Any notation that leaves two
values to be combined (a sum, a difference, a product, a quotient, a greatest common divisor) is a calculation, however
its operation is written. One rule, on the tokens of the cleaned formula; the time is linear in its length.
"""

from __future__ import annotations

import re

from roll.rewards.mathematics.notation import cleaned
from roll.rewards.mathematics.plain_number import number_of
from roll.rewards.mathematics.shape import split_outside, strip_brackets
from roll.rewards.mathematics.symbolic import rounds
from roll.rewards.mathematics.units import split_percent, split_unit

__all__ = ["restates"]

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|\\[a-zA-Z]+|\\.|[a-zA-Z]+|\S")
_OPERATORS = {"+", "-", "\\cdot", "\\times", "/", "\\pm", "\\mp", "\\bmod", "\\mod", "\\pmod", ":", "%"}
_OF_SEVERAL = {"\\gcd", "\\lcm", "\\max", "\\min", "gcd", "lcm", "max", "min", "mod", "\\sum", "\\prod", "\\int"}
_OF_SEVERAL |= {"\\frac", "\\lfloor", "\\lceil", "⌊", "⌈"}
_OPENING = {"(", "[", "{", "|", "\\{", "^", "_", "\\sqrt", "\\binom", "\\log", "\\ln", ","}
_FACTORS = {"(", "\\sqrt", "\\binom", "\\log", "\\ln"}
_MODULUS = re.compile(r"\\pmod\s*\{?\s*\d+\s*\}?|\(\s*\\mod\s*\d+\s*\)")
_SLASH = re.compile(r"-?\s*(\d+)\s*/\s*(\d+)")
_NUMBERS = re.compile(
    r"-?\s*\\frac\s*\{\s*-?\s*[\d.]+\s*\}\s*\{\s*-?\s*[\d.]+\s*\}"  # a fraction
    r"|-?\s*\d+\s*\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|-?\d+ \d+/\d+"  # a mixed number
    r"|-?\s*[\d.]+\s*(?:\\cdot|x)\s*10\s*\^\s*(?:\{\s*-?\s*\d+\s*\}|\d)"  # scientific notation
)


def restates(answer: str) -> bool:
    r"""Return whether the part of an answer behind its last `=` is a calculation that still has to be carried out.

    `\frac{84}{2}` is a fraction, though not in lowest terms; `84/2` is a division, while `3/4` is a fraction. In
    `3\sqrt{13} \approx 10.82` the number is given too.
    """
    last = split_outside(cleaned(answer), {"=", "\\equiv"})[0][-1]
    exact, *rounded = split_outside(last, {"\\approx"})[0]
    if rounded and not re.search(r"\d", exact):
        exact, rounded = rounded[-1], []  # `x \approx 11`
    return _leaves_something(exact) and not (rounded and rounds(rounded[-1], exact, fewest_decimals=0))


def _leaves_something(text: str) -> bool:
    text = _bare(text)
    if slash := _SLASH.fullmatch(text):
        top, bottom = int(slash[1]), int(slash[2])
        return bottom > 1 and top % bottom == 0
    if _NUMBERS.fullmatch(text) or number_of(text) is not None:
        return False
    return _is_calculation(_TOKEN.findall(text))


def _bare(text: str) -> str:
    """Return the text without modulus, unit, percent sign, and brackets around all of it."""
    text = _MODULUS.sub("", text.replace("\\times", "\\cdot")).strip().rstrip(".").strip()
    text = split_percent(split_unit(text)[0])[0].strip()
    while (found := strip_brackets(text))[1:] in (("(", ")"), ("{", "}")):
        text = found[0].strip()
    return text


def _is_calculation(tokens: list[str]) -> bool:
    """Return whether the tokens hold two adjacent operands, or an operator between two operands."""
    before = ""  # the last token ended an operand, or is empty
    for token in tokens:
        if token in _OF_SEVERAL:
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
