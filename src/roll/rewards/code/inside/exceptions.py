"""Classes of exceptions as plain data, and a check of what an exception claims to be.

    ["T", name]                       a built-in class
    ["X", module, name, [bases]]      a class of the standard library
    ["x", number, name, [bases]]      a class of the candidate, with its number, if it has one

Python lets a class derive from many others, so one exception could match any that a test expects. A claim counts if at
most one of its classes has two bases, and no class has more.
"""

from __future__ import annotations

import builtins
import sys

from . import library, wire

MAX_CLASSES = 16
MAX_FURTHER_BASES = 1


def describe(kind, number=None):
    """Return the tree of a class of exceptions. `number` returns the number of a class that the candidate defines."""
    name = kind.__name__
    if library.TYPES.get(name) is kind:
        return ["T", name]
    bases = [describe(base, number) for base in kind.__bases__ if issubclass(base, BaseException)]
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind.__module__ != "__main__":
        return ["X", kind.__module__, name, bases]
    return ["x", None if number is None else number(kind), name, bases]


def raised(error, number=None):
    """Return an exception as plain data: its class and its text."""
    try:
        text = str(error)[:500]
    except Exception:
        text = ""
    return {"raised": describe(type(error), number), "text": text}


def classes(tree):
    """Return all classes that an exception claims to derive from, the most derived first.

    Returns:
        A pair per class: its name, and the class itself if it is built in, else None.

    Raises:
        WireError: The tree is malformed, or claims too many classes.
    """
    found, waiting, further = [], [tree], 0
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, list) or len(each) not in (2, 4) or not all(isinstance(part, str) for part in each[:1]):
            raise wire.WireError("no class of exceptions")
        if len(each) == 2:
            kind = library.TYPES.get(each[1]) if each[0] == "T" and isinstance(each[1], str) else None
            if kind is None or not issubclass(kind, BaseException):
                raise wire.WireError("no built-in exception")
            found.append((kind.__name__, kind))
            continue
        _, _, name, bases = each
        if not isinstance(name, str) or not isinstance(bases, list) or not bases:
            raise wire.WireError("no class of exceptions")
        found.append((name, None))
        waiting += bases
        further += len(bases) - 1
        if further > MAX_FURTHER_BASES or len(found) + len(waiting) > MAX_CLASSES:
            raise wire.WireError("an exception that is of too many kinds")
    return found


def is_a(tree, name):
    """Return whether an exception is of the named class, and has no more base classes than allowed."""
    try:
        found = classes(tree)
    except wire.WireError:
        return False
    wanted = getattr(builtins, name, None)
    if isinstance(wanted, type):
        return any(kind is not None and issubclass(kind, wanted) for _, kind in found)
    return any(name == own for own, kind in found if kind is None)


def rebuilt(tree, text, own=()):
    """Return an exception of the nearest class that is known here, with its text. `own` holds classes by number."""
    if tree[0] == "x" and isinstance(tree[1], int) and own:
        return own[tree[1]](text)
    kinds = (kind for _, kind in classes(tree) if kind is not None and issubclass(kind, Exception))
    return instance(next(kinds, Exception), text)


def instance(kind, text):
    """Return an exception with this text, even if its class requires more arguments."""
    try:
        return kind(text)
    except TypeError:
        return kind.__new__(kind, text)
