"""Compare two answers by their shapes, and their values by math-verify.

answer, reference ─► cleaned ─► shapes ─► matched part by part ─► plain numbers: exactly
                                                              └─► anything else: `symbolic.has_same_value`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from roll.rewards.mathematics.notation import normalize_notation
from roll.rewards.mathematics.plain_number import is_same_number, parse_number
from roll.rewards.mathematics.shape import Group, Relation, Shape, Union, is_name, parse_shape
from roll.rewards.mathematics.symbolic import has_same_value, is_rounding_of, is_same_relation
from roll.rewards.mathematics.units import compute_unit_factor, split_percent, split_unit

__all__ = ["is_same_answer"]

MAX_ITEMS = 40
"""Maximum number of items of an unordered collection that are compared pairwise; longer ones are compared in order."""
_MIRRORED_SIGNS = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_NUMBER_IN_BASE_PATTERN = re.compile(r"\(?\s*([0-9A-Z]+)\s*\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_MODULUS_PATTERN = re.compile(
    r"\\p?mod\s*\{?\s*(\d+)\s*\}?|\(\s*\\(?:p|b)?mod\s*(\d+)\s*\)|\\bmod\s*(\d+)|\(mod\s*(\d+)\)"
)
_INDEXED_NUMBER_PATTERN = re.compile(r"\d\s*_")
_INDEX_PATTERN = re.compile(r"_(?:\d+|\{\d+\})$")
_PLUS_MINUS_PATTERN = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])\s*")


def is_same_answer(answer: str, reference: str) -> bool:
    """Return whether `answer` equals `reference`.

    Raises:
        TooDeepError: The answer has too many nested brackets.
        TooLargeError: The answer contains numbers or powers that are too large to compute.
    """
    answer, reference = normalize_notation(answer), normalize_notation(reference)
    return _remove_spaces(answer) == _remove_spaces(reference) != "" or _is_same(
        parse_shape(answer), parse_shape(reference)
    )


def _remove_spaces(text: str) -> str:
    return text.replace(" ", "")


def _is_same(answer: Shape, reference: Shape) -> bool:
    answer, reference = _expand_signs(answer), _expand_signs(reference)
    if isinstance(answer, Relation) or isinstance(reference, Relation):
        return _match_relations(answer, reference)
    if isinstance(answer, Union) or isinstance(reference, Union):
        return _match_in_any_order(_get_union_parts(answer), _get_union_parts(reference))
    if isinstance(answer, Group) or isinstance(reference, Group):
        return _match_groups(answer, reference)
    return _match_values(answer, reference)


def _expand_signs(shape: Shape) -> Shape:
    r"""Replace `a \pm b` with the values `a + b` and `a - b`, as a list or as two items of the enclosing list."""
    if isinstance(shape, str):
        both = _substitute_signs(shape)
        return shape if len(both) == 1 else Group("", "", both)
    if isinstance(shape, Relation) and shape.is_equation and is_name(shape.sides[0]):
        both = _substitute_signs(shape.sides[-1])
        return shape if len(both) == 1 else Group("", "", both)
    if isinstance(shape, Group) and not shape.is_ordered and any("\\pm" in str(item) for item in shape.items):
        items: list[Shape] = []
        for item in shape.items:
            expanded = _expand_signs(item)
            items += expanded.items if isinstance(expanded, Group) and not expanded.opening else [expanded]
        return Group(shape.opening, shape.closing, tuple(items))
    return shape


def _substitute_signs(text: str) -> tuple[str, ...]:
    signs = _PLUS_MINUS_PATTERN.findall(text)
    if not signs:
        return (text,)
    upper = _PLUS_MINUS_PATTERN.sub(lambda match: "+" if match.group().startswith("\\pm") else "-", text)
    lower = _PLUS_MINUS_PATTERN.sub(lambda match: "-" if match.group().startswith("\\pm") else "+", text)
    return upper.lstrip("+ "), lower


# ---- relations


def _match_relations(answer: Shape, reference: Shape) -> bool:
    if isinstance(reference, Relation) and isinstance(answer, Relation):
        return _match_two_relations(answer, reference)
    if isinstance(reference, Relation):
        if reference.is_equation:  # the answer to `x = 5` is 5
            names_it = is_name(reference.sides[0]) or "\\approx" in reference.signs
            return names_it and any(_is_same(answer, _parse_part(value)) for value in _get_values(reference))
        interval = _make_interval(reference)
        return interval is not None and _is_same(answer, interval)
    assert isinstance(answer, Relation)
    if answer.is_equation:
        return any(_is_same(_parse_part(value), reference) for value in _get_values(answer))
    if isinstance(reference, str):
        return False  # `\ge 5` is not 5
    interval = _make_interval(answer)
    return interval is not None and _is_same(interval, reference)


def _parse_part(text: str) -> Shape:
    return parse_shape(text)


def _match_two_relations(answer: Relation, reference: Relation) -> bool:
    if "\\equiv" in reference.signs and "\\equiv" in answer.signs and (_MODULUS_PATTERN.search(reference.text)):
        return _match_residues(answer, reference)
    if answer.is_equation and reference.is_equation:
        names = is_name(answer.sides[0]), is_name(reference.sides[0])
        if all(names) and _remove_spaces(answer.sides[0]) == _remove_spaces(reference.sides[0]):
            values = _get_values(reference)
            return any(
                _is_same(_parse_part(ours), _parse_part(theirs)) for ours in _get_values(answer) for theirs in values
            )
    elif not answer.is_equation and not reference.is_equation:
        ours, theirs = _make_interval(answer), _make_interval(reference)
        if ours is not None and theirs is not None and _get_variable(answer) == _get_variable(reference):
            return _is_same(ours, theirs)
    return is_same_relation(answer.text, reference.text)


def _get_values(relation: Relation) -> list[str]:
    r"""Return the values that an equation states.

    The value is the last side. For `exact \approx rounded`, both sides are values if the rounding is correct; otherwise
    only the exact side is a value.
    """
    sides = [_MODULUS_PATTERN.sub("", side).strip() for side in relation.sides]
    if "\\approx" not in relation.signs:
        return [sides[-1]]
    exact, rounded = sides[relation.signs.index("\\approx")], sides[-1]
    if is_name(exact) or not exact:
        return [rounded]
    return [exact, rounded] if is_rounding_of(rounded, exact, min_decimals=0) else [exact]


def _match_residues(answer: Relation, reference: Relation) -> bool:
    moduli, residues = [], []
    for relation in (answer, reference):
        found = _MODULUS_PATTERN.search(relation.text)
        number = parse_number(_get_values(relation)[0])
        if found is None or number is None or number.value.denominator != 1:
            return False
        moduli.append(int(next(group for group in found.groups() if group)))
        residues.append(number.value)
    return moduli[0] == moduli[1] != 0 and (residues[0] - residues[1]) % moduli[0] == 0


def _make_ascending(relation: Relation) -> Relation:
    if relation.signs[0] in (">", "\\ge"):
        return Relation(relation.sides[::-1], tuple(_MIRRORED_SIGNS.get(sign, sign) for sign in relation.signs[::-1]))
    return relation


def _get_variable(relation: Relation) -> str:
    return next((_remove_spaces(side) for side in relation.sides if is_name(side)), "")


def _make_interval(relation: Relation) -> Group | Union | None:
    r"""Convert an inequality to its interval: `1 < x \le 3` becomes `(1, 3]`, `x > 2` becomes `(2, \infty)`.

    `1 < |x| < 3` becomes a union of two intervals. Return `None` for any other relation.
    """
    up = _make_ascending(relation)
    if not set(up.signs) <= {"<", "\\le"} or not all(up.sides):
        return None
    opening = "(" if up.signs[0] == "<" else "["
    closing = ")" if up.signs[-1] == "<" else "]"
    if len(up.sides) == 3 and is_name(up.sides[1]):
        if re.fullmatch(r"\|[a-z]\|", _remove_spaces(up.sides[1])):
            mirrored = Group(
                _mirror_bracket(closing), _mirror_bracket(opening), (f"-({up.sides[2]})", f"-({up.sides[0]})")
            )
            return Union((mirrored, Group(opening, closing, (up.sides[0], up.sides[2]))))
        return Group(opening, closing, (up.sides[0], up.sides[2]))
    if len(up.sides) == 2 and is_name(up.sides[0]) and not is_name(up.sides[1]):
        if re.fullmatch(r"\|[a-z]\|", _remove_spaces(up.sides[0])):
            return Group(_mirror_bracket(closing), closing, (f"-({up.sides[1]})", up.sides[1]))
        return Group("(", closing, ("-\\infty", up.sides[1]))
    if len(up.sides) == 2 and is_name(up.sides[1]) and not is_name(up.sides[0]):
        return Group(opening, ")", (up.sides[0], "\\infty"))
    return None


def _mirror_bracket(bracket: str) -> str:
    return {"(": ")", ")": "(", "[": "]", "]": "["}[bracket]


# ---- unions, matrices, groups


def _get_union_parts(shape: Shape) -> list[Shape]:
    parts = shape.parts if isinstance(shape, Union) else (shape,)
    return [(_make_interval(part) or part) if isinstance(part, Relation) else part for part in parts]


def _match_groups(answer: Shape, reference: Shape) -> bool:
    ours = answer if isinstance(answer, Group) else Group("", "", (answer,))
    theirs = reference if isinstance(reference, Group) else Group("", "", (reference,))
    if _is_empty(ours) or _is_empty(theirs):
        return _is_empty(ours) and _is_empty(theirs)
    if ours.is_ordered and theirs.is_ordered:
        # `(1, 2)` is not `[1, 2]`, but `[1, 2, 3]` is the vector (1, 2, 3)
        alike = (ours.opening, ours.closing) == (theirs.opening, theirs.closing)
        return (alike or len(ours.items) > 2) and _match_in_order(ours.items, theirs.items)
    if not ours.is_ordered and not theirs.is_ordered:  # `1, 2` is the set {1, 2}
        if (_has_distinct_names(ours) and not _has_names(theirs)) or (
            _has_distinct_names(theirs) and not _has_names(ours)
        ):
            return _match_in_order(ours.items, theirs.items)  # `2, 1` is not `a = 1, b = 2`
        return _match_in_any_order(ours.items, theirs.items)
    point, bare = (ours, theirs) if ours.is_ordered else (theirs, ours)
    is_point = (point.opening, point.closing) == ("(", ")") and not bare.opening  # `1, 2` for the point (1, 2)
    return is_point and _match_in_order(ours.items, theirs.items)


def _has_names(group: Group) -> bool:
    return any(isinstance(item, Relation) for item in group.items)


def _has_distinct_names(group: Group) -> bool:
    """Return whether a group has several values, each assigned to a different name (`x = 1, y = 2`).

    Names that differ only in an index, such as `x_1` and `x_2`, are treated as the same.
    """
    named = [item for item in group.items if isinstance(item, Relation) and item.is_equation and is_name(item.sides[0])]
    return 1 < len(group.items) == len({_INDEX_PATTERN.sub("", _remove_spaces(item.sides[0])) for item in named})


def _is_empty(group: Group) -> bool:
    return not group.items or group.items == ("\\emptyset",)


def _match_in_order(answer: Sequence[Shape], reference: Sequence[Shape]) -> bool:
    return len(answer) == len(reference) and all(map(_is_same, answer, reference))


def _match_in_any_order(answer: Sequence[Shape], reference: Sequence[Shape]) -> bool:
    """Return whether the items of both lists match one to one, in any order, after removing duplicates.

    Lists of more than `MAX_ITEMS` items must match in order.
    """
    if max(len(answer), len(reference)) > MAX_ITEMS:
        return _match_in_order(answer, reference)
    ours, theirs = _remove_duplicates(answer), _remove_duplicates(reference)
    if len(ours) != len(theirs):
        return False
    for item in ours:
        match = next((place for place, other in enumerate(theirs) if _is_same(item, other)), None)
        if match is None:
            return False
        del theirs[match]
    return True


def _remove_duplicates(items: Sequence[Shape]) -> list[Shape]:
    kept: list[Shape] = []
    for item in items:
        if not any(_is_same(item, other) for other in kept):
            kept.append(item)
    return kept


# ---- values


def _match_values(answer: str, reference: str) -> bool:
    if _remove_spaces(answer) == _remove_spaces(reference):
        return bool(_remove_spaces(answer))
    ours, theirs = parse_number(answer), parse_number(reference)
    if ours is not None and theirs is not None:
        # Either number may be a rounded decimal of the other, which may be a fraction.
        return is_same_number(ours, theirs) or is_same_number(theirs, ours)
    if (based := _match_in_bases(answer, reference)) is not None:
        return based
    if bool(_INDEXED_NUMBER_PATTERN.search(answer)) != bool(_INDEXED_NUMBER_PATTERN.search(reference)):
        return False  # `-1_7` is in base 7
    answer, answer_unit = split_unit(answer)
    reference, reference_unit = split_unit(reference)
    factor = compute_unit_factor(answer_unit, reference_unit)
    if factor is None:
        return False
    (answer, answer_in_percent), (reference, reference_in_percent) = split_percent(answer), split_percent(reference)
    if (
        has_same_value(_multiply(answer, factor), reference)
        or is_rounding_of(answer, reference)
        or is_rounding_of(reference, answer)
    ):
        return True
    if answer_in_percent == reference_in_percent:
        return False
    return has_same_value(
        _multiply(answer, Fraction(1, 100) if answer_in_percent else Fraction(100)), reference
    )  # `50%` is 0.5 too


def _multiply(text: str, factor: Fraction) -> str:
    return text if factor == 1 else rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({text})"


def _match_in_bases(answer: str, reference: str) -> bool | None:
    """Return whether two numbers have equal digits and bases; `None` if neither has a base, or one is not a number.

    A reference without a base is in base 10; a reference with a base requires that base.
    """
    found = [_NUMBER_IN_BASE_PATTERN.fullmatch(text.strip()) for text in (answer, reference)]
    if not any(found):
        return None
    parts = []
    for match, text in zip(found, (answer, reference), strict=True):
        if match is None and not re.fullmatch(r"\d+", text.strip()):
            return None  # `x_2` or a formula
        parts.append((match[1].lstrip("0"), int(match[2])) if match else (text.strip().lstrip("0"), 10))
    return parts[0] == parts[1]
