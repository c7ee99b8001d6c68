"""Parse the unit after an answer, with its dimension and factor.

Units are compared only if both the answer and the reference have a known unit: 500 m equals 0.5 km, and 5 m does not
equal 5 cm. Any other text after a number (`apples`, `square units`) is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = [
    "Unit",
    "compute_unit_factor",
    "find_leading_unit",
    "is_statement",
    "parse_unit",
    "split_percent",
    "split_unit",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: its dimension, and its factor to the base unit."""

    dimension: tuple[tuple[str, int], ...]
    """Base quantities with their powers, in order: `(("length", 2),)`."""
    factor: Fraction
    """Multiple of the base unit: m, g, s, l, dollar, degree."""


def _parse_quantity(dimension: str, text: str) -> dict[str, tuple[str, Fraction]]:
    """Parse a table such as `m/meter=1 km=1000` to the dimension and the factor of each unit, by name.

    `/` separates several names of one unit.
    """
    units: dict[str, tuple[str, Fraction]] = {}
    for entry in text.split():
        names, _, factor = entry.partition("=")
        for name in names.split("/"):
            units[name] = (dimension, Fraction(factor))
    return units


_UNITS = {
    **_parse_quantity("length", "m/meter/meters/metre/metres=1 km/kilometer/kilometers/kilometre/kilometres=1000"),
    **_parse_quantity("length", "cm/centimeter/centimeters/centimetre/centimetres=0.01 dm=0.1"),
    **_parse_quantity("length", "mm/millimeter/millimeters/millimetre/millimetres=0.001 in/inch/inches=0.0254"),
    **_parse_quantity("length", "ft/foot/feet=0.3048 yd/yard/yards=0.9144 mi/mile/miles=1609.344"),
    **_parse_quantity("mass", "g/gram/grams=1 kg/kilogram/kilograms=1000 mg/milligram/milligrams=0.001"),
    **_parse_quantity("mass", "lb/lbs/pound/pounds=453.59237 oz/ounce/ounces=28.349523125"),
    **_parse_quantity("time", "s/sec/secs/second/seconds=1 min/mins/minute/minutes=60 h/hr/hrs/hour/hours=3600"),
    **_parse_quantity("time", "ms/millisecond/milliseconds=0.001 day/days=86400 week/weeks=604800"),
    **_parse_quantity(
        "volume", "l/L/liter/liters/litre/litres=1 ml/mL/milliliter/milliliters/millilitre/millilitres=0.001"
    ),
    **_parse_quantity("money", "dollar/dollars=1 cent/cents=0.01"),
}
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_TEXT_COMMAND_PATTERN = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_PART_PATTERN = re.compile(
    r"\s*(?P<sign>/|per\b|\*|\\cdot)?\s*(?P<name>[a-zA-Z]+)\.?\s*(?:\^?\s*\{?\s*(?P<power>[23²³])\s*\}?)?"
)
_LAYOUT_PATTERN = re.compile(r"\\[,;:! ]|~|\$")
_UNIT_TEXT_PATTERN = re.compile(r"\\(?:text|textrm|textbf|textnormal|mathrm|mbox)\s*\{[^{}]*\}")
_TOKEN_PATTERN = re.compile(
    rf"(?P<text>{_UNIT_TEXT_PATTERN.pattern})|(?P<layout>\s+|\\[,;:! ]|~|\$)|(?P<power>\^\s*(?:\{{\s*[23]\s*\}}|[23]))"
    r"|(?P<slash>/)|(?P<stop>\.)|(?P<word>(?<![\\a-zA-Z])[a-zA-Z]{2,12}(?![a-zA-Z]))|(?P<other>\\[a-zA-Z]+|.)",
    re.DOTALL,
)
_STATEMENT_PATTERN = re.compile(
    r"\b(?:is|are|was|were|be|not|no|isn't|nor|or|and|wrong|false|incorrect|if|but|than|least|most|more|less|between|plus|minus|fails)\b",
    re.IGNORECASE,
)
"""Words that turn the text after a number into a statement, rather than the name of a thing."""
_OTHER_NUMBER_PATTERN = re.compile(r"(?<![a-zA-Z\d^])(?<!\^\{)\d")
r"""A number that is not the power of a unit (`5 cm \text{7 m}`)."""
_NUMBER_MODIFIER_PATTERN = re.compile(
    r"(?:[\s,;:!~\\]|\\(?:text|textrm|textbf|mathrm|mbox)\s*\{)*(?:squared|cubed|half|factorial)\b(?!\s*[a-zA-Z])",
    re.IGNORECASE,
)
"""Words that change the number if they are directly after it (`7 squared`, but not `7 cm squared`)."""
_WORD_PATTERN = re.compile(r"\S+")
MAX_UNIT_WORDS = 4
"""Maximum number of words of a unit (`square meters per second`)."""
_PERCENT = ("\\%", "%", "percent", "percentage", "pct")


