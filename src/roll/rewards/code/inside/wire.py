"""Plain data as JSON, exact in type: what may cross between a candidate and its checker.

    None, True, "text", 5, 0.5          themselves
    large integers, nan, inf            ["i", hex]  ["f", "nan"]
    list, tuple, set, frozenset         ["l", …]  ["t", …]  ["s", …]  ["z", …]
    dict, bytes, complex                ["d", key, value, …]  ["b", hex]  ["c", real, imaginary]
    an object that stays where it is    ["r", number]

An instance of a subclass crosses as its base (a `Counter` as a dict, a named tuple as a tuple), so no method of a
candidate's class ever reaches a checker. Everything else is `NotPlainError`. What is decoded has built-in types only.
"""

from __future__ import annotations

import json
import math

MAX_DEPTH = 64
"""Of what is decoded. What is encoded may be deeper, so that whatever came can be sent back in a list or two."""
MAX_FRAME_BYTES = 1 << 26
MAX_EQUAL_HASHES = 32
"""Among what a set or the keys of a dict hold: looking one up takes as many comparisons. Whoever makes up numbers that
are alike modulo 2**61 - 1 would have them take minutes."""
_BIG = 1 << 53
_SEQUENCES = {"l": list, "t": tuple, "s": set, "z": frozenset}


class NotPlainError(TypeError):
    """A value that does not cross."""


class WireError(ValueError):
    """Not of this form."""


def encode(value, remote=None, depth=0):
    """A tree for `json.dumps`.

    Args:
        value: anything.
        remote: gives the number of an object that stays here, or None where it knows none.

    Raises:
        NotPlainError: the value, or something in it, is not plain data, or it is nested too deep.
    """
    if depth > MAX_DEPTH + 32:
        raise NotPlainError("data nested deeper than %d" % (MAX_DEPTH + 32))  # noqa: UP031
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    for base in kind.__mro__:
        plain = _ENCODERS.get(base)
        if plain is not None:
            return plain(value, remote, depth + 1)
    number = None if remote is None else remote(value)
    if number is None:
        raise NotPlainError("an object of type " + kind.__name__)
    return ["r", number]


def _integer(value, remote, depth):
    value = int.__int__(value)
    return value if -_BIG < value < _BIG else ["i", hex(value)]


def _float(value, remote, depth):
    value = float.__float__(value)
    return value if math.isfinite(value) else ["f", repr(value)]


def _text(value, remote, depth):
    return str.__str__(value)


def _sequence(tag, base):
    def of(value, remote, depth):
        return [tag, *(encode(item, remote, depth) for item in base.__iter__(value))]

    return of


def _mapping(value, remote, depth):
    tree = ["d"]
    for key, item in dict.items(value):
        tree += (encode(key, remote, depth), encode(item, remote, depth))
    return tree


def _bytes(value, remote, depth):
    return ["b", bytes.hex(value)]


def _complex(value, remote, depth):
    return ["c", _float(value.real, remote, depth), _float(value.imag, remote, depth)]


_ENCODERS = {
    int: _integer,
    float: _float,
    str: _text,
    bytes: _bytes,
    complex: _complex,
    dict: _mapping,
    **{base: _sequence(tag, base) for tag, base in _SEQUENCES.items()},
}


def decode(tree, remote=None, depth=0):
    """The value of a tree that anybody may have made.

    Args:
        tree: what `json.loads` gave.
        remote: gives the object of a number; without it, trees with such objects are refused.

    Raises:
        WireError: it is not of this form.
    """
    if tree is None or isinstance(tree, (bool, str, int, float)):
        return tree
    if not isinstance(tree, list) or not tree or not isinstance(tree[0], str):
        raise WireError("not plain data")
    if depth > MAX_DEPTH:
        raise WireError("nested deeper than %d" % MAX_DEPTH)  # noqa: UP031
    tag, items = tree[0], tree[1:]
    try:
        if tag in _SEQUENCES:
            values = [decode(item, remote, depth + 1) for item in items]
            return _SEQUENCES[tag](told_apart(values) if tag in "sz" else values)
        if tag == "d":
            values = [decode(item, remote, depth + 1) for item in items]
            return dict(zip(told_apart(values[::2]), values[1::2], strict=True))
        if tag == "c":
            return complex(*(_real(decode(item)) for item in items))
        (item,) = items
        if tag == "r" and remote is not None:
            return remote(item)
        return {"i": _from_hex, "f": _not_finite, "b": bytes.fromhex}[tag](item)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise WireError("not plain data: %s" % (error,)) from None  # noqa: UP031


def told_apart(values):
    """The values, where they may be held by a set or be the keys of a dict.

    Raises:
        WireError: too many have the same hash.
    """
    counts = {}
    for value in values:
        found = hash(value)
        counts[found] = counts.get(found, 0) + 1
    if max(counts.values(), default=0) > MAX_EQUAL_HASHES:
        raise WireError("too many with the same hash")
    return values


def _real(value):
    if type(value) not in (int, float):
        raise WireError("a part of a complex number is no number")
    return value


def _from_hex(text):
    return int(text, 16)


def _not_finite(text):
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]


def pack(message):
    """A frame: length (4 bytes, little-endian) and JSON."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return len(body).to_bytes(4, "little") + body


def unpack(body):
    """The content of a frame.

    Raises:
        WireError: it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(str(error)) from None
