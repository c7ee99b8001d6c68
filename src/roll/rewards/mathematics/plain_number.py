"""Parse plain numbers exactly: `1,234`, `-3.50`, `7/8`, `1 1/2`, `$5`, `40%`, `3e8`, `25 km`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from roll.rewards.mathematics.units import Unit, compute_unit_factor, find_leading_unit, is_statement, parse_unit

__all__ = [
    "NUMBER_PATTERN",
    "VULGAR_FRACTIONS",
    "PlainNumber",
    "has_finite_decimals",
    "is_same_number",
    "normalize_numbers",
    "parse_number",
]

_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = (
    r"(?:[eE][-+]?\d{1,3}(?![\d.])"
    r"|\s?(?:\*|×|x|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?(?:\{[-+]?\d{1,3}\}|[-+]?\d{1,3}))"
)
NUMBER_PATTERN = re.compile(
    r"(?P<mixed>\d{1,9} \d{1,9}/\d{1,9}(?![\d/]))"
    rf"|(?P<top>{_DIGITS})(?P<power>{_POWER})?(?:\s?/\s?(?P<bottom>\d+(?:\.\d+)?))?"
)
"""An unsigned number in a normalized text (see `normalize_numbers`)."""

_FRACTION_PATTERN = re.compile(r"(?:(\d)\s*)?\\[dt]?frac\s*(?:\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}|(\d)\s*(\d))")
_UNIT_PATTERN = re.compile(
    r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}|[^\W\d_]+|\s+|[°²³./]|\\[,;:! ]|~"
    r"|\^\s*(?:\{\s*\\?(?:[23]|circ|prime)\s*\}|[23]|\\circ)|\\(?:degree|circ)\b"
)
_CURRENCY_PATTERN = re.compile(
    r"\\(?:text|textrm|textbf|mathrm|mbox)\s*+\{\s*+"
    r"(?:[€£¥₹]|(?:USD|US|EUR|GBP|CAD|AUD|HK|Rs|INR|CNY|RMB|JPY)\b\.?)?+\s*+\}"
)
_ENCLOSED_TEXT_PATTERN = re.compile(
    r"\\(?:text|textbf|mathbf|mathrm|mbox|displaystyle)\s*\{([^{}]*)\}|\((.*)\)|\{(.*)\}|\*\*(.*)\*\*", re.DOTALL
)
_LATEX_THOUSANDS_SEPARATOR_PATTERN = re.compile(
    r"(?<=\d)(?:,\\!\s?|\\!,|\\[,! ]|\s?\{\s?,\s?\}\s?|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"
)
_SHORT_WORD_PATTERN = re.compile(r"(?:\s|\\[,;:! ]|~)+([a-zA-Z]{1,2})(?![a-zA-Z])")
_SHORT_UNITS_AND_WORDS = {"am", "pm", "AM", "PM", "of", "in", "to", "N", "V", "W", "A", "J", "K", "C", "F"}
_SHORT_UNITS_AND_WORDS |= {
    "Hz",
    "kN",
    "kW",
    "Pa",
    "kV",
    "mA",
    "kJ",
    "eV",
    "dB",
    "cc",
    "yr",
    "mV",
    "mW",
    "GB",
    "MB",
    "TB",
}
VULGAR_FRACTIONS = {
    sign: f"{top}/{bottom}"
    for sign, top, bottom in zip("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", "112131234151357", "233445555668888", strict=True)
}
_VULGAR_PATTERN = re.compile(rf"(?:(\d)\s?)?([{''.join(VULGAR_FRACTIONS)}])")
_SPACED_THOUSANDS_PATTERN = re.compile(r"\d{1,3}(?: \d{3})+(?![\d/,]| ?\d)")
"""Thousands separated by blanks, if the text can only be one number."""
_SCALE_PATTERN = re.compile(
    r"(?:\s|\\[,;:! ]|~)*(?P<opened>\\(?:text|textrm|textbf|mathrm|mbox)\s*\{\s*)?"
    r"(?P<name>hundred|thousand|million|billion|trillion)s?\b\s*(?(opened)(?P<more>[^{}]*)\})",
    re.IGNORECASE,
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MAX_LENGTH = 1_000
"""Maximum number of characters of a plain number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainNumber:
    """A number: its exact value and its notation."""

    value: Fraction
    percent: bool
    num_decimals: int
    """Digits after the point; 0 for fractions."""
    unit: Unit | None = None
    """The unit after the number, if it is known to `roll.rewards.mathematics.units`."""
    scale: int = 1
    """Factor of a word such as `million`; already included in `value`."""


def normalize_numbers(text: str) -> str:
    """Write the minus signs, thousands separators and fractions of a text in one notation: `-`, `,` and `a/b`."""
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%")
    text = _LATEX_THOUSANDS_SEPARATOR_PATTERN.sub(",", text)
    text = _VULGAR_PATTERN.sub(lambda match: (f"{match[1]} " if match[1] else "") + VULGAR_FRACTIONS[match[2]], text)
    return _FRACTION_PATTERN.sub(_replace_fraction, text)