def is_statement(text: str) -> bool:
    r"""Return whether the text after a number is a statement (`\text{ is wrong}`) instead of a noun."""
    return (
        any(pattern.search(text) for pattern in (_STATEMENT_PATTERN, _OTHER_NUMBER_PATTERN))
        or _NUMBER_MODIFIER_PATTERN.match(text) is not None
    )


def parse_unit(text: str) -> Unit | None:
    r"""Return the unit that a text names (`km/h`, `\text{ cm}^2`, `square feet`); `None` for anything else."""
    rest = _LAYOUT_PATTERN.sub(" ", _TEXT_COMMAND_PATTERN.sub(r" \1 ", text)).strip().rstrip(".")
    powers: dict[str, int] = {}
    factor = Fraction(1)
    position, extra, divide = 0, 1, False
    while position < len(rest):
        match = _PART_PATTERN.match(rest, position)
        if match is None or match.end() == position:
            return None
        position = match.end()
        name = match["name"]
        if match["sign"] in ("/", "per"):
            divide = True
        elif name == "per":
            divide = True
            continue
        if name in _POWER_WORDS:
            extra = _POWER_WORDS[name]
            continue
        known = _UNITS.get(name) or _UNITS.get(name.lower())
        if known is None:
            return None
        power = {"2": 2, "²": 2, "3": 3, "³": 3}.get(match["power"] or "", extra) * (-1 if divide else 1)
        powers[known[0]] = powers.get(known[0], 0) + power
        factor *= known[1] ** power
        extra = 1
    if powers.get("length") == 3 and len(powers) == 1:  # a liter is a cubic decimeter
        powers, factor = {"volume": 1}, factor * 1000
    return Unit(tuple(sorted(powers.items())), factor) if powers else None


def find_leading_unit(text: str) -> Unit | None:
    """Return the unit at the start of a text after a number (`cm of rope`, `square meters of carpet`).

    `in` alone is a preposition (`5 in total`); it is an inch only if no text follows it.
    """
    whole = parse_unit(text)
    if whole is not None:
        return whole
    words = _WORD_PATTERN.findall(_LAYOUT_PATTERN.sub(" ", _TEXT_COMMAND_PATTERN.sub(r" \1 ", text)))[:MAX_UNIT_WORDS]
    found = (parse_unit(" ".join(words[:count])) for count in range(len(words), 0, -1))
    return None if words[:1] == ["in"] else next((unit for unit in found if unit is not None), None)


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split a formula from the unit or noun after it, and return the formula and the unit.

    `6\sqrt{3} cm^2` is split before `cm^2`. The unit is `None` if there is none, or if the text names something else
    (`\text{ apples}`). A statement after the formula (`\text{ is wrong}`) is kept in the formula. Tokens are removed
    from the end, so the time is linear in the length.
    """
    tokens = list(_TOKEN_PATTERN.finditer(text))
    while tokens and tokens[-1].lastgroup in ("layout", "stop"):
        tokens.pop()
    if not tokens:
        return text, None
    end = tokens[-1].end()
    for kinds in (("text", "word"), ("text",)):
        begin = _find_trailing_tokens(tokens, kinds)
        trailing = text[begin:end]
        if not trailing or not text[:begin].strip() or is_statement(trailing):
            continue
        unit = find_leading_unit(trailing)
        if unit is not None or kinds == ("text",):
            return text[:begin].strip(), unit
    return text, None


def _find_trailing_tokens(tokens: Sequence[re.Match[str]], kinds: tuple[str, ...]) -> int:
    """Return the start position of the trailing tokens of these kinds, including separators between them.

    If the text does not end with such tokens, return the length of the text.
    """
    begin = tokens[-1].end()
    for token in reversed(tokens):
        if token.lastgroup in kinds:
            begin = token.start()
        elif token.lastgroup not in ("layout", "power", "slash"):
            break
    return begin


def split_percent(text: str) -> tuple[str, bool]:
    """Return the text without a percent sign at its end, and whether it had one."""
    bare = text.strip().rstrip("$. ")
    for sign in _PERCENT:
        if bare.endswith(sign):
            return bare.removesuffix(sign).strip(), True
    return text, False


def compute_unit_factor(answer_unit: Unit | None, reference_unit: Unit | None) -> Fraction | None:
    """Return the factor that converts a number in the answer's unit to the reference's unit.

    The factor is `None` if the units measure different quantities. If either unit is unknown, the factor is 1.
    """
    if answer_unit is None or reference_unit is None:
        return Fraction(1)
    return answer_unit.factor / reference_unit.factor if answer_unit.dimension == reference_unit.dimension else None
