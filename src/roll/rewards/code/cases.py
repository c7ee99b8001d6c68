"""The cases of a task, and functions that read their values; errors name the location of the mistake."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from roll.errors import DataError, shorten
from roll.registry import did_you_mean
from roll.rewards.code.literals import parse_python_literal
from roll.rewards.code.sandbox_programs import wire

__all__ = [
    "CallCase",
    "Case",
    "MalformedTestsError",
    "StdinCase",
    "TestCase",
    "check_expression",
    "check_keys",
    "check_type",
    "parse_value",
    "to_plain",
]


class MalformedTestsError(DataError):
    """The tests of a task cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinCase:
    """A case that runs the program on an input; the program must print the expected output."""

    stdin: str
    stdout: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """A case that calls a function, which must return the expected value or raise the expected exception."""

    entry: str
    """An expression in the candidate's code: `add`, `Solution().add`; empty for the only function that the code
    defines."""
    args: Any
    """The arguments, encoded by `wire`."""
    kwargs: Any
    returns: Any = None
    raises: str | None = None
    match: Literal["equal", "json", "wrapped", "exact"] = "equal"
    """How the value is compared: see `is_same_value`."""
    as_online_judge: bool = False
    """True if the function may also be a method of a class `Solution` (for `Solution().f`, a plain function), and the
    code may use the modules that online judges import: see `interpreter.JUDGE_IMPORTS`."""

    @property
    def expected(self) -> bytes:
        """The expected value, encoded in the same way as the candidate's value."""
        return json.dumps(wire.encode(self.returns), separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class TestCase:
    """A case given as Python source that calls the candidate's code and checks the results."""

    __test__ = False  # pytest must not collect this class
    kind: Literal["assert", "check", "pytest"]
    source: str
    modules: tuple[str, ...] = ()
    """Names under which a pytest file imports the candidate."""


Case: TypeAlias = StdinCase | CallCase | TestCase


def parse_value(value: Any, location: str) -> tuple[Any, bool]:
    """Return a case's value as plain data, and whether it was JSON.

    The value is not JSON if it is an object `{"python": "…"}`, whose string is parsed as a Python literal.
    """
    if isinstance(value, Mapping) and set(value) == {"python"}:
        try:
            literal = parse_python_literal(check_type(value["python"], str, location))
            wire.encode(literal)
        except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
            raise MalformedTestsError(f"{location}: {shorten(value['python'])} is not a Python literal.") from None
        return literal, False
    tree = to_plain(value)
    try:
        wire.encode(tree)
    except (wire.NotSerializableError, RecursionError) as error:
        raise MalformedTestsError(f"{location} cannot be serialized ({error}): use plain data.") from None
    return tree, True


def to_plain(value: Any) -> Any:
    """Convert NumPy arrays and scalars, which occur in rows of Parquet files, to plain data."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else value


def check_keys(case: Mapping[str, Any], known: set[str], location: str) -> None:
    """Raise an error if a case has an unknown key; keys whose value is null are ignored, since tables use null for
    missing values.
    """
    for key in case:
        if key not in known and case[key] is not None:
            raise MalformedTestsError(f"{location}: unknown key '{key}'.{did_you_mean(str(key), sorted(known))}")


def check_type(value: Any, kind: Any, location: str) -> Any:
    """Return a value as plain data; raise a `MalformedTestsError` if its type is not `kind`."""
    value = to_plain(value)
    if not isinstance(value, kind):
        raise MalformedTestsError(f"{location} must be a {'string' if kind is str else 'list'}, got {shorten(value)}.")
    return value


def check_expression(source: str, location: str) -> None:
    """Raise a `MalformedTestsError` if a string is not a Python expression."""
    try:
        ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise MalformedTestsError(
            f"{location}: expected an expression such as `add` or `A().add`, got {shorten(source)}."
        ) from None
