"""The cases of a task, and how their cells are read; an error names the place of the mistake."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from roll.errors import DataError, short
from roll.registry import did_you_mean
from roll.rewards.code.inside import wire
from roll.rewards.code.literals import python_literal

__all__ = [
    "CallCase",
    "Case",
    "MalformedTestsError",
    "StdinCase",
    "TestCase",
    "check_expression",
    "no_others",
    "of_kind",
    "plain",
    "value_of",
]


class MalformedTestsError(DataError):
    """The tests of a task cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinCase:
    """A case that runs the program with an input; it must print the expected output."""

    stdin: str
    stdout: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """A case that calls a function; it must return the expected value, or raise the expected exception."""

    entry: str
    """An expression in the candidate's code: `add`, `Solution().add`; empty for the only function that the code
    defines."""
    args: Any
    """The arguments as a tree of `wire`."""
    kwargs: Any
    returns: Any = None
    raises: str | None = None
    match: Literal["equal", "json", "wrapped", "exact"] = "equal"
    """The comparison of the value: see `same_value`."""
    as_online_judge: bool = False
    """Whether the function may also be a method of a class `Solution` (for `Solution().f`, a plain function), and the
    code may use the modules that online judges import: see `interpreter.JUDGE_IMPORTS`."""

    @property
    def expected(self) -> bytes:
        """The expected value, encoded as an equal value of the candidate is."""
        return json.dumps(wire.encode(self.returns), separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class TestCase:
    """Python source that tests the candidate by itself."""

    __test__ = False  # pytest must not collect this class
    kind: Literal["assert", "check", "pytest"]
    source: str
    modules: tuple[str, ...] = ()
    """Names under which a pytest file imports the candidate."""


Case: TypeAlias = StdinCase | CallCase | TestCase


def value_of(value: Any, where: str) -> tuple[Any, bool]:
    """Return plain data, and whether it was JSON.

    `{"python": text}` holds a Python literal, for values that JSON cannot express.
    """
    if isinstance(value, Mapping) and set(value) == {"python"}:
        try:
            literal = python_literal(of_kind(value["python"], str, where))
            wire.encode(literal)
        except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
            raise MalformedTestsError(f"{where}: {short(value['python'])} is no Python literal.") from None
        return literal, False
    tree = plain(value)
    try:
        wire.encode(tree)
    except (wire.NotPlainError, RecursionError) as error:
        raise MalformedTestsError(f"{where}: {error}: give plain data.") from None
    return tree, True


def plain(value: Any) -> Any:
    """Convert NumPy arrays and scalars, as rows of Parquet files hold them, to plain data."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else value


def no_others(case: Mapping[str, Any], known: set[str], where: str) -> None:
    """Reject unknown columns; a column that is null does not count, as a table fills missing values with nulls."""
    for key in case:
        if key not in known and case[key] is not None:
            raise MalformedTestsError(f"{where}: unknown key '{key}'.{did_you_mean(str(key), sorted(known))}")


def of_kind(value: Any, kind: Any, where: str) -> Any:
    value = plain(value)
    if not isinstance(value, kind):
        raise MalformedTestsError(f"{where} is {short(value)}: give a {'text' if kind is str else 'list'}.")
    return value


def check_expression(source: str, where: str) -> None:
    """Raise a `MalformedTestsError` if a text is not a Python expression."""
    try:
        ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise MalformedTestsError(f"{where}: {short(source)} is no expression such as `add` or `A().add`.") from None
