"""The checker's proxies for the candidate's objects.

A proxy forwards operations; a result is plain data or another proxy. It has those methods of the object's class that
are in a closed list, so `callable`, `with` and iteration work as usual. Operations that decide a test are guarded:

    object == plain value         an error, unless the object derives from a class of plain data: then its content
    object == object, a < b       the candidate is asked, and must tell the object from others (`controls`)
    x in object                   only for objects that a test made by calling a class; others are iterated
    object - 1, object % object   only for objects that a test made: `f(x) - 42` would reveal the expected value
"""

from __future__ import annotations

import builtins
import functools

from . import controls, operations, wire
from .outcomes import Kept, NotComparableError


class Remote(Kept):
    """An object that stays with the candidate."""

    __slots__ = ("_holds", "_is_class", "_is_subject", "_kind", "_line", "_made", "_member", "_number")

    def __init__(self, line, number, kind, is_subject, holds=False, is_class=False, member=None):
        for name, value in (
            ("_line", line),
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

    def _ask(self, op, *args, is_subject=False):
        return self._line.value(self._line.do(op, self, *args), is_subject)

    def _refused(self, what, why=""):
        return NotComparableError(f"{what} of an object of type {self._kind}{why}: not plain data")

    def __repr__(self):
        if self._line.over is not None:
            return f"<the candidate's {self._kind}>"
        return str(self._ask("repr"))

    def __str__(self):
        return str(self._ask("str"))

    def __format__(self, spec):
        return str(self._ask("format", spec))

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__annotations__", "__members__"):
            raise AttributeError(name)
        value = self._ask("getattr", name)
        if isinstance(value, Remote) and value._member is not None:
            return controls.named_member(self, name, value)
        if isinstance(value, Remote) and self._name:
            value._name = f"{self._name}.{name}"
        return value

    def __setattr__(self, name, value):
        if name == "_name" or name in Remote.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._ask("setattr", name, value)

    def __delattr__(self, name):
        self._ask("delattr", name)

    def __dir__(self):
        return self._ask("dir")

    def __hash__(self):
        found = hash(tuple(self._member)) if self._member is not None else self._ask("hash")
        if type(found) is not int:
            raise self._refused("the hash")
        return hash(found)

    def __eq__(self, other):
        return controls.equal(self, other)

    def __ne__(self, other):
        return not controls.equal(self, other)

    def __copy__(self):
        return self._ask("copy", is_subject=self._is_subject)

    def __deepcopy__(self, memo):
        return self._ask("deepcopy", is_subject=self._is_subject)

    def __reduce_ex__(self, protocol):
        raise self._refused("a pickle")

    def __instancecheck__(self, instance):
        return isinstance(instance, Remote) and self._line.value(self._line.do("isinstance", instance, self)) is True

    def __subclasscheck__(self, kind):
        return isinstance(kind, Remote) and self._line.value(self._line.do("issubclass", kind, self)) is True

    def __mro_entries__(self, bases):
        raise self._line.broken(f"the tests derive a class from the answer's {self._name}, which is elsewhere")


def _call(self, *args, **kwargs):
    line = self._line
    answer = line.do("call", self, *args, **kwargs)
    value = line.value(answer)
    if self._is_class and isinstance(value, Remote) and value._member is not None:
        controls.made_member(self, args, value)
    elif self._is_class and isinstance(value, Remote):
        value._made = (self, args, kwargs)
        line.made.append(value)
        if self._name[:1].isupper():
            value._is_subject, value._name = True, "."
    if answer.args is not None:
        _change(args, line.decode(answer.args), line.tree)
    return value


def _change(args, after, tree):
    """Update lists, dicts and sets to the content that the candidate left in them."""
    if not isinstance(after, tuple) or len(after) != len(args):
        raise wire.WireError("arguments do not fit")
    for mine, theirs in zip(args, after, strict=True):
        if type(mine) is not type(theirs) or isinstance(mine, Remote) or tree(mine) == tree(theirs):
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = theirs
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(theirs)
        elif hasattr(mine, "extend"):
            mine.clear()
            mine.extend(theirs)


def _item(self, key):
    value = self._ask("getitem", key)
    return controls.named_member(self, key, value) if isinstance(value, Remote) and value._member else value


def _each(self):
    """Return an iterator over the items, which are fetched one by one at first, then several per request."""
    iterator = self._ask("iter")
    if not isinstance(iterator, Remote):
        return iter(iterator)

    def items():
        asked = 0
        more = True
        while more is True:
            asked += 1
            found, more = iterator._ask("some", min(2 ** max(0, asked - 4), 256))
            yield from found

    return items()


def _exit(self, kind, error, trace):
    if kind is None:
        return self._ask("exit", None, None, None)
    own = getattr(error, "_roll_remote", None)
    return self._ask("leave", own, _nearest(kind), str(error)) is True


def _nearest(kind):
    """Return the name of the nearest built-in class of a test's exception."""
    return next(each.__name__ for each in kind.__mro__ if getattr(builtins, each.__name__, None) is each)


def _arithmetic(op, reflected):
    return lambda self, *other: controls.reckon(op, (*other, self) if reflected else (self, *other))


def _passed_on(op):
    return lambda self, *args: self._ask(op, *args)


_BY_HAND = {
    "__call__": _call,
    "__getitem__": _item,
    "__iter__": _each,
    "__contains__": controls.contains,
    "__exit__": _exit,
    "__aexit__": lambda self, *error: self._ask("aexit", None, None, None),
}


def _method(name):
    op = operations.METHODS[name]
    if name in _BY_HAND:
        return _BY_HAND[name]
    if op in operations.ORDER:
        return lambda self, other: controls.ordered(op, self, other)
    plain = op.removeprefix("i") if name.startswith("__i") else op
    if plain in (*operations.BINARY, *operations.UNARY):
        return _arithmetic(plain, name == f"__r{op}__")
    return _passed_on(op)


@functools.lru_cache(maxsize=256)
def _shape(names):
    return type("Remote", (Remote,), {"__slots__": (), **{name: _method(name) for name in names}})


def of_tree(line, tree, is_subject=False):
    """Return the value of a tree that refers to an object or an exception class of the candidate."""
    if tree[0] in ("x", "X"):
        return line.exception_class(tree)
    tag, number, kind, names, more = tree
    if tag != "r" or type(number) is not int or not isinstance(names, list):
        raise wire.WireError("no object")
    shape = _shape(frozenset(name for name in names if isinstance(name, str) and name in operations.METHODS))
    found = shape(line, number, str(kind), is_subject, **more)
    if isinstance(more.get("holds"), list):
        return _simple(found, line.decode(more.get("holds"), is_subject))
    return controls.member(found) if found._member is not None else found


def _simple(remote, plain):
    """Return a number, text or tuple that also has the further attributes of the candidate's object."""

    def attribute(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(remote, name)

    kind = type(plain)
    if kind is bool or kind not in vars(builtins).values():
        return plain
    return type(remote._kind, (kind,), {"__getattr__": attribute, "_roll_number": remote._number})(plain)


def made_of(value):
    """Return the number of the candidate's object that a local value represents, or None if it represents none."""
    if isinstance(value, Exception):
        remote = getattr(value, "_roll_remote", None)
        return None if remote is None else remote._number
    found = getattr(value if isinstance(value, type) else type(value), "_roll_number", None)
    return found if type(found) is int else None
