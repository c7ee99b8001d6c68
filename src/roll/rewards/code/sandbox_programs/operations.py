"""The operations that a checker may perform on an object that stays in the candidate's process: an allow-list, by name.

The candidate's side runs them (`FUNCTIONS`). The checker's side offers an operation if the object's class has
its method (`METHODS`: the name of the method, and of the operation).
"""

from __future__ import annotations

import builtins
import copy
import math
import operator

BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
BINARY += ("divmod",)
UNARY = ("neg", "pos", "abs", "invert")
ORDER = ("lt", "le", "gt", "ge")
_IN_PLACE = tuple(f"i{name}" for name in BINARY[:-1])
_CONVERSIONS = ("int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "bool", "len")
_OTHER_OPERATIONS = ("getitem", "setitem", "delitem", "contains", "iter", "reversed", "next")
_CLASS_METHODS = ("enter", "exit", "aiter", "anext", "aenter", "aexit")
"""Special methods that no built-in function calls exclusively; they are called through the object's class."""
_UNIVERSAL_OPERATIONS = (
    "getattr",
    "setattr",
    "delattr",
    "eq",
    "hash",
    "str",
    "repr",
    "format",
    "dir",
    "isinstance",
    "issubclass",
)


def _find_function(name):
    return next(
        found
        for module in (operator, builtins, math)
        for spelled in (f"__{name}__", name)
        if (found := vars(module).get(spelled)) is not None
    )


def _make_class_call(name):
    return lambda target, *args: getattr(type(target), f"__{name}__")(target, *args)


FUNCTIONS = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{name: _make_class_call(name) for name in _CLASS_METHODS},
    **{
        name: _find_function(name)
        for name in (*_UNIVERSAL_OPERATIONS, *BINARY, *UNARY, *ORDER, *_IN_PLACE, *_CONVERSIONS, *_OTHER_OPERATIONS)
    },
}
METHODS = {
    f"__{name}__": name
    for name in ("call", *BINARY, *UNARY, *ORDER, *_IN_PLACE, *_CONVERSIONS, *_OTHER_OPERATIONS, *_CLASS_METHODS)
}
METHODS.update((f"__r{name}__", name) for name in BINARY)


def list_methods(kind):
    """Return the methods in `METHODS` that a class defines or inherits from a class other than `object`."""
    return [
        name
        for name in METHODS
        if (found := getattr(kind, name, None)) is not None and found is not getattr(object, name, None)
    ]