def _replace_fraction(match: re.Match[str]) -> str:
    before, top, bottom, short_top, short_bottom = match.groups()
    simple = f"{(top or short_top).replace(',', '')}/{(bottom or short_bottom).replace(',', '')}"
    return f"{before} {simple}" if before else simple


def parse_number(text: str) -> PlainNumber | None:
    """Parse a text that is one number, which may have a currency sign, a percent sign, a scale word or a unit.

    Return `None` for any other text.
    """
    if len(text) > MAX_LENGTH:
        return None
    rest = _CURRENCY_PATTERN.sub(" ", normalize_numbers(text).replace("$", " "))
    rest = _unwrap(rest.strip().rstrip(".\\").strip())
    sign = 1
    if found := re.match(r"[€£¥\s]*([-+])?[€£¥\s]*", rest):
        sign = -1 if found.group(1) == "-" else 1
        rest = rest[found.end() :]
    rest = (
        _SPACED_THOUSANDS_PATTERN.sub(lambda found: found.group().replace(" ", ""), rest, count=1)
        if _SPACED_THOUSANDS_PATTERN.match(rest)
        else rest
    )
    match = NUMBER_PATTERN.match(rest)
    if match is None:
        return None
    rest = rest[match.end() :]
    scale = 1
    if named := _SCALE_PATTERN.match(rest):
        scale, rest = _SCALES[named["name"].lower()], (named["more"] or "") + rest[named.end() :]
    percent = re.match(r"\s?(?:%|percent\b)", rest)
    if percent:
        rest = rest[percent.end() :]
    value = _compute_value(match)
    if value is None or not _is_unit(rest):
        return None
    is_decimal = match["top"] and not match["bottom"] and not match["power"] and scale == 1
    decimals = match["top"].partition(".")[2] if is_decimal else ""
    unit = find_leading_unit(rest) if rest else None
    value *= sign * scale
    return PlainNumber(value=value, percent=bool(percent), num_decimals=len(decimals), unit=unit, scale=scale)


def _unwrap(text: str) -> str:
    r"""Return the text without `\text{…}`, brackets, or asterisks around the whole text."""
    while match := _ENCLOSED_TEXT_PATTERN.fullmatch(text):
        inner = next(part for part in match.groups() if part is not None).strip()
        if inner.count("(") != inner.count(")") or inner == text:
            break
        text = inner
    return text


def _compute_value(match: re.Match[str]) -> Fraction | None:
    if match["mixed"]:
        whole, part = match["mixed"].split(" ")
        top, bottom = part.split("/")
        return None if int(bottom) == 0 else int(whole) + Fraction(int(top), int(bottom))
    top_value = Fraction(match["top"].replace(",", ""))
    if match["power"]:
        exponent = re.search(r"[-+]?\d+(?=\}?$)", match["power"])
        assert exponent is not None
        top_value *= Fraction(10) ** int(exponent.group())
    if match["bottom"] is None:
        return top_value
    bottom_value = Fraction(match["bottom"])
    return None if bottom_value == 0 else top_value / bottom_value


def _is_unit(text: str) -> bool:
    """Return whether the text after a number is a unit or empty.

    Examples of texts without a unit after 5: `5x` (one adjacent letter), `5^2`, `5 x`, `5 x^2` and `5 ab`, because
    words of one or two letters are variables unless they name a unit.
    """
    if re.match(r"[^\W\d_](?![^\W\d_])|\s*\^[\s{]*\d|[²³/]", text):
        return False
    short = _SHORT_WORD_PATTERN.match(text)
    if short and short[1] not in _SHORT_UNITS_AND_WORDS and parse_unit(short[1]) is None:
        return False
    if is_statement(text):
        return False
    position = 0
    while position < len(text):
        match = _UNIT_PATTERN.match(text, position)
        if match is None:
            return False
        position = match.end()
    return True


def is_same_number(answer: PlainNumber, reference: PlainNumber) -> bool:
    """Return whether an answer equals the reference: exactly, as a percentage, or correctly rounded.

    `50%` equals both `0.5` and `50`. Units are compared if both numbers have one: 500 m equals 0.5 km. A decimal equals
    a fraction without finite decimals, such as 1/3, if it has at least four decimals and is rounded correctly. If only
    one number has a word such as `million`, the word is treated as a unit, because the other number may be a count of
    millions.
    """
    factor = compute_unit_factor(answer.unit, reference.unit)
    if factor is None:
        return False
    candidates = [answer.value * factor]
    if answer.percent != reference.percent:
        candidates.append(answer.value / 100 if answer.percent else answer.value * 100)
    if 1 in (answer.scale, reference.scale):
        candidates.append(answer.value * factor * reference.scale / answer.scale)
    if reference.value in candidates:
        return True
    return (
        not has_finite_decimals(reference.value)
        and answer.num_decimals >= 4
        and abs(answer.value - reference.value) <= Fraction(1, 2 * 10**answer.num_decimals)
    )


def has_finite_decimals(value: Fraction) -> bool:
    """Return whether a decimal can express the value exactly."""
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1
