"""Parse a task's tests from the columns of its row: see docs/code-rewards.md for every form.

    a string, a list, or an object, possibly as JSON ──► Task: language, entry point, setup, cases

Any mistake in the tests raises a `MalformedTestsError` that names the case.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.config.rewards.code import LANGUAGES
from roll.errors import shorten
from roll.registry import did_you_mean
from roll.rewards.code.cases import (
    CallCase,
    Case,
    MalformedTestsError,
    StdinCase,
    TestCase,
    check_expression,
    check_keys,
    check_type,
    parse_value,
)
from roll.rewards.code.names import find_required_names
from roll.rewards.code.pairs import has_pair_lists, is_pair, parse_pair, parse_pairs
from roll.rewards.code.sandbox_programs import wire

__all__ = ["CallCase", "Case", "MalformedTestsError", "StdinCase", "Task", "TestCase", "parse_task"]

MAX_CASES = 1000
MAX_BYTES = 16 * 2**20
"""Maximum number of bytes of all cases of one task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The parsed tests of one prompt."""

    language: str
    entry: str | None
    setup: str
    cases: tuple[Case, ...]
    names: frozenset[str] = frozenset()
    """Names in the answer that the tests use, as far as known."""

    @property
    def reads_input(self) -> bool:
        """True if a case passes input to the program."""
        return any(isinstance(case, StdinCase) and case.stdin.strip() for case in self.cases)


def parse_task(
    tests: Any, *, language: Any = "python", entry: Any = None, setup: Any = "", modules: Sequence[str] = ("solution",)
) -> Task:
    """Parse the tests of a row.

    Args:
        tests: The column with the tests.
        language: The answer's language, unless the tests specify a different language.
        entry: The function under test, if the tests do not name it.
        setup: Python source that runs before the tests.
        modules: Names under which pytest files import the candidate.

    Raises:
        MalformedTestsError: A case is malformed; the message names the case, the mistake, and the remedy.
    """
    tests = _parse_json(tests)
    key = next((key for key in ("cases", "test_cases") if isinstance(tests, Mapping) and key in tests), None)
    if key:
        known = {key, "entry_point", "fn_name", "language", "setup"}
        check_keys(tests, known, "the tests")
        language = tests.get("language") or language
        entry = tests.get("entry_point") or tests.get("fn_name") or entry
        setup, tests = tests.get("setup") or setup, _parse_json(tests[key])
    language = check_type(language, str, "language")
    if language not in LANGUAGES:
        raise MalformedTestsError(f"unknown language '{language}'.{did_you_mean(language, list(LANGUAGES))}")
    entry = check_type(entry, str, "entry_point") or None if entry is not None else None
    setup = "" if setup is None else check_type(setup, str, "setup")
    _parse_source(setup, "setup")
    reader = _CaseReader(entry, setup, tuple(modules))
    cases = tuple(reader.read_cases(tests))
    if not cases:
        raise MalformedTestsError("the tests must have at least one case.")
    if len(cases) > MAX_CASES:
        raise MalformedTestsError(f"at most {MAX_CASES} cases are supported, got {len(cases)}: remove some.")
    size = sum(map(_measure_size, cases)) + len(setup)
    if size > MAX_BYTES:
        raise MalformedTestsError(
            f"the total size of the cases must not exceed {MAX_BYTES:,} bytes, got {size:,}: remove some."
        )
    if language != "python" and (setup or not all(isinstance(case, StdinCase) for case in cases)):
        raise MalformedTestsError(f"tests for {language} must have `stdin` and `stdout`.")
    names = find_required_names(cases, entry, setup) if language == "python" else frozenset[str]()
    return Task(language=language, entry=entry, setup=setup, cases=cases, names=names)


class _CaseReader:
    """Parses the cases in the tests of a row."""

    def __init__(self, entry: str | None, setup: str, modules: tuple[str, ...]) -> None:
        self._entry, self._modules = entry, modules
        self._in_setup = {
            node.name for node in _parse_source(setup, "setup").body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    def read_cases(self, tests: Any) -> list[Case]:
        """Return all cases of a row."""
        if isinstance(tests, str):
            return self._read_source(tests, "the tests")
        if isinstance(tests, Mapping) and has_pair_lists(tests):
            return parse_pairs(tests)
        if isinstance(tests, Mapping):
            return self._read_entry(tests, "the case")
        if not isinstance(tests, list | tuple):
            raise MalformedTestsError(
                f"the tests must be a list of cases, an object, or a string, got {shorten(tests)}."
            )
        cases: list[Case] = []
        for index, each in enumerate(tests):
            location = f"case {index}"
            each = _parse_json(each) if isinstance(each, str) and each.lstrip().startswith("{") else each
            if isinstance(each, str):
                cases += self._read_source(each, location)
            elif isinstance(each, Mapping):
                cases += self._read_entry(each, location)
            else:
                raise MalformedTestsError(
                    f"{location} must be an object, or a string with an assert statement, got {shorten(each)}."
                )
        return cases

    def _read_entry(self, case: Mapping[str, Any], location: str) -> list[Case]:
        case = {key: value for key, value in case.items() if value is not None or key == "returns"}
        keys = set(case)
        for key in ("assert", "check", "pytest"):
            if key in keys:
                check_keys(case, {key, "modules"} if key == "pytest" else {key}, location)
                return self._read_source(check_type(case[key], str, f"{location}: {key}"), location, key)
        if "stdout" in keys:
            check_keys(case, {"stdin", "stdout", "args"}, location)
            args = check_type(case.get("args", []), list, f"{location}: args")
            stdin, stdout = (check_type(case.get(key, ""), str, f"{location}: {key}") for key in ("stdin", "stdout"))
            if any("\0" in str(item) for item in args):
                raise MalformedTestsError(f"{location}: args must not contain null bytes.")
            return [StdinCase(stdin=stdin, stdout=stdout, args=tuple(map(str, args)))]
        if keys & {"returns", "raises"}:
            return [self._read_call(case, location)]
        if is_pair(case):
            return [parse_pair(case, self._entry, location)]
        raise MalformedTestsError(
            f"{location} has the unsupported keys {sorted(map(str, keys))}: expected `stdout` (with `stdin`), "
            "`returns` or `raises` (with `args`), `input` and `output`, `assert`, `check`, or `pytest`."
        )

    def _read_call(self, case: Mapping[str, Any], location: str) -> CallCase:
        check_keys(case, {"call", "args", "kwargs", "returns", "raises"}, location)
        if case.get("returns") is not None and "raises" in case:
            raise MalformedTestsError(f"{location} has both `returns` and `raises`: keep one.")
        args, _ = parse_value(case.get("args", []), f"{location}: args")
        if not isinstance(args, list | tuple):
            raise MalformedTestsError(
                f"{location}: args must be a list with one entry per argument, got {shorten(args)}."
            )
        kwargs, _ = parse_value(case.get("kwargs", {}), f"{location}: kwargs")
        if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
            raise MalformedTestsError(
                f"{location}: kwargs must be an object that maps names to values, got {shorten(kwargs)}."
            )
        returns, is_json = parse_value(case.get("returns"), f"{location}: returns")
        raises = case.get("raises")
        return CallCase(
            entry=self._get_entry(case, location),
            args=wire.encode(tuple(args)),
            kwargs=wire.encode(kwargs),
            returns=returns,
            raises=None if raises is None else check_type(raises, str, f"{location}: raises"),
            match="json" if is_json else "exact",
        )

    def _get_entry(self, case: Mapping[str, Any], location: str) -> str:
        entry = case.get("call", self._entry)
        if entry is None:
            raise MalformedTestsError(f"{location} does not name the function to call: set `call`, or an entry point.")
        check_expression(check_type(entry, str, f"{location}: call"), f"{location}: call")
        return entry

    def _read_source(self, source: str, location: str, kind: str = "") -> list[Case]:
        """Return the cases of Python source: a `check(candidate)`, a pytest file, or asserts (one case each)."""
        tree = _parse_source(source, location)
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if not kind:
            tests = any(name.startswith(("test", "Test")) for name in names)
            kind = "check" if "check" in names else "pytest" if tests else "assert"
        if kind == "check":
            if "check" not in names:
                raise MalformedTestsError(f"{location} does not define a function 'check'.")
            if self._entry is None:
                raise MalformedTestsError(
                    f"{location}: check(candidate) requires an entry point, but the task has none: add one."
                )
            return [TestCase(kind="check", source=source)]
        if kind == "pytest":
            return [TestCase(kind="pytest", source=source, modules=self._modules)]
        if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            raise MalformedTestsError(f"{location} has no assert statement: {source.strip()[:80]!r}.")
        if names or not any(isinstance(node, ast.Assert) for node in tree.body):
            return [TestCase(kind="assert", source=source)]
        return list(self._read_statements(tree))

    def _read_statements(self, tree: ast.Module) -> list[Case]:
        cases: list[Case] = []
        before: list[ast.stmt] = []
        for node in tree.body:
            if not isinstance(node, ast.Assert):
                before.append(node)
                continue
            call = self._convert_comparison(node) if not before else None
            source = ast.unparse(ast.Module(body=[*before, node], type_ignores=[]))
            cases.append(call or TestCase(kind="assert", source=source))
            if before:  # the asserts after it rely on its changes to earlier objects
                before.append(ast.Expr(value=node.test))
        return cases

    def _convert_comparison(self, node: ast.Assert) -> CallCase | None:
        """Convert an assert such as `assert f(1, [2]) == 3` to a call case, which needs no checker; return `None` for
        any other assert.
        """
        test = node.test
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
            return None
        call = test.left
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return None
        name = call.func.id
        # `assert len(f(x)) == 3` does not test a function `len` of the answer.
        if name != self._entry and (
            self._entry is not None
            or hasattr(builtins, name)
            or name in self._in_setup
            or name in sys.stdlib_module_names
        ):
            return None
        try:
            args = tuple(ast.literal_eval(item) for item in call.args)
            kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
            returns = ast.literal_eval(test.comparators[0])
            trees = wire.encode(args), wire.encode(kwargs)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        if len(kwargs) < len(call.keywords):
            return None  # `**more`
        return CallCase(entry=name, args=trees[0], kwargs=trees[1], returns=returns)


def _parse_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MalformedTestsError(
                f"the tests look like JSON, but cannot be parsed ({error}): {value[:60]!r}."
            ) from None
    if value is None or value == "":
        raise MalformedTestsError("the tests are empty: at least one case is required.")
    return value


def _parse_source(source: str, location: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedTestsError(
            f"{location}: the source is not valid Python ({error}): {source.strip()[:80]!r}."
        ) from None


def _measure_size(case: Case) -> int:
    if isinstance(case, StdinCase):
        return len(case.stdin) + len(case.stdout)
    if isinstance(case, CallCase):
        return len(str(case.args)) + len(str(case.kwargs)) + len(str(case.returns))
    return len(case.source)
