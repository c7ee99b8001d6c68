"""Expected values written in Python: literals, and calls to a closed list of classes, such as `Decimal("1.10")`."""

from __future__ import annotations

import ast
import datetime
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

__all__ = ["parse_python_literal"]

_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Decimal, Fraction, Counter, OrderedDict, deque, range, bytearray, frozenset, set, complex)
} | {name: getattr(datetime, name) for name in ("date", "time", "datetime", "timedelta")}


def parse_python_literal(text: str) -> Any:
    """Parse a Python literal.

    Raises:
        ValueError, TypeError, SyntaxError, ArithmeticError: The string is not a literal.
    """
    return _evaluate(ast.parse(text.strip(), mode="eval").body)


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        kwargs = {str(keyword.arg): _evaluate(keyword.value) for keyword in node.keywords}
        if name not in _CLASSES or "None" in kwargs:
            raise ValueError(f"unsupported class: {name!r}")
        return _CLASSES[name](*map(_evaluate, node.args), **kwargs)
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {_evaluate(item) for item in node.elts}
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_evaluate(key): _evaluate(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)
