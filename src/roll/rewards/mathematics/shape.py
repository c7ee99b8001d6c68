r"""Parse the shape of an answer: a value, a list, a set, a point, an interval, a union, or a relation.

    cleaned text ─► \cup? ─► commas, `or`? ─► = < \le? ─► one pair of brackets? ─► a value, as text

Each step scans the text once, and brackets nest at most `MAX_DEPTH` levels deep, so the time is linear in the length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Group",
    "Relation",
    "Shape",
    "TooDeepError",
    "Union",
    "is_list",
    "is_name",
    "parse_shape",
    "split_outside",
    "strip_brackets",
]

MAX_DEPTH = 30
_TOKEN_PATTERN = re.compile(r"\\[a-zA-Z]+|\\.|(?<![a-zA-Z])(?:or|and)(?![a-zA-Z])|.", re.DOTALL)
_OPENING = {"(", "[", "{", "\\{", "\\begin"}
_CLOSING = {")", "]", "}", "\\}", "\\end"}
_LIST_SEPARATORS = {",", ";", "or", "and", "\\lor", "\\land", "\\\\"}
_RELATION_SIGNS = {
    "=",
    "<",
    ">",
    "\\le",
    "\\ge",
    "\\ne",
    "\\approx",
    "\\equiv",
    "\\mid",
    "\\nmid",
    "\\not",
    "\\sim",
    "\\propto",
}
_IMPLICATION_SIGNS = {"\\Rightarrow", "\\implies", "\\rightarrow", "\\to", "\\Longrightarrow", "\\therefore"}
_NAME_PATTERN = re.compile(
    r"_\{[^{}]*\}|_\w|\\(?:text|mathbf|mathrm|vec|overline|overrightarrow|angle|triangle|frac)(?![a-zA-Z])"
)


class TooDeepError(Exception):
    """Brackets are nested deeper than `MAX_DEPTH`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Several values, or an interval."""

    opening: str
    r"""`(`, `[`, `\{`, or empty for a list without brackets."""
    closing: str
    items: tuple[Shape, ...]

    @property
    def is_ordered(self) -> bool:
        """True if the order of the values matters."""
        return self.opening in ("(", "[")


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals or sets."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    r"""An equation, an inequality, or a chain of them: `1 < x \le 3`."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]
    """The signs between the sides."""

    @property
    def is_equation(self) -> bool:
        """True if all signs are equalities, exact or approximate."""
        return set(self.signs) <= {"=", "\\approx", "\\equiv"}

    @property
    def text(self) -> str:
        """The relation as LaTeX."""
        rest = zip(self.signs, self.sides[1:], strict=True)
        return self.sides[0] + "".join(f" {sign} {side}" for sign, side in rest)


Shape: TypeAlias = "str | Group | Union | Relation"


def parse_shape(text: str) -> Shape:
    """Parse a cleaned text to its shape: a value, a group, a union or a relation.

    Raises:
        TooDeepError: Brackets are nested deeper than `MAX_DEPTH`.
    """
    return _parse(text, MAX_DEPTH)


def _parse(text: str, max_depth: int) -> Shape:
    if max_depth == 0:
        raise TooDeepError
    text = split_outside(text, _IMPLICATION_SIGNS)[0][-1].strip().rstrip(".,;").strip()
    foreign = re.fullmatch(r"([\[\]])([^\[\]]*),([^\[\]]*)([\[\]])", text)
    if foreign and (foreign[1], foreign[4]) != ("[", "]"):  # `]1,2[`: as (1,2)
        ends = tuple(_parse(part, max_depth - 1) for part in (foreign[2], foreign[3]))
        return Group("(" if foreign[1] == "]" else "[", ")" if foreign[4] == "[" else "]", ends)
    if "\\cup" in text and len(parts := re.split(r"\\cup(?![a-zA-Z])", text)) > 1:
        first = _strip_membership(parts[0])
        return Union(tuple(_parse(part, max_depth - 1) for part in (first, *parts[1:])))
    parts, separators = split_outside(text, _LIST_SEPARATORS)
    if len(parts) > 1:
        return _parse_list(parts, separators, max_depth)
    member = _strip_membership(text)
    if member != text:
        return _parse(member, max_depth - 1)
    sides, signs = split_outside(text, _RELATION_SIGNS)
    if signs and any(side.strip() for side in sides):
        return Relation(tuple(side.strip() for side in sides), tuple(signs))
    return _parse_bracketed(text, max_depth)


