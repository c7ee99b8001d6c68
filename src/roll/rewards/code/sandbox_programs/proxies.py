"""The checker's proxies for the candidate's objects.

A proxy forwards operations; a result is plain data or another proxy. It has the methods of the object's class that are
in an allow-list, so `callable`, `with` and iteration work as usual. Operations that decide a test are guarded:

    object == plain value         an error, unless the object derives from a class of plain data: then its content
    object == object, a < b       the candidate is asked, and must distinguish the object from others (`claim_checks`)
    x in object                   only for objects that a test made by calling a class; others are iterated
    object - 1, object % object   only for objects that a test made: `f(x) - 42` would reveal the expected value
"""

from __future__ import annotations

import builtins
import functools

from . import claim_checks, operations, wire
from .outcomes import NotComparableError, RemoteObjectBase


class RemoteObject(RemoteObjectBase):
    """A proxy for an object that stays in the candidate's process."""

    __slots__ = ("_holds", "_is_class", "_is_subject", "_kind", "_made", "_member", "_number", "_roll_connection")

    def __init__(self, connection, number, kind, is_subject, holds=False, is_class=False, member=None):
        for name, value in (
            ("_roll_connection", connection),
            ("_number", number),
            ("_kind", kind),
            ("_is_subject", is_subject),  # whether a test made it, by calling a class
            ("_holds", bool(holds)),
            ("_is_class", bool(is_class)),
            ("_member", member),
            ("_made", None),
            ("_name", ""),
        ):
            object.__setattr__(self, name, value)

    def _send_request(self, op, *args, is_subject=False):
        return self._roll_connection.decode_answer(self._roll_connection.run_operation(op, self, *args), is_subject)

    def _make_unsupported_error(self, operation, reason=""):
        return NotComparableError(f"{operation} of an object of type {self._kind}{reason}: return plain data instead")

    def __repr__(self):
        if self._roll_connection.process_end is not None:
            return f"<the candidate's {self._kind}>"
        return str(self._send_request("repr"))

    def __str__(self):
        return str(self._send_request("str"))

    def __format__(self, spec):
        return str(self._send_request("format", spec))

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__annotations__", "__members__"):
            raise AttributeError(name)
        value = self._send_request("getattr", name)
        if isinstance(value, RemoteObject) and value._member is not None:
            return claim_checks.check_named_member(self, name, value)
        if isinstance(value, RemoteObject) and self._name:
            value._name = f"{self._name}.{name}"
        return value

    def __setattr__(self, name, value):
        if name == "_name" or name in RemoteObject.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._send_request("setattr", name, value)

    def __delattr__(self, name):
        self._send_request("delattr", name)

    def __dir__(self):
        return self._send_request("dir")

    def __hash__(self):
        value = hash(tuple(self._member)) if self._member is not None else self._send_request("hash")
        if type(value) is not int:
            raise self._make_unsupported_error("the hash")
        return hash(value)

    def __eq__(self, other):
        return claim_checks.is_equal(self, other)

    def __ne__(self, other):
        return not claim_checks.is_equal(self, other)

    def __copy__(self):
        return self._send_request("copy", is_subject=self._is_subject)

    def __deepcopy__(self, memo):
        return self._send_request("deepcopy", is_subject=self._is_subject)

    def __reduce_ex__(self, protocol):
        raise self._make_unsupported_error("a pickle")

    def __instancecheck__(self, instance):
        return (
            isinstance(instance, RemoteObject)
            and self._roll_connection.decode_answer(self._roll_connection.run_operation("isinstance", instance, self))
            is True
        )

    def __subclasscheck__(self, kind):
        return (
            isinstance(kind, RemoteObject)
            and self._roll_connection.decode_answer(self._roll_connection.run_operation("issubclass", kind, self))
            is True
        )

    def __mro_entries__(self, bases):
        raise self._roll_connection.record_mistake(
            f"the tests derive a class from the answer's {self._name}, which is in another process"
        )


def _call(self, *args, **kwargs):
    connection = self._roll_connection
    answer = connection.run_operation("call", self, *args, **kwargs)
    value = connection.decode_answer(answer)
    if self._is_class and isinstance(value, RemoteObject) and value._member is not None:
        claim_checks.check_made_member(self, args, value)
    elif self._is_class and isinstance(value, RemoteObject):
        value._made = (self, args, kwargs)
        connection.made.append(value)
        if self._name[:1].isupper():
            value._is_subject, value._name = True, "."
    if answer.args is not None:
        _update_arguments(args, connection.decode(answer.args), connection.encode)
    return value


