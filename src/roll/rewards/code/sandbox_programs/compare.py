"""Compare a candidate's output or return value with the expected one.

The comparison follows the structure of the expected value, so comparing a malicious value takes no longer than
comparing the correct one. No method of the candidate's classes is ever called: the value is a tree of plain data. Short
values are compared in ROLL's process, long ones in a sandbox (`comparator`).
"""

from __future__ import annotations

import cmath
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from . import wire

_REAL_TYPES = (bool, int, float)
_NUMBER_TYPES = (*_REAL_TYPES, complex, Decimal, Fraction)
_NUMBER_TAGS = ("i", "f", "c", "D", "F")
_MAPPING_TAGS = {"d": 0, "o": 0, "n": 0, "g": 1}
"""Tags of mappings, and how many items of the encoded tree come before the first key."""


def is_same_output(output: str, expected: str, mode: str, tolerance: float = 0.0) -> bool:
    """Return whether printed output equals the expected output.

    Args:
        mode: `exact`; `lines`: ignoring whitespace at the ends of lines and of the output; `tokens`: word by word.
        tolerance: Relative or absolute difference that is allowed between numbers (`tokens` and `lines`).
    """
    if mode == "exact":
        return output == expected
    if mode == "tokens":
        return _match_words(output.split(), expected.split(), tolerance)
    ours, theirs = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, output))
    if len(ours) != len(theirs):
        return False
    if not tolerance:
        return ours == theirs
    return all(_match_words(a.split(), b.split(), tolerance) for a, b in zip(theirs, ours, strict=True))


def _match_words(output_words: list[str], expected_words: list[str], tolerance: float) -> bool:
    if len(output_words) != len(expected_words):
        return False
    return all(
        a == b or (tolerance and _is_close(a, b, tolerance)) for a, b in zip(output_words, expected_words, strict=True)
    )


def _is_close(output: str, expected: str, tolerance: float) -> bool:
    if len(output) > 400:
        return False
    try:
        return math.isclose(float(output), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def is_same_value(tree: Any, expected: Any, *, tolerance: float = 0.0, match: str = "equal") -> bool:
    """Return whether the candidate's value equals the expected one.

    Args:
        tree: The candidate's value, as encoded by `wire.encode` or forged by the candidate.
        expected: Plain data.
        tolerance: Relative or absolute difference that is allowed between floating-point or complex numbers.
        match: `equal`: as `==` compares; `json`: a list matches any sequence, and a string key matches an integer,
            because JSON keys are strings; `wrapped`: as `json`, or the only item of a list (APPS); `exact`: numbers,
            sequences and sets must also have the same type.
    """
    try:
        if match == "wrapped":
            only = expected if isinstance(expected, list) and len(expected) == 1 else ()
            return any(_is_same(tree, value, tolerance, "json") for value in (expected, *only))
        return _is_same(tree, expected, tolerance, match)
    except (wire.WireError, ArithmeticError, ValueError, TypeError, RecursionError):  # a value forged to break `==`
        return False


def _is_same(tree: Any, expected: Any, tolerance: float, match: str) -> bool:
    if expected is None or isinstance(expected, str):
        return type(tree) is type(expected) and tree == expected
    if isinstance(expected, _NUMBER_TYPES):
        return _match_number(tree, expected, tolerance, match == "exact")
    if not isinstance(tree, list) or not tree:
        return False
    tag, items = tree[0], tree[1:]
    if not isinstance(tag, str):
        return False
    if isinstance(expected, bytes):
        return tag == "b" and items == [expected.hex()]
    if type(expected) in (list, tuple):
        found = _list_items(tree, list if type(expected) is list else tuple, match == "json")
        return (
            found is not None
            and len(found) == len(expected)
            and all(_is_same(item, value, tolerance, match) for item, value in zip(found, expected, strict=True))
        )
    if type(expected) in (set, frozenset):
        tags = "sz" if match != "exact" else "s" if type(expected) is set else "z"
        if tag not in tags or len(items) != len(expected):
            return False
        # Decoded as a set, whatever the tag: a set equals a frozenset with the same items.
        values = wire.decode(["s", *items])
        return values == expected and (match != "exact" or _pair_with_types(values) == _pair_with_types(expected))
    if type(expected) is dict:
        return _match_mapping(tag, items, expected, tolerance, match)
    value = wire.decode(tree)
    return (match != "exact" or type(value) is type(expected)) and bool(value == expected)


def _list_items(tree: list[Any], kind: type, any_sequence: bool) -> list[Any] | None:
    """Return the encoded items of a sequence; `None` if the tree is not of a matching type."""
    tag = tree[0]
    if tag == ("l" if kind is list else "t") or (any_sequence and tag in ("l", "t")):
        return tree[1:]
    if any_sequence and tag == "q":
        return tree[2:]
    if any_sequence and tag in ("R", "a"):
        value = wire.decode(tree)
        if isinstance(value, range):
            return list(value) if len(value) <= wire.MAX_ITEMS else None
        found = wire.encode(value.tolist())
        return found[1:] if isinstance(found, list) else None
    return None


def _match_mapping(tag: str, items: list[Any], expected: dict[Any, Any], tolerance: float, match: str) -> bool:
    if tag not in _MAPPING_TAGS:
        return False
    items = items[_MAPPING_TAGS[tag] :]
    if len(items) != 2 * len(expected):
        return False
    keys = _decode_keys(items[::2])
    values = dict(zip(keys, items[1::2], strict=True))
    if match == "json" and all(isinstance(key, str) for key in expected):
        values = {str(key) if type(key) is int else key: value for key, value in values.items()}
    if match == "exact" and _pair_with_types(keys) != _pair_with_types(expected):
        return False
    return all(key in values and _is_same(values[key], value, tolerance, match) for key, value in expected.items())


def _pair_with_types(values: Any) -> set[Any]:
    return {(type(value), value) for value in values}


def _decode_keys(trees: list[Any]) -> list[Any]:
    keys = [wire.decode(tree) for tree in trees]
    try:
        return wire.check_hashes(keys)
    except TypeError:
        raise wire.WireError("the key is not hashable") from None


def _match_number(tree: Any, expected: Any, tolerance: float, exact: bool) -> bool:
    if isinstance(tree, list) and tree[:1] and tree[0] not in _NUMBER_TAGS:
        return False
    value = wire.decode(tree)
    if not isinstance(value, _NUMBER_TYPES) or (exact and type(value) is not type(expected)):
        return False
    if value == expected or not tolerance:
        return bool(value == expected)
    if not isinstance(value, (float, complex)) and not isinstance(expected, (float, complex)):
        return False  # integers and decimals are exact
    if isinstance(value, complex) or isinstance(expected, complex):
        return cmath.isclose(complex(value), complex(expected), rel_tol=tolerance, abs_tol=tolerance)
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
