"""Evaluates constant expressions in the syntax tree of a Python script; the script is never run.

A name has the value that it is assigned if there is one unconditional assignment to it, and if nothing can change the
value afterwards. All other expressions raise `NotConstantError` with the reason and the line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Binding", "NotConstantError", "Scope", "SyntaxTree", "format_source"]

_NUMBER_TYPES = ("bfloat16", "float16", "float32", "float64", "half", "float")
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
"""Powers are missing, since their value may be larger than memory."""
_READ_ONLY_FUNCTIONS = ("print", "len", "str", "repr", "sorted", "dict", "list", "tuple")
"""Functions that do not modify their arguments."""
_MAX_SOURCE_LENGTH = 80
_MAX_TEXT_LENGTH = 10_000
"""Maximum length of a computed string; each line of a script may double it."""
_MAX_NUMBER = 2.0**64
_MAX_EXPRESSIONS = 100_000
"""Maximum number of expressions read from one script: lists may refer to each other."""


class NotConstantError(Exception):
    """The value of an expression can be determined only by running the script; the message gives the reason."""


@dataclass(eq=False, slots=True)
class Binding:
    """A statement that binds a name to a value."""

    line: int
    value: ast.expr | None
    """The assigned expression; `None` for a statement that does not assign one expression, such as a loop or an
    import."""
    kind: str
    """The type of binding, for messages."""
    is_conditional: bool


@dataclass(eq=False, slots=True)
class Scope:
    """A module, function or class, with the names that are assigned in it."""

    parent: Scope | None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)

    def find(self, name: str) -> list[Binding]:
        """Return all bindings of a name in the innermost scope that binds it; empty if no scope does."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope.bindings[name]
            scope = scope.parent
        return []