def _update_arguments(args, new_values, encode):
    """Propagate the candidate's in-place changes to lists, dicts and sets in its arguments to the test's objects.

    `new_values` holds the arguments as the candidate's function left them.
    """
    if not isinstance(new_values, tuple) or len(new_values) != len(args):
        raise wire.WireError("the changed arguments do not match the call")
    for mine, theirs in zip(args, new_values, strict=True):
        if type(mine) is not type(theirs) or isinstance(mine, RemoteObject) or encode(mine) == encode(theirs):
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)
        elif hasattr(mine, "extend"):
            mine.clear()
            mine.extend(theirs)


def _get_item(self, key):
    value = self._send_request("getitem", key)
    return (
        claim_checks.check_named_member(self, key, value)
        if isinstance(value, RemoteObject) and value._member
        else value
    )


def _iterate(self):
    """Return an iterator over the items, which are fetched one by one at first, then several per request."""
    iterator = self._send_request("iter")
    if not isinstance(iterator, RemoteObject):
        return iter(iterator)

    def iterate_items():
        num_requests = 0
        more = True
        while more is True:
            num_requests += 1
            values, more = iterator._send_request("some", min(2 ** max(0, num_requests - 4), 256))
            yield from values

    return iterate_items()


def _exit_block(self, kind, error, trace):
    if kind is None:
        return self._send_request("exit", None, None, None)
    remote = getattr(error, "_roll_remote", None)
    return self._send_request("leave", remote, _find_nearest_base(kind), str(error)) is True


def _find_nearest_base(kind):
    """Return the name of the nearest built-in base class of a test's exception class."""
    return next(each.__name__ for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each)


def _make_arithmetic(op, reflected):
    return lambda self, *other: claim_checks.compute_arithmetic(op, (*other, self) if reflected else (self, *other))


def _make_forwarder(op):
    return lambda self, *args: self._send_request(op, *args)


_SPECIAL_METHODS = {
    "__call__": _call,
    "__getitem__": _get_item,
    "__iter__": _iterate,
    "__contains__": claim_checks.is_contained,
    "__exit__": _exit_block,
    "__aexit__": lambda self, *error: self._send_request("aexit", None, None, None),
}


def _make_method(name):
    op = operations.METHODS[name]
    if name in _SPECIAL_METHODS:
        return _SPECIAL_METHODS[name]
    if op in operations.ORDER:
        return lambda self, other: claim_checks.compare_order(op, self, other)
    plain = op.removeprefix("i") if name.startswith("__i") else op
    if plain in (*operations.BINARY, *operations.UNARY):
        return _make_arithmetic(plain, name == f"__r{op}__")
    return _make_forwarder(op)


@functools.lru_cache(maxsize=256)
def _make_class(names):
    return type("Remote", (RemoteObject,), {"__slots__": (), **{name: _make_method(name) for name in names}})


def decode_remote(connection, tree, is_subject=False):
    """Decode a reference to an object or an exception class of the candidate: see `Connection.decode`."""
    if tree[0] in ("x", "X"):
        return connection.build_exception_class(tree)
    tag, number, kind, names, more = tree
    if tag != "r" or type(number) is not int or not isinstance(names, list):
        raise wire.WireError("the message does not describe an object")
    shape = _make_class(frozenset(name for name in names if isinstance(name, str) and name in operations.METHODS))
    remote = shape(connection, number, str(kind), is_subject, **more)
    if isinstance(more.get("holds"), list):
        return _make_plain_subclass(remote, connection.decode(more.get("holds"), is_subject))
    return claim_checks.intern_member(remote) if remote._member is not None else remote


def _make_plain_subclass(remote, plain):
    """Return the plain value of a candidate's object as an instance of a subclass that forwards other attributes.

    An example is a string whose class has additional methods. A bool, or a value whose type is not built in, is
    returned unchanged.
    """

    def get_attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(remote, name)

    kind = type(plain)
    if kind is bool or kind not in vars(builtins).values():
        return plain
    return type(remote._kind, (kind,), {"__getattr__": get_attribute, "_roll_number": remote._number})(plain)


def get_number(value):
    """Return the number of the candidate's object or class that a value represents; None for any other value."""
    if isinstance(value, Exception):
        remote = getattr(value, "_roll_remote", None)
        return None if remote is None else remote._number
    number = getattr(value if isinstance(value, type) else type(value), "_roll_number", None)
    return number if type(number) is int else None
