"""Find the names in an answer that tests use; they distinguish the program from an example of its use."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence

from roll.rewards.code.cases import CallCase, Case, TestCase

__all__ = ["find_required_names"]

_KNOWN_NAMES = frozenset(vars(builtins)) | sys.stdlib_module_names | {"pytest", "__name__"}


def find_required_names(cases: Sequence[Case], entry: str | None, setup: str) -> frozenset[str]:
    """Return the names that an answer must define: the function under test, or all names that the tests use.

    Args:
        cases: The task's cases.
        entry: The function under test: `add`, `Solution().add`.
        setup: Python source that runs before the tests.
    """
    if entry:
        return frozenset(_find_names_in_expression(entry))
    found: set[str] = set()
    given: set[str] = set()
    imported: set[str] = set()
    for source in {setup, *(case.source for case in cases if isinstance(case, TestCase))}:
        tree = ast.parse(source)
        given |= set(_find_defined_names(tree))
        imported |= set(_find_imported_names(tree, cases))
        found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and source != setup}
    calls = {name for case in cases if isinstance(case, CallCase) for name in _find_names_of_call(case)}
    return frozenset(found - given - _KNOWN_NAMES) | imported | calls


def _find_names_of_call(case: CallCase) -> Iterator[str]:
    yield from _find_names_in_expression(case.entry) if case.entry else ()
    if case.as_online_judge:
        yield "Solution"
        yield from (part for part in [case.entry.removeprefix("Solution().")] if part.isidentifier())


def _find_names_in_expression(text: str) -> Iterator[str]:
    return (node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name))


def _find_defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the tests themselves define: variables, functions, arguments, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _find_imported_names(tree: ast.Module, cases: Sequence[Case]) -> Iterator[str]:
    """Yield the names that a pytest file imports from the answer."""
    modules = {module for case in cases if isinstance(case, TestCase) for module in case.modules}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (alias.name for alias in node.names if alias.name != "*")
