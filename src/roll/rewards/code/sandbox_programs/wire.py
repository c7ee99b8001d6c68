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

An instance of a subclass is sent as an instance of its base class (a named tuple as a tuple), so no method of a
candidate's class ever reaches a checker. All other values raise `NotSerializableError`. Decoded values only have types
from this list.
"""

from __future__ import annotations

import collections
import math
import sys

from . import library

MAX_DEPTH = 64
"""Maximum nesting of a decoded value. An encoded value may be deeper: received values can be returned inside a list."""
MAX_HASH_COLLISIONS = 32
"""Maximum number of equal hashes in a set or in the keys of a dict, which is the number of comparisons in a lookup.
Numbers that are equal modulo 2**61 - 1 could otherwise make lookups take minutes."""
MAX_ITEMS = 1 << 20
"""Maximum number of items of a range that is expanded."""
_MAX_EXACT_INTEGER = 1 << 53
_SEQUENCE_TYPES = {"l": list, "t": tuple, "s": set, "z": frozenset}
_MAPPING_TYPES = {"d": dict, "o": collections.OrderedDict, "n": collections.Counter}
_ARRAY_DTYPE_KINDS = "biufc"
"""Kinds of the NumPy dtypes that can be sent."""


class NotSerializableError(TypeError):
    """A value that cannot be sent."""


class WireError(ValueError):
    """A malformed message."""


def encode(value, remote=None, depth=0):
    """Encode a value as a tree of plain data for `json.dumps`.

    Args:
        value: Any value.
        remote: Encodes values of types that the module docstring does not list. It is called with the value and its
            nearest base class that can be encoded (or None), and returns a tree, or None if the encoding of the base
            class suffices.

    Raises:
        NotSerializableError: The value, or something in it, is not plain data, or is nested too deeply.
    """
    if depth > MAX_DEPTH + 32:
        raise NotSerializableError("data nested deeper than %d levels" % (MAX_DEPTH + 32))  # noqa: UP031
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    plain = ENCODERS.get(kind)
    if plain is not None:
        return plain(value, remote, depth + 1)
    if kind is type and library.TYPES.get(value.__name__) is value:
        return ["T", value.__name__]
    numbers = _encode_numpy(value, kind)
    if numbers is not None:
        return numbers if isinstance(numbers, list) else encode(numbers[0], remote, depth)
    base = find_plain_base(kind)
    tree = None if remote is None else remote(value, base)
    if tree is not None:
        return tree
    if base is None:
        raise NotSerializableError("an object of type " + kind.__name__)
    return ENCODERS[base](value, remote, depth + 1)


def find_plain_base(kind):
    """Return the first class in the MRO of `kind` whose instances can be encoded, or None."""
    return next((base for base in kind.__mro__ if base in ENCODERS), None)


def _encode_numpy(value, kind):
    """Encode a NumPy array as a tree; for a NumPy scalar, return a tuple (Python value,); else return None."""
    numpy = sys.modules.get("numpy") if kind.__module__ == "numpy" else None
    if numpy is None:
        return None
    if kind is numpy.ndarray and value.dtype.kind in _ARRAY_DTYPE_KINDS:
        return ["a", value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, numpy.generic) and value.dtype.kind in _ARRAY_DTYPE_KINDS:
        return (value.item(),)
    return None


def _encode_integer(value, remote, depth):
    # The method of the base class: a subclass of the candidate may override it, to run code here.
    value = int.__int__(value)
    return value if -_MAX_EXACT_INTEGER < value < _MAX_EXACT_INTEGER else ["i", hex(value)]


def _encode_float(value, remote, depth):
    value = float.__float__(value)
    return value if math.isfinite(value) else ["f", repr(value)]


def _encode_text(value, remote, depth):
    return str.__str__(value)


def _make_sequence_encoder(tag, base):
    def encode_items(value, remote, depth):
        return [tag, *(encode(item, remote, depth) for item in base.__iter__(value))]

    return encode_items


def _make_mapping_encoder(tag):
    def encode_items(value, remote, depth):
        tree = [tag]
        for key, item in dict.items(value):
            tree += (encode(key, remote, depth), encode(item, remote, depth))
        return tree

    return encode_items


def _encode_defaultdict(value, remote, depth):
    factory = value.default_factory
    known = isinstance(factory, type) and library.TYPES.get(factory.__name__) is factory
    return ["g", factory.__name__ if known else None, *_make_mapping_encoder("d")(value, remote, depth)[1:]]


def _encode_deque(value, remote, depth):
    return ["q", value.maxlen, *(encode(item, remote, depth) for item in collections.deque.__iter__(value))]


def _encode_slice(value, remote, depth):
    return ["sl", *(encode(item, remote, depth) for item in (value.start, value.stop, value.step))]


def _encode_bytes(value, remote, depth):
    return ["b", bytes.hex(value)]


def _encode_complex(value, remote, depth):
    return ["c", _encode_float(value.real, remote, depth), _encode_float(value.imag, remote, depth)]


def _make_leaf_encoder(plain):
    def encode_items(value, remote, depth):
        try:
            return plain(value)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotSerializableError(str(error)) from None

    return encode_items


ENCODERS = {
    bool: lambda value, remote, depth: bool(value),
    int: _encode_integer,
    float: _encode_float,
    str: _encode_text,
    bytes: _encode_bytes,
    complex: _encode_complex,
    **{base: _make_mapping_encoder(tag) for tag, base in _MAPPING_TYPES.items()},
    **{base: _make_sequence_encoder(tag, base) for tag, base in _SEQUENCE_TYPES.items()},
    collections.defaultdict: _encode_defaultdict,
    collections.deque: _encode_deque,
    slice: _encode_slice,
    **{base: _make_leaf_encoder(plain) for base, plain in library.ENCODERS.items()},
}


def decode(tree, remote=None, depth=0):
    """Decode an untrusted tree to a value.

    Args:
        tree: Parsed JSON.
        remote: A function that decodes trees with a tag `r`, `x`, `X` or `k`; if None, these tags are rejected.

    Raises:
        WireError: The tree is malformed.
    """
    if tree is None or isinstance(tree, (bool, str, int, float)):
        return tree
    if not isinstance(tree, list) or not tree or not isinstance(tree[0], str):
        raise WireError("the value is not encoded as plain data")
    if depth > MAX_DEPTH:
        raise WireError("the value is nested deeper than %d levels" % MAX_DEPTH)  # noqa: UP031
    tag, items = tree[0], tree[1:]
    try:
        if remote is not None and tag in ("r", "x", "X", "k"):
            return remote(tree)
        if tag in library.DECODERS:
            return library.DECODERS[tag](*items)
        return _decode_container(tag, items, remote, depth + 1)
    except (TypeError, ValueError, LookupError, RecursionError, ArithmeticError, AttributeError) as error:
        raise WireError("the value is not encoded as plain data: %.200s" % (error,)) from None  # noqa: UP031


def _decode_container(tag, items, remote, depth):
    if tag in _SEQUENCE_TYPES:
        values = [decode(item, remote, depth) for item in items]
        return _SEQUENCE_TYPES[tag](check_hashes(values) if tag in "sz" else values)
    if tag in _MAPPING_TYPES:
        return _MAPPING_TYPES[tag](_decode_pairs(items, remote, depth))
    if tag == "g":
        factory = None if items[0] is None else library.TYPES[items[0]]
        return collections.defaultdict(factory, _decode_pairs(items[1:], remote, depth))
    if tag == "q":
        return collections.deque((decode(item, remote, depth) for item in items[1:]), items[0])
    if tag == "c":
        return complex(*(_check_real(decode(item)) for item in items))
    if tag == "sl":
        return slice(*(decode(item, remote, depth) for item in items))
    if tag == "a":
        return _decode_array(*items)
    (item,) = items
    return {"i": library.parse_integer, "f": _parse_not_finite, "b": bytes.fromhex}[tag](item)


def _decode_pairs(items, remote, depth):
    values = [decode(item, remote, depth) for item in items]
    return dict(zip(check_hashes(values[::2]), values[1::2], strict=True))


def _decode_array(dtype, shape, data):
    import numpy

    kind = numpy.dtype(dtype) if isinstance(dtype, str) and len(dtype) < 8 else None
    if kind is None or kind.kind not in _ARRAY_DTYPE_KINDS or kind.hasobject:
        raise WireError("the items of an array must be numbers")
    return numpy.frombuffer(bytearray.fromhex(data), kind).reshape(shape)


def check_hashes(values):
    """Return the values, after checking that a set or a dict can hold them efficiently.

    Raises:
        WireError: Too many values have the same hash.
    """
    counts = {}
    for value in values:
        found = hash(value)
        counts[found] = counts.get(found, 0) + 1
    if max(counts.values(), default=0) > MAX_HASH_COLLISIONS:
        raise WireError("too many values have the same hash")
    return values


def _check_real(value):
    if type(value) not in (int, float):
        raise WireError("the parts of a complex number must be numbers")
    return value


def _parse_not_finite(text):
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]
