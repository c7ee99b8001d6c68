"""Exception classes as plain data, and a check of the classes that an exception claims to derive from.

    ["T", name]                       a built-in class
    ["X", module, name, [bases]]      a class of the standard library
    ["x", number, name, [bases]]      a class of the candidate, with its number, if it has one

A Python class can derive from many others, so a single exception could match any exception that a test expects. A claim
is accepted only if at most one of its classes has two bases, and no class has more.
"""

from __future__ import annotations

import builtins
import sys

from . import library, wire

MAX_CLASSES = 16
MAX_FURTHER_BASES = 1


def encode_class(kind, number=None):
    """Encode an exception class as nested lists, with its base classes.

    `number` maps a class of the candidate to the number by which messages refer to it.
    """
    name = kind.__name__
    if library.TYPES.get(name) is kind:
        return ["T", name]
    bases = [encode_class(base, number) for base in kind.__bases__ if issubclass(base, BaseException)]
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind.__module__ != "__main__":
        return ["X", kind.__module__, name, bases]
    return ["x", None if number is None else number(kind), name, bases]


def encode_exception(error, number=None):
    """Encode an exception as plain data: its class and its text."""
    try:
        text = str(error)[:500]
    except Exception:
        text = ""
    return {"raised": encode_class(type(error), number), "text": text}


def list_classes(tree):
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
            raise wire.WireError("the message does not describe an exception class")
        if len(each) == 2:
            kind = library.TYPES.get(each[1]) if each[0] == "T" and isinstance(each[1], str) else None
            if kind is None or not issubclass(kind, BaseException):
                raise wire.WireError("the message names a class that is not a built-in exception")
            found.append((kind.__name__, kind))
            continue
        _, _, name, bases = each
        if not isinstance(name, str) or not isinstance(bases, list) or not bases:
            raise wire.WireError("the message does not describe an exception class")
        found.append((name, None))
        waiting += bases
        further += len(bases) - 1
        if further > MAX_FURTHER_BASES or len(found) + len(waiting) > MAX_CLASSES:
            raise wire.WireError("the exception has too many base classes")
    return found


def derives_from(tree, name):
    """Return whether an encoded exception class is or derives from the class `name`.

    The result is false if the exception claims more base classes than allowed.
    """
    try:
        found = list_classes(tree)
    except wire.WireError:
        return False
    wanted = getattr(builtins, name, None)
    if isinstance(wanted, type):
        return any(kind is not None and issubclass(kind, wanted) for _, kind in found)
    return any(name == class_name for class_name, kind in found if kind is None)


def rebuild_exception(tree, text, objects=()):
    """Rebuild an encoded exception with its text, as an instance of the nearest class that this process knows.

    `objects` maps numbers to classes of this process, for exceptions that refer to one of them.
    """
    if tree[0] == "x" and isinstance(tree[1], int) and objects:
        return objects[tree[1]](text)
    kinds = (kind for _, kind in list_classes(tree) if kind is not None and issubclass(kind, Exception))
    return instantiate(next(kinds, Exception), text)


def instantiate(kind, text):
    """Return an exception with this text, even if its class requires more arguments."""
    try:
        return kind(text)
    except TypeError:
        return kind.__new__(kind, text)