class SyntaxTree:
    """A script's tree, with the scope and the parent of every node.

    Args:
        tree: tree of the whole file.
        is_read_only: returns whether a function, given by the last part of its name, does not modify its arguments.
    """

    def __init__(self, tree: ast.Module, is_read_only: Callable[[str], bool]) -> None:
        self.module = Scope(parent=None)
        self.scopes: dict[ast.AST, Scope] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self.imported: dict[str, str] = {}
        """Imported names, with their original names."""
        self._loads: dict[str, list[ast.Name]] = {}
        self._stars: list[int] = []
        self.known: dict[ast.expr, Any] = {}
        """Values of synthetic nodes: one for each entry of a dictionary that a call expands with `**`."""
        self._is_read_only = is_read_only
        self._num_read = 0
        self._visit(tree, self.module, False)

    def get_called_name(self, call: ast.Call) -> str:
        """Return the last part of the called function's original name; empty if the name is not known."""
        if isinstance(call.func, ast.Name):
            return self.imported.get(call.func.id, call.func.id)
        return call.func.attr if isinstance(call.func, ast.Attribute) else ""

    def find_bound_expression(self, name: ast.Name) -> ast.expr:
        """Return the expression that is assigned to a name.

        Raises:
            NotConstantError: the name does not have exactly one unconditional assignment, or `import *` may replace it.
        """
        found = self.scopes[name].find(name.id)
        if not found:
            raise NotConstantError(f"`{name.id}` is not assigned in the script")
        if len(found) > 1:
            raise NotConstantError(f"`{name.id}` is assigned on lines {', '.join(str(one.line) for one in found)}")
        (only,) = found
        if only.value is None:
            raise NotConstantError(f"`{name.id}` is {only.kind} (line {only.line})")
        if only.is_conditional:
            raise NotConstantError(f"`{name.id}` is assigned conditionally or in a loop (line {only.line})")
        if later := [line for line in self._stars if line >= only.line]:
            raise NotConstantError(f"`{name.id}` may be replaced by `import *` on line {later[0]}")
        return only.value

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the expression that is assigned to a name, or `node` itself if it is not a name.

        Raises:
            NotConstantError: a name is not assigned exactly one expression, or is defined in terms of itself.
        """
        seen: set[str] = set()
        while isinstance(node, ast.Name):
            if node.id in seen:
                raise NotConstantError(f"`{node.id}` is defined in terms of itself")
            seen.add(node.id)
            node = self.find_bound_expression(node)
        return node

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression as plain data: strings, numbers, booleans, `None`, lists, dictionaries.

        Raises:
            NotConstantError: the value cannot be read without running the script.
        """
        self._num_read += 1
        if self._num_read > _MAX_EXPRESSIONS:
            raise NotConstantError(f"the script has more than {_MAX_EXPRESSIONS:,} expressions")
        if node in self.known:
            return self.known[node]
        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None as value):
                return value
            case ast.Name():
                found = self.evaluate(self.resolve(node))
                if isinstance(found, list | dict):
                    self.check_unchanged(node)
                return found
            case ast.List() | ast.Tuple():
                return [self.evaluate(entry) for entry in node.elts]
            case ast.Dict():
                return self._evaluate_dictionary(node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                number = self._evaluate_number(operand)
                return -number if isinstance(node.op, ast.USub) else number
            case ast.BinOp():
                return self._evaluate_arithmetic(node)
            case ast.JoinedStr():
                return "".join(self._evaluate_f_string_part(part) for part in node.values)
            case ast.Subscript():
                return self._evaluate_lookup(node)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _NUMBER_TYPES:
                return name
        raise NotConstantError(f"the value of `{format_source(node)}` is known only at run time")

    def _evaluate_dictionary(self, node: ast.Dict) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                more = self.evaluate(value)
                if not isinstance(more, dict):
                    raise NotConstantError(f"`**{format_source(value)}` is not a dictionary")
                found |= more
                continue
            name = self.evaluate(key)
            if not isinstance(name, str):
                raise NotConstantError(f"the key `{format_source(key)}` is not a string")
            found[name] = self.evaluate(value)
        return found

    def _evaluate_number(self, node: ast.expr) -> int | float:
        value = self.evaluate(node)
        if not _is_number(value):
            raise NotConstantError(f"`{format_source(node)}` is not a number")
        return value

    def _evaluate_arithmetic(self, node: ast.BinOp) -> Any:
        compute = _ARITHMETIC.get(type(node.op))
        if compute is None:
            raise NotConstantError(f"the value of `{format_source(node)}` is known only at run time")
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        is_text = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if not is_text and not (_is_number(left) and _is_number(right)):
            raise NotConstantError(f"the value of `{format_source(node)}` is known only at run time")
        try:
            found = compute(left, right)
        except ArithmeticError as error:
            raise NotConstantError(f"`{format_source(node)}` cannot be evaluated ({error})") from None
        if (len(found) if is_text else abs(found)) > (_MAX_TEXT_LENGTH if is_text else _MAX_NUMBER):
            raise NotConstantError(f"`{format_source(node)}` is too large")
        return found

    def _evaluate_f_string_part(self, node: ast.expr) -> str:
        """Return the text of a part of an f-string.

        Raises:
            NotConstantError: the part has a conversion or a format, or its value cannot be read.
        """
        if isinstance(node, ast.FormattedValue):
            value = self.evaluate(node.value)
            if node.conversion != -1 or node.format_spec is not None or not isinstance(value, str | int):
                raise NotConstantError(f"`{format_source(node.value)}` is formatted at run time")
            return str(value)
        return str(self.evaluate(node))

    def _evaluate_lookup(self, node: ast.Subscript) -> Any:
        container, key = self.evaluate(node.value), self.evaluate(node.slice)
        try:
            return container[key]
        except (TypeError, LookupError):
            raise NotConstantError(f"`{format_source(node)}` cannot be evaluated without running the script") from None

    def check_unchanged(self, name: ast.Name) -> None:
        """Check that a list or dictionary is used only in lookups, and in calls that do not change it.

        Raises:
            NotConstantError: the list or dictionary is also used in a way that may change it.
        """
        bindings = self.scopes[name].find(name.id)
        for load in self._loads.get(name.id, ()):
            if self.scopes[load].find(name.id) is bindings and not self._is_only_read(load):
                raise NotConstantError(f"`{name.id}` may be changed on line {load.lineno}")

    def _is_only_read(self, load: ast.Name) -> bool:
        node: ast.AST = load
        parent = self.parents[node]
        while isinstance(parent, ast.Subscript) and parent.value is node:
            if not isinstance(parent.ctx, ast.Load):
                return False
            node, parent = parent, self.parents[parent]
        if isinstance(parent, ast.keyword | ast.Starred):
            parent = self.parents[parent]
        if isinstance(parent, ast.Call) and node is not parent.func:
            return (name := self.get_called_name(parent)) in _READ_ONLY_FUNCTIONS or self._is_read_only(name)
        if isinstance(parent, ast.Dict | ast.BinOp | ast.FormattedValue | ast.Compare | ast.Expr):
            return True
        return node is not load and isinstance(parent, ast.Assign | ast.AnnAssign) and self._reads_constant(node)

    def _reads_constant(self, node: ast.AST) -> bool:
        """Return whether the lookup `node` (`a[key]`) yields a constant, because all entries of `a` are constants."""
        assert isinstance(node, ast.Subscript)
        try:
            container = self.resolve(node.value)
        except NotConstantError:
            return False
        entries = container.values if isinstance(container, ast.Dict) else getattr(container, "elts", [container])
        return all(isinstance(entry, ast.Constant | ast.UnaryOp) for entry in entries)

    def _visit(self, node: ast.AST, scope: Scope, is_conditional: bool) -> None:
        self.nodes.append(node)
        self.scopes[node] = scope
        for name, binding, where in self._find_bindings(node, scope, is_conditional):
            where.bindings.setdefault(name, []).append(binding)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._loads.setdefault(node.id, []).append(node)
        inside, under = scope, is_conditional
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inside, under = Scope(parent=scope, is_class=isinstance(node, ast.ClassDef)), False
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.Try | ast.TryStar | ast.Match | ast.If):
            under = under or not _is_main(node)
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            self._visit(child, inside, under)

    def _find_bindings(self, node: ast.AST, scope: Scope, is_conditional: bool) -> Iterator[tuple[str, Binding, Scope]]:
        def make_binding(name: str, kind: str, value: ast.expr | None = None) -> tuple[str, Binding, Scope]:
            return name, Binding(getattr(node, "lineno", 0), value, kind, is_conditional), scope

        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                parent = self.parents[node]
                is_plain = (isinstance(parent, ast.Assign) and node in parent.targets) or (
                    isinstance(parent, ast.AnnAssign) and parent.value is not None
                )
                if is_plain:
                    yield make_binding(node.id, "assigned", parent.value)  # type: ignore[union-attr]
                elif not isinstance(parent, ast.AnnAssign):
                    yield make_binding(node.id, "not assigned as one value")
            case ast.arg():
                yield make_binding(node.arg, "an argument of a function")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield make_binding(node.name, "defined in the script")
            case ast.Import() | ast.ImportFrom():
                for one in node.names:
                    if one.name == "*":
                        self._stars.append(node.lineno)
                        continue
                    self.imported[one.asname or one.name.partition(".")[0]] = one.name
                    yield make_binding(one.asname or one.name.partition(".")[0], "imported")
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                yield make_binding(name, "not assigned as one value")
            case ast.MatchStar(name=str() as name) | ast.MatchMapping(rest=str() as name):
                yield make_binding(name, "not assigned as one value")
            case ast.Global() | ast.Nonlocal():
                for name in node.names:
                    yield make_binding(name, "assigned in several functions")
                    outer = self.module if isinstance(node, ast.Global) else scope.parent or self.module
                    yield name, Binding(node.lineno, None, "assigned in several functions", True), outer


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_main(node: ast.AST) -> bool:
    """Return whether the node is `if __name__ == "__main__"`, whose body runs when the script is run."""
    test = node.test if isinstance(node, ast.If) else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.ops[0], ast.Eq)
    )


def format_source(node: ast.AST) -> str:
    """Return the source of a node on one line, truncated if it is long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _MAX_SOURCE_LENGTH else text[: _MAX_SOURCE_LENGTH - 1] + "…"
