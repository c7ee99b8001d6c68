"""Plain data as JSON, with exact types: the values that may be sent between a candidate and its checker.

    None, True, "text", 5, 0.5          themselves
    large integers, nan, inf            ["i", hex]  ["f", "nan"]
    list, tuple, set, frozenset         ["l", …]  ["t", …]  ["s", …]  ["z", …]
    dict, bytes, complex                ["d", key, value, …]  ["b", hex]  ["c", real, imaginary]
    OrderedDict, Counter, defaultdict   ["o", key, value, …]  ["n", …]  ["g", factory, key, value, …]
    deque, slice                        ["q", maxlen, …]  ["sl", start, stop, step]
    NumPy arrays                        ["a", dtype, shape, hex]; scalars as Python's
    Decimal, date, range, …             see `library`
    objects that stay                   ["r", number, …], ["x", …], ["k", …]: the two ends agree on these

An instance of a subclass is sent as its base (a named tuple as a tuple), so no method of a candidate's class ever
reaches a checker. Everything else is `NotPlainError`. Decoded values have types of this list only.
"""

from __future__ import annotations

import collections
import math
import sys

from . import library

MAX_DEPTH = 64
"""Most levels of a decoded value. An encoded value may be deeper, so that a received value can be returned in a list.
Most levels of a decoded value. An encoded value may be deeper, so that a received value can be returned in a list."""
MAX_EQUAL_HASHES = 32
"""Most equal hashes in a set or in the keys of a dict: a lookup takes as many comparisons. Numbers that are equal
modulo 2**61 - 1 could otherwise make lookups take minutes."""
MAX_ITEMS = 1 << 20
"""Most items of a range that is expanded."""
_BIG = 1 << 53
_SEQUENCES = {"l": list, "t": tuple, "s": set, "z": frozenset}
_MAPPINGS = {"d": dict, "o": collections.OrderedDict, "n": collections.Counter}
_ARRAYS = "biufc"
"""Kinds of NumPy types whose bytes are numbers."""


class NotPlainError(TypeError):
    """A value that cannot be sent."""


class WireError(ValueError):
    """A malformed message."""


def encode(value, remote=None, depth=0):
    """Return a value as a tree for `json.dumps`.

    Args:
        value: Any value.
        remote: A function that is called with a value of any other type and the nearest of its base classes that can be
            encoded (or None). It returns a tree, or None if the encoding of the base suffices.

    Raises:
        NotPlainError: The value, or something in it, is not plain data, or is nested too deep.
    """
    if depth > MAX_DEPTH + 32:
        raise NotPlainError("data nested deeper than %d" % (MAX_DEPTH + 32))  # noqa: UP031
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    plain = ENCODERS.get(kind)
    if plain is not None:
        return plain(value, remote, depth + 1)
    if kind is type and library.TYPES.get(value.__name__) is value:
        return ["T", value.__name__]
    numbers = _of_numpy(value, kind)
    if numbers is not None:
        return numbers if isinstance(numbers, list) else encode(numbers[0], remote, depth)
    base = plain_base(kind)
    tree = None if remote is None else remote(value, base)
    if tree is not None:
        return tree
    if base is None:
        raise NotPlainError("an object of type " + kind.__name__)
    return ENCODERS[base](value, remote, depth + 1)


def plain_base(kind):
    """Return the nearest base of a class that can be encoded, or None."""
    return next((base for base in kind.__mro__ if base in ENCODERS), None)


def _of_numpy(value, kind):
    """Return the tree of an array, a tuple with the value of a scalar, or None for anything else."""
    numpy = sys.modules.get("numpy") if kind.__module__ == "numpy" else None
    if numpy is None:
        return None
    if kind is numpy.ndarray and value.dtype.kind in _ARRAYS:
        return ["a", value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, numpy.generic) and value.dtype.kind in _ARRAYS:
        return (value.item(),)
    return None


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


def _mapping(tag):
    def of(value, remote, depth):
        tree = [tag]
        for key, item in dict.items(value):
            tree += (encode(key, remote, depth), encode(item, remote, depth))
        return tree

    return of


