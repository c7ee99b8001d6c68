"""Compare two answers: shapes here, values by math-verify.

answer, reference ─► cleaned ─► shapes ─► matched part by part ─► plain numbers: exactly
                                                              └─► anything else: `symbolic.same_value`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from roll.rewards.mathematics.notation import cleaned
from roll.rewards.mathematics.plain_number import number_of, same_number
from roll.rewards.mathematics.shape import Group, Relation, Shape, Union, is_name, shape_of
from roll.rewards.mathematics.symbolic import rounds, same_relation, same_value
from roll.rewards.mathematics.units import same_unit_factor, split_percent, split_unit

__all__ = ["same_answer"]

MOST_ITEMS = 40
"""Most items of an unordered collection that are compared pairwise; longer collections are compared in order."""
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_BASED = re.compile(r"\(?\s*([0-9A-Z]+)\s*\)?\s*_\s*\{?\s*(\d{1,2})\s*\}?")
_MODULUS = re.compile(r"\\p?mod\s*\{?\s*(\d+)\s*\}?|\(\s*\\(?:p|b)?mod\s*(\d+)\s*\)|\\bmod\s*(\d+)|\(mod\s*(\d+)\)")
_INDEXED_NUMBER = re.compile(r"\d\s*_")
_INDEX = re.compile(r"_(?:\d+|\{\d+\})$")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])\s*")


def same_answer(answer: str, reference: str) -> bool:
    """Return whether `answer` equals `reference`.

    Raises:
        TooDeepError: The answer nests deeper than any sensible one.
        TooLargeError: The answer holds numbers or powers that are too large to compute.
    """
    given, right = cleaned(answer), cleaned(reference)
    return _flat(given) == _flat(right) != "" or _same(shape_of(given), shape_of(right))


def _flat(text: str) -> str:
    return text.replace(" ", "")


def _same(given: Shape, right: Shape) -> bool:
    given, right = _spread(given), _spread(right)
    if isinstance(given, Relation) or isinstance(right, Relation):
        return _same_relations(given, right)
    if isinstance(given, Union) or isinstance(right, Union):
        return _unordered(_union_parts(given), _union_parts(right))
    if isinstance(given, Group) or isinstance(right, Group):
        return _same_groups(given, right)
    return _same_values(given, right)


def _spread(shape: Shape) -> Shape:
    r"""Return `a \pm b` as a list of two values, also within a list."""
    if isinstance(shape, str):
        both = _both_signs(shape)
        return shape if len(both) == 1 else Group("", "", both)
    if isinstance(shape, Relation) and shape.is_equation and is_name(shape.sides[0]):
        both = _both_signs(shape.sides[-1])
        return shape if len(both) == 1 else Group("", "", both)
    if isinstance(shape, Group) and not shape.ordered and any("\\pm" in str(item) for item in shape.items):
        items: list[Shape] = []
        for item in shape.items:
            found = _spread(item)
            items += found.items if isinstance(found, Group) and not found.opening else [found]
        return Group(shape.opening, shape.closing, tuple(items))
    return shape


def _both_signs(text: str) -> tuple[str, ...]:
    signs = _PLUS_MINUS.findall(text)
    if not signs:
        return (text,)
    upper = _PLUS_MINUS.sub(lambda match: "+" if match.group().startswith("\\pm") else "-", text)
    lower = _PLUS_MINUS.sub(lambda match: "-" if match.group().startswith("\\pm") else "+", text)
    return upper.lstrip("+ "), lower


# ---- relations


def _same_relations(given: Shape, right: Shape) -> bool:
    if isinstance(right, Relation) and isinstance(given, Relation):
        return _same_two_relations(given, right)
    if isinstance(right, Relation):
        if right.is_equation:  # the answer to `x = 5` is 5
            names_it = is_name(right.sides[0]) or "\\approx" in right.signs
            return names_it and any(_same(given, _part(value)) for value in _values_of(right))
        interval = _interval(right)
        return interval is not None and _same(given, interval)
    assert isinstance(given, Relation)
    if given.is_equation:
        return any(_same(_part(value), right) for value in _values_of(given))
    if isinstance(right, str):
        return False  # `\ge 5` is not 5
    interval = _interval(given)
    return interval is not None and _same(interval, right)


def _part(text: str) -> Shape:
    return shape_of(text)


def _same_two_relations(given: Relation, right: Relation) -> bool:
    if "\\equiv" in right.signs and "\\equiv" in given.signs and (_MODULUS.search(right.text)):
        return _same_residues(given, right)
    if given.is_equation and right.is_equation:
        names = is_name(given.sides[0]), is_name(right.sides[0])
        if all(names) and _flat(given.sides[0]) == _flat(right.sides[0]):
            values = _values_of(right)
            return any(_same(_part(ours), _part(theirs)) for ours in _values_of(given) for theirs in values)
    elif not given.is_equation and not right.is_equation:
        ours, theirs = _interval(given), _interval(right)
        if ours is not None and theirs is not None and _variable(given) == _variable(right):
            return _same(ours, theirs)
    return same_relation(given.text, right.text)


def _values_of(relation: Relation) -> list[str]:
    r"""Return the values that an equation states.

    This is the last side; of `exact \approx rounded` it is the exact side, and also the rounded one if it is rounded
    correctly.
    """
    sides = [_MODULUS.sub("", side).strip() for side in relation.sides]
    if "\\approx" not in relation.signs:
        return [sides[-1]]
    exact, rounded = sides[relation.signs.index("\\approx")], sides[-1]
    if is_name(exact) or not exact:
        return [rounded]
    return [exact, rounded] if rounds(rounded, exact, fewest_decimals=0) else [exact]


def _same_residues(given: Relation, right: Relation) -> bool:
    moduli, residues = [], []
    for relation in (given, right):
        found = _MODULUS.search(relation.text)
        number = number_of(_values_of(relation)[0])
        if found is None or number is None or number.value.denominator != 1:
            return False
        moduli.append(int(next(group for group in found.groups() if group)))
        residues.append(number.value)
    return moduli[0] == moduli[1] != 0 and (residues[0] - residues[1]) % moduli[0] == 0


def _ascending(relation: Relation) -> Relation:
    if relation.signs[0] in (">", "\\ge"):
        return Relation(relation.sides[::-1], tuple(_FLIPPED.get(sign, sign) for sign in relation.signs[::-1]))
    return relation


def _variable(relation: Relation) -> str:
    return next((_flat(side) for side in relation.sides if is_name(side)), "")


def _interval(relation: Relation) -> Group | Union | None:
    r"""Return `1 < x \le 3` as `(1, 3]`, `x > 2` as `(2, \infty)`, `1 < |x| < 3` as two intervals; else `None`."""
    up = _ascending(relation)
    if not set(up.signs) <= {"<", "\\le"} or not all(up.sides):
        return None
    opening = "(" if up.signs[0] == "<" else "["
    closing = ")" if up.signs[-1] == "<" else "]"
    if len(up.sides) == 3 and is_name(up.sides[1]):
        if re.fullmatch(r"\|[a-z]\|", _flat(up.sides[1])):
            mirrored = Group(_turned(closing), _turned(opening), (f"-({up.sides[2]})", f"-({up.sides[0]})"))
            return Union((mirrored, Group(opening, closing, (up.sides[0], up.sides[2]))))
        return Group(opening, closing, (up.sides[0], up.sides[2]))
    if len(up.sides) == 2 and is_name(up.sides[0]) and not is_name(up.sides[1]):
        if re.fullmatch(r"\|[a-z]\|", _flat(up.sides[0])):
            return Group(_turned(closing), closing, (f"-({up.sides[1]})", up.sides[1]))
        return Group("(", closing, ("-\\infty", up.sides[1]))
    if len(up.sides) == 2 and is_name(up.sides[1]) and not is_name(up.sides[0]):
        return Group(opening, ")", (up.sides[0], "\\infty"))
    return None


def _turned(bracket: str) -> str:
    return {"(": ")", ")": "(", "[": "]", "]": "["}[bracket]


# ---- unions, matrices, groups


def _union_parts(shape: Shape) -> list[Shape]:
    parts = shape.parts if isinstance(shape, Union) else (shape,)
    return [(_interval(part) or part) if isinstance(part, Relation) else part for part in parts]


def _same_groups(given: Shape, right: Shape) -> bool:
    ours = given if isinstance(given, Group) else Group("", "", (given,))
    theirs = right if isinstance(right, Group) else Group("", "", (right,))
    if _is_empty(ours) or _is_empty(theirs):
        return _is_empty(ours) and _is_empty(theirs)
    if ours.ordered and theirs.ordered:
        # `(1, 2)` is not `[1, 2]`, but `[1, 2, 3]` is the vector (1, 2, 3)
        alike = (ours.opening, ours.closing) == (theirs.opening, theirs.closing)
        return (alike or len(ours.items) > 2) and _in_order(ours.items, theirs.items)
    if not ours.ordered and not theirs.ordered:  # `1, 2` is the set {1, 2}
        if (_names_each(ours) and not _names_any(theirs)) or (_names_each(theirs) and not _names_any(ours)):
            return _in_order(ours.items, theirs.items)  # `2, 1` is not `a = 1, b = 2`
        return _unordered(ours.items, theirs.items)
    point, bare = (ours, theirs) if ours.ordered else (theirs, ours)
    is_point = (point.opening, point.closing) == ("(", ")") and not bare.opening  # `1, 2` for the point (1, 2)
    return is_point and _in_order(ours.items, theirs.items)


def _names_any(group: Group) -> bool:
    return any(isinstance(item, Relation) for item in group.items)


def _names_each(group: Group) -> bool:
    """Return whether each value has a name of its own; `x_1` and `x_2` are two values of one name."""
    named = [item for item in group.items if isinstance(item, Relation) and item.is_equation and is_name(item.sides[0])]
    return 1 < len(group.items) == len({_INDEX.sub("", _flat(item.sides[0])) for item in named})


def _is_empty(group: Group) -> bool:
    return not group.items or group.items == ("\\emptyset",)


def _in_order(given: Sequence[Shape], right: Sequence[Shape]) -> bool:
    return len(given) == len(right) and all(map(_same, given, right))


def _unordered(given: Sequence[Shape], right: Sequence[Shape]) -> bool:
    """Return whether the items of both lists match one to one, in any order, after removing duplicates."""
    if max(len(given), len(right)) > MOST_ITEMS:
        return _in_order(given, right)
    ours, theirs = _different(given), _different(right)
    if len(ours) != len(theirs):
        return False
    for item in ours:
        match = next((place for place, other in enumerate(theirs) if _same(item, other)), None)
        if match is None:
            return False
        del theirs[match]
    return True


def _different(items: Sequence[Shape]) -> list[Shape]:
    kept: list[Shape] = []
    for item in items:
        if not any(_same(item, other) for other in kept):
            kept.append(item)
    return kept


# ---- values


def _same_values(given: str, right: str) -> bool:
    if _flat(given) == _flat(right):
        return bool(_flat(given))
    ours, theirs = number_of(given), number_of(right)
    if ours is not None and theirs is not None:
        return same_number(ours, theirs) or same_number(theirs, ours)
    if (based := _same_in_bases(given, right)) is not None:
        return based
    if bool(_INDEXED_NUMBER.search(given)) != bool(_INDEXED_NUMBER.search(right)):
        return False  # `-1_7` is in base 7
    given, given_unit = split_unit(given)
    right, right_unit = split_unit(right)
    factor = same_unit_factor(given_unit, right_unit)
    if factor is None:
        return False
    (given, in_percent), (right, reference_in_percent) = split_percent(given), split_percent(right)
    if same_value(_times(given, factor), right) or rounds(given, right) or rounds(right, given):
        return True
    if in_percent == reference_in_percent:
        return False
    return same_value(_times(given, Fraction(1, 100) if in_percent else Fraction(100)), right)  # `50%` is 0.5 too


def _times(text: str, factor: Fraction) -> str:
    return text if factor == 1 else rf"\frac{{{factor.numerator}}}{{{factor.denominator}}} \cdot ({text})"


def _same_in_bases(given: str, right: str) -> bool | None:
    """Return whether two numbers with a base have equal digits and bases; `None` if neither names a base.

    A reference without a base is in base 10; a reference with a base requires that base.
    """
    found = [_BASED.fullmatch(text.strip()) for text in (given, right)]
    if not any(found):
        return None
    parts = []
    for match, text in zip(found, (given, right), strict=True):
        if match is None and not re.fullmatch(r"\d+", text.strip()):
            return None  # `x_2` or a formula
        parts.append((match[1].lstrip("0"), int(match[2])) if match else (text.strip().lstrip("0"), 10))
    return parts[0] == parts[1]
