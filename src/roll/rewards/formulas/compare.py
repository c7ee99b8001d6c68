"""Whether two answers are the same, decided by computing them.

Formulas with variables are computed at a few points: exactly where they are rational, else to 40 digits. Two different
formulas of the size of an answer that agree at all of them do not occur by accident (Schwartz 1980 for polynomials).

What cannot be decided here raises `NotUnderstoodError`: a slower verifier may know. Whatever is decided is what it
would have decided too, but for rounding: see `_rounded`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from roll.rewards.formulas.answers import Answer, Collection, Matrix, Relation, Union, both_signs, read
from roll.rewards.formulas.compute import Value, compute, inexact, same_value
from roll.rewards.formulas.nodes import (
    Node,
    NotUnderstoodError,
    Number,
    Operation,
    Symbol,
    TooLargeError,
    symbols,
)
from roll.rewards.formulas.tokens import tokens_of

__all__ = ["same_answer"]

NUM_POINTS = 4
FEWEST_POINTS = 2
"""At so many of them both formulas must have a real value."""
FEWEST_DECIMALS = 4
MOST_ITEMS = 12
"""Of unordered collections, which are compared item by item."""
_CONSTANTS = {"pi", "e", "i", "oo"}
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}


def same_answer(answer: str, reference: str) -> bool:
    """Whether `answer` equals `reference`; neither has a unit or a percent sign.

    Raises:
        NotUnderstoodError: it cannot be decided here.
        TooLargeError: the answer is larger than any sensible one.
    """
    if _same_tokens(answer, reference):
        return True
    try:
        right = read(reference)
    except TooLargeError:
        raise NotUnderstoodError from None
    given = read(answer)
    try:
        return _same(given, right)
    except TooLargeError:
        if _is_too_large(right):
            raise NotUnderstoodError from None
        raise


def _is_too_large(answer: Answer) -> bool:
    try:
        _same(answer, answer)
    except TooLargeError:
        return True
    except NotUnderstoodError:
        pass
    return False


def _same_tokens(answer: str, reference: str) -> bool:
    try:
        return tokens_of(answer) == tokens_of(reference)
    except (NotUnderstoodError, TooLargeError):
        return False


def _same(given: Answer, right: Answer) -> bool:
    if isinstance(right, Relation) or isinstance(given, Relation):
        return _same_relations(given, right)
    if isinstance(right, Matrix) or isinstance(given, Matrix):
        return _same_matrices(given, right)
    if isinstance(right, Union) or isinstance(given, Union):
        return _same_unions(given, right)
    if isinstance(right, Collection) or isinstance(given, Collection):
        return _same_collections(_collected(given), _collected(right))
    ours, theirs = both_signs(given), both_signs(right)
    if len(ours) != len(theirs):
        return _same_collections(_collected(given), _collected(right))
    if len(ours) == 2:
        return _unordered(ours, theirs)
    return _same_values(given, right)


def _collected(answer: Answer) -> Collection:
    """A bare list, also of one value; `\\pm` stands for two."""
    if isinstance(answer, Collection):
        if answer.ordered:
            return answer
        items: list[Answer] = []
        for item in answer.items:
            items += both_signs(item) if isinstance(item, Number | Symbol | Operation) else [item]
        return Collection(answer.opening, answer.closing, tuple(items))
    if isinstance(answer, Number | Symbol | Operation):
        return Collection("", "", both_signs(answer))
    raise NotUnderstoodError


def _same_collections(given: Collection, right: Collection) -> bool:
    brackets = (given.opening, given.closing), (right.opening, right.closing)
    if brackets[0] == brackets[1]:
        if given.ordered:
            return _in_order(given.items, right.items)
        return _unordered(given.items, right.items)
    if given.ordered and right.ordered:
        if len(given.items) == len(right.items) > 2:  # no interval: `[1,2,3]` is the vector (1,2,3)
            return _in_order(given.items, right.items)
        return False  # `(1, 2)` is not `[1, 2]`
    if not given.ordered and not right.ordered:  # `1, 2` is the set {1, 2}
        return _unordered(given.items, right.items)
    if len(given.items) != len(right.items):
        return False
    raise NotUnderstoodError  # a list for a point, a point for a set


def _in_order(given: Sequence[Answer], right: Sequence[Answer]) -> bool:
    return len(given) == len(right) and all(map(_same, given, right))


def _unordered(given: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Whether every item of each has its own equal one in the other, once equal ones are counted once."""
    if max(len(given), len(right)) > MOST_ITEMS:
        raise NotUnderstoodError
    ours, theirs = _different(given), _different(right)
    if len(ours) != len(theirs):
        return False
    left = list(theirs)
    for item in ours:
        match = next((other for other in left if _same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _different(items: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items:
        if not any(_same(item, other) for other in kept):
            kept.append(item)
    return kept


def _same_matrices(given: Answer, right: Answer) -> bool:
    if not isinstance(given, Matrix) or not isinstance(right, Matrix):
        return _or_unknown(given, right, Collection)  # a column of a matrix may be written as a vector
    shapes = [(len(matrix.rows), len(matrix.rows[0])) for matrix in (given, right)]
    return shapes[0] == shapes[1] and all(map(_in_order, given.rows, right.rows))


def _or_unknown(given: Answer, right: Answer, *kinds: type) -> bool:
    """False for two of different kinds; but one of `kinds` may be the other in another notation.

    Raises:
        NotUnderstoodError: it may.
    """
    if isinstance(given, kinds) or isinstance(right, kinds):
        raise NotUnderstoodError
    return False


def _same_unions(given: Answer, right: Answer) -> bool:
    if not isinstance(given, Union) or not isinstance(right, Union):
        return _or_unknown(given, right, Collection)
    if _unordered(given.parts, right.parts):
        return True
    raise NotUnderstoodError  # parts may overlap


def _same_relations(given: Answer, right: Answer) -> bool:
    if isinstance(right, Relation) and not isinstance(given, Relation):
        if right.assigned is not None and isinstance(given, Number | Symbol | Operation):
            return _same(given, right.sides[-1])
        interval = _interval(right)
        if interval is not None and isinstance(given, Collection):
            return _same_collections(given, interval)
        return _or_unknown(given, right, *_solutions(right))
    if isinstance(given, Relation) and not isinstance(right, Relation):
        if set(given.signs) == {"="}:
            return _same(given.sides[-1], right)
        interval = _interval(given)
        if interval is not None and isinstance(right, Collection):
            return _same_collections(interval, right)
        return _or_unknown(given, right, *_solutions(given))
    assert isinstance(given, Relation) and isinstance(right, Relation)
    if given.assigned is not None and given.assigned == right.assigned:
        return _same(given.sides[-1], right.sides[-1])
    if len(right.signs) == 1 and len(given.signs) == 1:
        return _same_single(given, right)
    ours, theirs = _ascending(given), _ascending(right)
    return ours.signs == theirs.signs and _in_order(ours.sides, theirs.sides)


def _solutions(relation: Relation) -> tuple[type, ...]:
    """The kinds of answers that may be what a relation comes to."""
    return (Collection,) if set(relation.signs) == {"="} else (Collection, Union)


def _ascending(relation: Relation) -> Relation:
    if relation.signs[0] in (">", "\\ge"):
        return Relation(relation.sides[::-1], tuple(_FLIPPED[sign] for sign in relation.signs[::-1]))
    return relation


def _interval(relation: Relation) -> Collection | None:
    """`1 < x \\le 3` as `(1, 3]`, `x > 2` as `(2, \\infty)`; `None` where it is none."""
    up = _ascending(relation)
    if not set(up.signs) <= {"<", "\\le"}:
        return None
    variables = [isinstance(side, Symbol) and side.name not in _CONSTANTS for side in up.sides]
    opening = "(" if up.signs[0] == "<" else "["
    closing = ")" if up.signs[-1] == "<" else "]"
    if len(up.sides) == 3 and variables[1]:
        return Collection(opening, closing, (up.sides[0], up.sides[2]))
    if len(up.sides) == 2 and variables == [True, False]:
        return Collection("(", closing, (Operation("neg", (Symbol("oo"),)), up.sides[1]))
    if len(up.sides) == 2 and variables == [False, True]:
        return Collection(opening, ")", (up.sides[0], Symbol("oo")))
    return None


def _same_single(given: Relation, right: Relation) -> bool:
    """`a = b` and `c = d` are the same where `a - b` is a constant multiple of `c - d`; `<` asks for a positive one."""
    ours, theirs = _ascending(given), _ascending(right)
    if ours.signs != theirs.signs:
        return False
    if _CONSTANTS.issuperset(symbols(_difference(ours))) != _CONSTANTS.issuperset(symbols(_difference(theirs))):
        return False  # `0 = 0`
    ratio: Value | None = None
    for ours_value, theirs_value in _values(_difference(ours), _difference(theirs)):
        if ours_value == 0 or theirs_value == 0:
            if ours_value != theirs_value:
                raise NotUnderstoodError
            continue
        here = ours_value / theirs_value
        if ratio is not None and not same_value(here, ratio):
            if _is_linear(_difference(ours)) and _is_linear(_difference(theirs)):
                return False
            raise NotUnderstoodError  # `y = 1/x` and `xy = 1`
        ratio = here
    if ratio is None:
        raise NotUnderstoodError
    return ours.signs[0] in ("=", "\\ne") or ratio > 0


def _is_linear(node: Node) -> bool:
    """Whether it certainly is a polynomial of degree 1 at most."""
    if not isinstance(node, Operation):
        return True
    if not _CONSTANTS.issuperset(symbols(node)):
        if node.name in ("add", "neg"):
            return all(map(_is_linear, node.args))
        constant = [_CONSTANTS.issuperset(symbols(arg)) for arg in node.args]
        if (node.name == "mul" and any(constant)) or (node.name == "div" and constant[1]):
            return all(map(_is_linear, node.args))
        return False
    return True


def _difference(relation: Relation) -> Node:
    return Operation("add", (relation.sides[0], Operation("neg", (relation.sides[1],))))


def _same_values(given: Answer, right: Answer) -> bool:
    if not isinstance(given, Number | Symbol | Operation) or not isinstance(right, Number | Symbol | Operation):
        raise NotUnderstoodError
    if _is_infinite(given) or _is_infinite(right):
        return given == right
    if _uses(given, "log") != _uses(right, "log") and (_uses(given, "ln") or _uses(right, "ln")):
        raise NotUnderstoodError  # `\log` may be to the base of e or 10
    return all(same_value(a, b) or _rounded(given, b) for a, b in _values(given, right))


def _is_infinite(node: Node) -> bool:
    return "oo" in symbols(node)


def _uses(node: Node, name: str) -> bool:
    return isinstance(node, Operation) and (node.name == name or any(_uses(arg, name) for arg in node.args))


def _rounded(given: Node, value: Value) -> bool:
    """Whether the answer is a decimal that rounds the right value, one without finite decimals, to four places or more.

    Verifiers that round both to six places also take 2.0000001 for 2; here what is exact is compared exactly.
    """
    if not isinstance(given, Number) or given.num_decimals < FEWEST_DECIMALS:
        return False
    if isinstance(value, Fraction):
        bottom = value.denominator
        for prime in (2, 5):
            while bottom % prime == 0:
                bottom //= prime
        if bottom == 1:
            return False
    elif value != value.real:
        return False
    difference = abs(value - (given.value if isinstance(value, Fraction) else inexact(given.value)))
    return bool(2 * 10**given.num_decimals * difference <= 1)


def _values(a: Node, b: Node) -> list[tuple[Value, Value]]:
    """Both at the same points: those at which both are real, or all where they are complex without variables."""
    names = sorted({*symbols(a), *symbols(b)} - _CONSTANTS)
    if not names:
        return [(compute(a, {}), compute(b, {}))]
    found: list[tuple[Value, Value]] = []
    for number in range(NUM_POINTS):
        at = _point(names, number)
        try:
            pair = compute(a, at), compute(b, at)
        except NotUnderstoodError:
            continue
        if all(isinstance(value, Fraction) or value == value.real for value in pair):
            found.append(pair)
    if len(found) < FEWEST_POINTS:
        raise NotUnderstoodError
    return found


def _point(names: Sequence[str], number: int) -> Mapping[str, Fraction]:
    """A value for each variable, from its name: between 0.4 and 3; at odd points the first and some others negative."""
    at = {}
    for place, name in enumerate(names):
        digest = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=4).digest()
        negative = number % 2 and (place == 0 or digest[2] % 2)
        at[name] = Fraction(100 + digest[0] + digest[1], 211) * (-1 if negative else 1)
    return at