def _with_default(value, remote, depth):
    factory = value.default_factory
    known = isinstance(factory, type) and library.TYPES.get(factory.__name__) is factory
    return ["g", factory.__name__ if known else None, *_mapping("d")(value, remote, depth)[1:]]


def _deque(value, remote, depth):
    return ["q", value.maxlen, *(encode(item, remote, depth) for item in collections.deque.__iter__(value))]


def _slice(value, remote, depth):
    return ["sl", *(encode(item, remote, depth) for item in (value.start, value.stop, value.step))]


def _bytes(value, remote, depth):
    return ["b", bytes.hex(value)]


def _complex(value, remote, depth):
    return ["c", _float(value.real, remote, depth), _float(value.imag, remote, depth)]


def _leaf(plain):
    def of(value, remote, depth):
        try:
            return plain(value)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotPlainError(str(error)) from None

    return of


ENCODERS = {
    bool: lambda value, remote, depth: bool(value),
    int: _integer,
    float: _float,
    str: _text,
    bytes: _bytes,
    complex: _complex,
    **{base: _mapping(tag) for tag, base in _MAPPINGS.items()},
    **{base: _sequence(tag, base) for tag, base in _SEQUENCES.items()},
    collections.defaultdict: _with_default,
    collections.deque: _deque,
    slice: _slice,
    **{base: _leaf(plain) for base, plain in library.ENCODERS.items()},
}


def decode(tree, remote=None, depth=0):
    """Decode an untrusted tree to a value.

    Args:
        tree: Parsed JSON.
        remote: A function that returns the value of a tree with a tag `r`, `x` or `k`; without it, such tags are
            rejected.

    Raises:
        WireError: The tree is malformed.
    """
    if tree is None or isinstance(tree, (bool, str, int, float)):
        return tree
    if not isinstance(tree, list) or not tree or not isinstance(tree[0], str):
        raise WireError("not plain data")
    if depth > MAX_DEPTH:
        raise WireError("nested deeper than %d" % MAX_DEPTH)  # noqa: UP031
    tag, items = tree[0], tree[1:]
    try:
        if remote is not None and tag in ("r", "x", "X", "k"):
            return remote(tree)
        if tag in library.DECODERS:
            return library.DECODERS[tag](*items)
        return _container(tag, items, remote, depth + 1)
    except (TypeError, ValueError, LookupError, RecursionError, ArithmeticError, AttributeError) as error:
        raise WireError("not plain data: %.200s" % (error,)) from None  # noqa: UP031


def _container(tag, items, remote, depth):
    if tag in _SEQUENCES:
        values = [decode(item, remote, depth) for item in items]
        return _SEQUENCES[tag](told_apart(values) if tag in "sz" else values)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](_pairs(items, remote, depth))
    if tag == "g":
        factory = None if items[0] is None else library.TYPES[items[0]]
        return collections.defaultdict(factory, _pairs(items[1:], remote, depth))
    if tag == "q":
        return collections.deque((decode(item, remote, depth) for item in items[1:]), items[0])
    if tag == "c":
        return complex(*(_real(decode(item)) for item in items))
    if tag == "sl":
        return slice(*(decode(item, remote, depth) for item in items))
    if tag == "a":
        return _array(*items)
    (item,) = items
    return {"i": library.integer, "f": _not_finite, "b": bytes.fromhex}[tag](item)


def _pairs(items, remote, depth):
    values = [decode(item, remote, depth) for item in items]
    return dict(zip(told_apart(values[::2]), values[1::2], strict=True))


def _array(dtype, shape, data):
    import numpy

    kind = numpy.dtype(dtype) if isinstance(dtype, str) and len(dtype) < 8 else None
    if kind is None or kind.kind not in _ARRAYS or kind.hasobject:
        raise WireError("an array of no numbers")
    return numpy.frombuffer(bytearray.fromhex(data), kind).reshape(shape)


def told_apart(values):
    """Return the values, after checking that a set or a dict can hold them efficiently.

    Raises:
        WireError: Too many values have the same hash.
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


def _not_finite(text):
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]
