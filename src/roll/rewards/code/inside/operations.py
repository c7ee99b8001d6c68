"""What a checker may do with an object that stays with the candidate: a closed list, by name.

The candidate's side carries them out (`CARRIED_OUT`); the checker's side offers those whose methods the object's class
has (`METHODS`: the name of the method, that of the operation).
"""

from __future__ import annotations

import copy
import math
import operator

BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
UNARY = ("neg", "pos", "abs", "invert")
CONVERSIONS = {
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "bool": bool,
    "len": len,
}
ORDER = ("lt", "le", "gt", "ge")


def _operator(name):
    return getattr(operator, name + "_" if name in ("and", "or") else name)


def _enter(target):
    return type(target).__enter__(target)


def _exit(target, *error):
    return type(target).__exit__(target, *error)


CARRIED_OUT = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "attr": getattr,
    "set_attr": setattr,
    "del_attr": delattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "del_item": operator.delitem,
    "contains": operator.contains,
    "eq": operator.eq,
    "ne": operator.ne,
    "hash": hash,
    "str": str,
    "repr": repr,
    "format": format,
    "iter": iter,
    "reversed": reversed,
    "next": next,
    "dir": dir,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "enter": _enter,
    "exit": _exit,
    **CONVERSIONS,
    **{name: _operator(name) for name in (*BINARY, *UNARY, *ORDER)},
    **{"i" + name: getattr(operator, "i" + name) for name in BINARY},
    "divmod": divmod,
}
METHODS = {
    "__call__": "call",
    "__getitem__": "item",
    "__setitem__": "set_item",
    "__delitem__": "del_item",
    "__contains__": "contains",
    "__iter__": "iter",
    "__next__": "next",
    "__reversed__": "reversed",
    "__enter__": "enter",
    "__exit__": "exit",
    "__await__": "await",
    "__aiter__": "aiter",
    "__anext__": "anext",
    "__aenter__": "aenter",
    "__aexit__": "aexit",
    "__divmod__": "divmod",
    "__rdivmod__": "divmod",
    **{f"__{name}__": name for name in (*BINARY, *UNARY, *ORDER, *CONVERSIONS)},
    **{f"__r{name}__": name for name in BINARY},
    **{f"__i{name}__": "i" + name for name in BINARY},
}


def methods_of(kind):
    """Names of the methods of `METHODS` that a class has, and that are not every object's."""
    return [
        name
        for name in METHODS
        if (found := getattr(kind, name, None)) is not None and found is not getattr(object, name, None)
    ]
