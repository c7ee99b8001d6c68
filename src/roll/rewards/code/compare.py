"""Comparing what a candidate printed or returned with what is expected.

The expected value leads: only as much of the candidate's is looked at as the expected one has, so a hostile value
costs no more than the right one. Nothing of the candidate's class is ever called: it is a tree of plain data.
"""

from __future__ import annotations

import cmath
import math
from typing import Any

from roll.rewards.code.inside import wire

__all__ = ["same_output", "same_value"]

_REAL = (bool, int, float)


def same_output(printed: str, expected: str, how: str, tolerance: float = 0.0) -> bool:
    """Whether the text is the expected one.

    Args:
        how: `exact`; `lines`: without white space at the ends of lines and of the text; `tokens`: word by word.
        tolerance: words that are numbers may differ by so much, relative or absolute (`tokens` and `lines`).
    """
    if how == "exact":
        return printed == expected
    if how == "tokens":
        return _same_words(printed.split(), expected.split(), tolerance)
    ours, theirs = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, printed))
    if len(ours) != len(theirs):
        return False
    if not tolerance:
        return ours == theirs
    return all(_same_words(a.split(), b.split(), tolerance) for a, b in zip(theirs, ours, strict=True))


def _same_words(printed: list[str], expected: list[str], tolerance: float) -> bool:
    if len(printed) != len(expected):
        return False
    return all(a == b or (tolerance and _close(a, b, tolerance)) for a, b in zip(printed, expected, strict=True))


def _close(printed: str, expected: str, tolerance: float) -> bool:
    if len(printed) > 400:
        return False
    try:
        return math.isclose(float(printed), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def same_value(tree: Any, expected: Any, *, tolerance: float = 0.0, loose: bool = False) -> bool:
    """Whether `==` would hold between the candidate's value and the expected one.

    Args:
        tree: the candidate's value, as `wire.encode` wrote it or as somebody made it up.
        expected: plain data.
        tolerance: see `same_output`; for floating-point and complex numbers.
        loose: lists and tuples are the same.
    """
    try:
        return _same(tree, expected, tolerance, loose)
    except wire.WireError:
        return False


def _same(tree: Any, expected: Any, tolerance: float, loose: bool) -> bool:
    if expected is None or isinstance(expected, str):
        return type(tree) is type(expected) and tree == expected
    if isinstance(expected, (*_REAL, complex)):
        return _same_number(tree, expected, tolerance)
    if not isinstance(tree, list) or not tree:
        return False
    tag, items = tree[0], tree[1:]
    if isinstance(expected, bytes):
        return tag == "b" and items == [expected.hex()]
    if isinstance(expected, list | tuple):
        tags = ("l", "t") if loose else ("l",) if isinstance(expected, list) else ("t",)
        return (
            tag in tags
            and len(items) == len(expected)
            and all(_same(item, value, tolerance, loose) for item, value in zip(items, expected, strict=True))
        )
    if isinstance(expected, set | frozenset):
        return tag in ("s", "z") and len(items) == len(expected) and wire.decode(["s", *items]) == expected
    if tag != "d" or len(items) != 2 * len(expected):
        return False
    values = dict(zip(_keys(items[::2]), items[1::2], strict=True))
    return all(key in values and _same(values[key], value, tolerance, loose) for key, value in expected.items())


def _keys(trees: list[Any]) -> list[Any]:
    keys = [wire.decode(tree) for tree in trees]
    try:
        return wire.told_apart(keys)
    except TypeError:
        raise wire.WireError("a key that cannot be one") from None


def _same_number(tree: Any, expected: complex, tolerance: float) -> bool:
    if isinstance(tree, list) and tree[:1] and tree[0] not in ("i", "f", "c"):
        return False
    value = wire.decode(tree)
    if not isinstance(value, (*_REAL, complex)):
        return False
    if value == expected or not tolerance:
        return value == expected
    if isinstance(value, float) or isinstance(expected, float):
        if isinstance(value, complex) or isinstance(expected, complex):
            return cmath.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        try:
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # an integer beyond all floating-point numbers
            return False
    return isinstance(value, complex) and cmath.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
