"""What an answer is as a whole: a value, a set, a list, an interval, a union, a matrix, an equation.

text ─ unit, percent ─► tokens ─► \\cup? ─► relations? ─► commas? ─► one pair of brackets? ─► a value
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roll.rewards.formulas.nodes import Node, NotUnderstoodError, Operation, Symbol
from roll.rewards.formulas.parse import parse_value
from roll.rewards.formulas.tokens import CLOSING, OPENING, RELATIONS, SEPARATOR, split, tokens_of

__all__ = ["Answer", "Collection", "Matrix", "Relation", "Union", "both_signs", "read"]

_MATRIX = re.compile(
    r"\s*(?:\\left)?\s*[(\[]?\s*\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}(?P<body>.*)"
    r"\\end\s*\{(?P=kind)\}\s*(?:\\right)?\s*[)\]]?\s*",
    re.DOTALL,
)
_COLUMNS = re.compile(r"\s*\{[lcr|\s]*\}")
_ROW = re.compile(r"\\\\(?:\s*\[[^\]]*\])?")


@dataclass(frozen=True, slots=True)
class Collection:
    """Several values, or an interval."""

    opening: str
    """`(`, `[`, `{`, or empty for a bare list."""
    closing: str
    items: tuple[Answer, ...]

    @property
    def ordered(self) -> bool:
        """Whether the order of its values matters."""
        return self.opening in ("(", "[")


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals or sets."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of values."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation, an inequality, or a chain of them: `1 < x \\le 3`."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]
    """Between the sides: `=`, `<`, `>`, `\\le`, `\\ge`, `\\ne`."""

    @property
    def assigned(self) -> str | None:
        """The variable that is given a value: `x` of `x = 3`."""
        first = self.sides[0]
        return first.name if isinstance(first, Symbol) and set(self.signs) == {"="} else None


Answer: TypeAlias = "Node | Collection | Union | Matrix | Relation"


def read(text: str) -> Answer:
    """The answer that a text is.

    Raises:
        NotUnderstoodError: it is none of the kinds known here.
        TooLargeError: it is longer, or nested deeper, than any sensible answer.
    """
    if found := _MATRIX.fullmatch(text):
        return _matrix(found["body"], found["kind"] == "array")
    return _read(tokens_of(text))


def _matrix(body: str, is_array: bool) -> Matrix:
    if is_array:
        columns = _COLUMNS.match(body)
        if columns is None:
            raise NotUnderstoodError
        body = body[columns.end() :]
    rows = [row for row in _ROW.split(body) if row.strip()]
    cells = tuple(tuple(_value(tokens_of(cell)) for cell in row.split("&")) for row in rows)
    if not cells or len({len(row) for row in cells}) != 1:
        raise NotUnderstoodError
    return Matrix(cells)


def _read(tokens: list[str]) -> Answer:
    if not tokens:
        raise NotUnderstoodError
    unions = split(tokens, {"\\cup"})
    if len(unions) > 1:
        return Union(tuple(_read(part) for part in unions))
    membership = split(tokens, {"\\in"})
    if len(membership) == 2 and len(membership[0]) == 1:
        return _read(membership[1])
    parts = split(tokens, {SEPARATOR})
    if len(parts) > 1:
        return _list(parts)
    if RELATIONS.intersection(tokens):
        return _relation(tokens)
    return _bracketed(tokens)


def _list(parts: list[list[str]]) -> Answer:
    """A bare list; in `x = 1, 2` and `x = 1, x = 2` the variable is only named."""
    parts = [part for part in parts if part]  # `1, 2, and 3`
    if len(parts) == 1:
        return _read(parts[0])
    items = [_read(part) for part in parts]
    first = items[0]
    if isinstance(first, Relation) and first.assigned and len(first.sides) == 2:
        rest = items[1:]
        same = [isinstance(item, Relation) and item.assigned == first.assigned for item in rest]
        if all(same):
            items = [item.sides[-1] for item in items if isinstance(item, Relation)]
        elif not any(isinstance(item, Relation) for item in rest):
            items = [first.sides[1], *rest]
    return Collection("", "", tuple(items))


def _relation(tokens: list[str]) -> Relation:
    sides: list[Node] = []
    signs: list[str] = []
    depth = 0
    side: list[str] = []
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in RELATIONS:
            sides.append(_left_side(side) if not sides else _value(side))
            signs.append(token)
            side = []
        else:
            side.append(token)
    sides.append(_value(side))
    if not signs:
        raise NotUnderstoodError  # the sign stands inside brackets
    return Relation(tuple(sides), tuple(signs))


def _left_side(tokens: list[str]) -> Node:
    """`f(x)` before a sign is the name of a function."""
    if len(tokens) == 4 and tokens[0].isalpha() and tokens[1] == "(" and tokens[2].isalpha() and tokens[3] == ")":
        return Symbol("".join(tokens))
    return _value(tokens)


def _bracketed(tokens: list[str]) -> Answer:
    if tokens == ["\\emptyset"]:
        return Collection("{", "}", ())
    opening, closing = tokens[0], tokens[-1]
    if len(tokens) > 1 and opening in ("(", "[", "\\{") and closing in (")", "]", "\\}") and _spans(tokens):
        parts = split(tokens[1:-1], {SEPARATOR})
        if opening == "\\{" or len(parts) > 1:
            if (opening == "\\{") != (closing == "\\}"):
                raise NotUnderstoodError
            items = () if parts == [[]] else tuple(_read(part) for part in parts)
            return Collection(opening[-1], closing[-1], items)
    return _value(tokens)


def _spans(tokens: Sequence[str]) -> bool:
    """Whether the first bracket closes at the last token."""
    depth = 0
    for position, token in enumerate(tokens):
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return position == len(tokens) - 1
    return False


def _value(tokens: list[str]) -> Node:
    if not tokens:
        raise NotUnderstoodError
    return parse_value(tokens)


def both_signs(node: Node) -> tuple[Node, ...]:
    """The two values of `a \\pm b`; the node itself where it has no `\\pm`.

    Raises:
        NotUnderstoodError: `\\pm` occurs several times.
    """
    count = _count_pm(node)
    if count == 0:
        return (node,)
    if count > 1:
        raise NotUnderstoodError
    return (_with_sign(node, "add"), _with_sign(node, "sub"))


def _count_pm(node: Node) -> int:
    if not isinstance(node, Operation):
        return 0
    return (node.name == "pm") + sum(map(_count_pm, node.args))


def _with_sign(node: Node, sign: str) -> Node:
    if not isinstance(node, Operation):
        return node
    args = tuple(_with_sign(arg, sign) for arg in node.args)
    if node.name != "pm":
        return Operation(node.name, args)
    return Operation("add", args if sign == "add" else (args[0], Operation("neg", (args[1],))))