def _strip_membership(text: str) -> str:
    r"""Return `S` for a text `x \in S`; return any other text unchanged."""
    parts, signs = split_outside(text, {"\\in"})
    return parts[1] if len(signs) == 1 else text


def _parse_list(parts: list[str], separators: list[str], max_depth: int) -> Shape:
    r"""Parse a list without brackets, given its parts and the separators between them.

    `p=5,q=2;p=7,q=2` is a list of points; inequalities joined by `or` are a union.
    """
    if ";" in separators and "," in separators:
        points: list[list[str]] = [[]]
        for part, separator in zip(parts, [*separators, ";"], strict=True):
            points[-1].append(part)
            if separator != ",":
                points.append([])
        groups = [Group("(", ")", tuple(_parse_value(p, max_depth - 1) for p in point)) for point in points[:-1]]
        return Group("", "", tuple(groups))
    items = [_parse(part, max_depth - 1) for part in parts if part.strip()]
    if len(items) == 1:
        return items[0]
    named = [item for item in items if isinstance(item, Relation)]
    if len(named) == len(items) and not any(item.is_equation for item in named) and {"or", "\\lor"} & set(separators):
        return Union(tuple(items))
    if named == items[:1] and named and named[0].is_equation and is_name(named[0].sides[0]):
        items[0] = _parse(named[0].sides[-1], max_depth - 1)  # `x = 1, 2`: the variable is only named
    return Group("", "", tuple(items))


def _parse_value(text: str, max_depth: int) -> Shape:
    """Parse a value. For an equation such as `x = 3`, return only the last side."""
    shape = _parse(text, max_depth)
    return shape.sides[-1] if isinstance(shape, Relation) and shape.is_equation else shape


def _parse_bracketed(text: str, max_depth: int) -> Shape:
    inner, opening, closing = strip_brackets(text)
    if opening == "{":
        return _parse(inner, max_depth - 1)
    if opening:
        parts = [part for part in split_outside(inner, {",", ";"})[0] if part.strip()]
        if opening == "\\{" or len(parts) > 1:
            return Group(opening, closing, tuple(_parse(part, max_depth - 1) for part in parts))
        if opening == "(" and closing == ")" and parts:
            return _parse(inner, max_depth - 1)
    return text


def strip_brackets(text: str) -> tuple[str, str, str]:
    """Strip a pair of brackets that encloses the whole text.

    Return a tuple: the text inside, the opening bracket, and the closing bracket. If there is no such pair, return the
    whole text and two empty strings.
    """
    tokens = list(_TOKEN_PATTERN.finditer(text))
    if len(tokens) < 2 or tokens[0].group() not in ("(", "[", "{", "\\{") or tokens[-1].group() not in _CLOSING:
        return text, "", ""
    depth = 0
    for token in tokens[:-1]:
        depth += (token.group() in _OPENING) - (token.group() in _CLOSING)
        if depth == 0:
            return text, "", ""
    return text[tokens[0].end() : tokens[-1].start()], tokens[0].group(), tokens[-1].group()


def split_outside(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Split a text at the separators outside all brackets; return the parts and the separators found."""
    parts: list[str] = []
    found: list[str] = []
    depth = begin = 0
    for match in _TOKEN_PATTERN.finditer(text):
        token = match.group()
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in separators:
            parts.append(text[begin : match.start()])
            found.append(token)
            begin = match.end()
    return [*parts, text[begin:]], found


def is_name(text: str) -> bool:
    """Return whether a text is a name (`x`, `f(2)`, `AB`, `|AB|`, `S_1 : S_2`, `(p,q)`), rather than a calculation."""
    bare = _NAME_PATTERN.sub("", text)
    if re.search(r"[-+*^!]|\\(?!alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|Delta)", bare):
        return False
    outside = re.sub(r"[A-Za-z]\s*\([^()]*\)", "f", bare)  # `f(2)`
    letters = re.sub(r"[\W\d_]", "", re.sub(r"\\[a-zA-Z]+", "x", outside))
    return (
        bool(letters) and not re.search(r"\d", outside) and (len(letters) == 1 or not letters.islower() or "(" in bare)
    )


def is_list(text: str) -> bool:
    r"""Return whether a cleaned text is a list of values (`1,2`, `(2,2),(6,2)`, `1 \pm 2`, a set)."""
    if "\\pm" in text or len([part for part in split_outside(text, _LIST_SEPARATORS)[0] if part.strip()]) > 1:
        return "\\cup" not in text
    return strip_brackets(text)[1] == "\\{"
