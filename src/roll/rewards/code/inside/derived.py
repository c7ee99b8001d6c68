"""Classes of the tests that derive from one of the candidate's.

    class Dog(Animal): …    ──► the candidate's side makes the class; its methods are functions of the checker's

So the tests' code stays with the tests, and the candidate's class calls it as it would any method. `super()` leads back
to the candidate's class.
"""

from __future__ import annotations

import types

from . import operations
from .outcomes import Kept

_OF_PYTHON = ("__module__", "__qualname__", "__orig_bases__", "__classcell__", "__doc__", "__annotations__")
_OF_PYTHON += ("__firstlineno__", "__static_attributes__")


class Derived(type):
    """The metaclass of the stand-in for a base: what it makes is the candidate's class."""

    def __new__(meta, name, bases, members):
        """Called by a `class` statement of the tests."""
        base = vars(bases[0])["remote"]
        return derive(base, name, members)


def stand_in(remote):
    """The base that Python takes for one of the candidate's classes."""
    return type.__new__(Derived, "StandIn", (), {"remote": remote})


def derive(base, name, members):
    """Have the candidate's side make the class; the stand-in for it.

    Raises:
        BrokenTestsError: a member cannot go there.
    """
    line = base._line
    names = [each for each in base._ask("dir") if isinstance(each, str)]
    parent = type("Parent", (), {"__slots__": (), **{each: _of_parent(base, each) for each in names if _passes(each)}})
    shadow = type(name, (parent,), {"__slots__": ()})
    if "__classcell__" in members:
        members["__classcell__"].cell_contents = shadow
    functions, properties, static, values = {}, {}, {}, {}
    for key, value in members.items():
        if isinstance(value, types.FunctionType):
            functions[key] = _method(value, shadow, frozenset(names))
        elif isinstance(value, property):
            properties[key] = _method(value.fget, shadow, frozenset(names))
        elif isinstance(value, staticmethod):
            static[key] = value.__func__
        elif key not in _OF_PYTHON:
            values[key] = value
    made = line.value(line.do("derive", base, name, functions, properties, static, values))
    if isinstance(made, Kept):
        made._name = name
    return made


def _passes(name):
    return name == "__init__" or name in operations.METHODS or not name.startswith("__")


def _of_parent(base, name):
    def method(self, *args, **kwargs):
        return base._line.value(base._line.do("super", base, name, self, *args, **kwargs))

    return method


def _method(function, shadow, names):
    """A function of the tests', whose `self` knows its `super()`."""

    def called(this, *args, **kwargs):
        return function(_bound(this, shadow, names), *args, **kwargs)

    return called


def _bound(this, shadow, names):
    kind = type(this)

    def attribute(self, name):
        if name in names and not name.startswith("__"):  # an overridden method, not that of the base
            return kind.__getattr__(self, name)
        return object.__getattribute__(self, name)

    found = object.__new__(type("Remote", (kind, shadow), {"__slots__": (), "__getattribute__": attribute}))
    for slot in (slot for each in kind.__mro__ for slot in vars(each).get("__slots__", ())):
        object.__setattr__(found, slot, getattr(this, slot))
    return found
