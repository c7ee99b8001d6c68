"""Cases as pairs of inputs and outputs, as in APPS, TACO and LiveCodeBench.

{"inputs": […], "outputs": […]}, {"input": […], "output": […]}           with `fn_name`: arguments and results
{"input": …, "output": …, "testtype": "functional" | "stdin"}            one case
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roll.errors import short
from roll.registry import did_you_mean
from roll.rewards.code.cases import (
    CallCase,
    Case,
    MalformedTestsError,
    StdinCase,
    check_expression,
    check_keys,
    check_type,
    parse_value,
    to_plain,
)
from roll.rewards.code.inside import wire
from roll.rewards.code.literals import parse_python_literal

__all__ = ["has_pair_lists", "is_pair", "parse_pair", "parse_pairs"]

_NAMES = ("fn_name", "func_name", "function_name")
_KINDS = ("testtype", "type", "test_type")
_OF_STDIN = ("stdin", "stdin_stdout", "stdio", "standard_input")
_OF_CALLS = ("functional", "function_call", "call_based", "function")
_IGNORED = {"explanation", "id", "metadata"}
"""Keys that do not affect the verdict."""


def has_pair_lists(tests: Mapping[str, Any]) -> bool:
    """Return whether an object lists the inputs and outputs of all cases, as APPS does."""
    return "inputs" in tests or (isinstance(to_plain(tests.get("input")), list) and not _find_kind_key(tests))


def is_pair(case: Mapping[str, Any]) -> bool:
    """Return whether an object is a single case with the keys `input` and `output`."""
    return "input" in case and "output" in case


def parse_pairs(tests: Mapping[str, Any]) -> list[Case]:
    """Parse an object that lists the inputs and outputs of all cases.

    Args:
        tests: The object, with lists under `inputs` and `outputs`, or under `input` and `output`. If it names a
            function, the cases call this function; else they run the program.

    Raises:
        MalformedTestsError: The cases cannot be used.
    """
    given, wanted = ("inputs", "outputs") if "inputs" in tests else ("input", "output")
    check_keys(tests, {given, wanted, *_NAMES, *_IGNORED}, "the tests")
    inputs = check_type(tests[given], list, given)
    outputs = check_type(tests.get(wanted), list, wanted)
    if len(inputs) != len(outputs):
        raise MalformedTestsError(
            f"there are {len(inputs)} inputs but {len(outputs)} outputs: give one output per input."
        )
    name = _get_name(tests)
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name:
        return [_make_call_case(name, given, wanted, f"case {index}") for index, (given, wanted) in pairs]
    return [_make_stdin_case(given, wanted, f"case {index}") for index, (given, wanted) in pairs]


def parse_pair(case: Mapping[str, Any], entry: str | None, where: str) -> Case:
    """Parse one case with an input and an output.

    Args:
        case: `input`, `output` and the kind of case (`testtype` or `type`). Without a kind, the case calls a function
            if it names one, and else passes its input through stdin.
        entry: The function under test if the case names none. If both are missing, the answer must define one function.
        where: The case's location, for messages.

    Raises:
        MalformedTestsError: The case cannot be used.
    """
    check_keys(case, {"input", "output", *_NAMES, *_KINDS, *_IGNORED}, where)
    name, key = _get_name(case), _find_kind_key(case)
    kind = check_type(case[key], str, f"{where}: {key}").lower() if key else ("functional" if name else "stdin")
    if kind in _OF_STDIN:
        return _make_stdin_case(case["input"], case["output"], where)
    if kind not in _OF_CALLS:
        known = [*_OF_STDIN, *_OF_CALLS]
        raise MalformedTestsError(
            f"{where}: {key} is '{kind}': give one of {', '.join(known)}.{did_you_mean(kind, known)}"
        )
    given, wanted = to_plain(case["input"]), to_plain(case["output"])
    if isinstance(given, str):  # LiveCodeBench: one argument per line
        given = [_parse_line(line, f"{where}: input") for line in given.splitlines() if line.strip()]
        wanted = _parse_line(wanted, f"{where}: output") if isinstance(wanted, str) else wanted
        return _make_call_case(name or entry or "", given, wanted, where, match="json")
    return _make_call_case(name or entry or "", given, wanted, where)


def _get_name(tests: Mapping[str, Any]) -> str:
    key = next((key for key in _NAMES if tests.get(key)), None)
    return check_type(tests[key], str, key) if key else ""


def _find_kind_key(case: Mapping[str, Any]) -> str | None:
    return next((key for key in _KINDS if case.get(key)), None)


def _make_stdin_case(given: Any, wanted: Any, where: str) -> StdinCase:
    """Build a case that runs the program on stdin; if input or output is a list, its items become lines."""
    texts = ["\n".join(map(str, each)) if isinstance(each, list) else each for each in map(to_plain, (given, wanted))]
    texts = [str(each) if isinstance(each, int | float) and not isinstance(each, bool) else each for each in texts]
    stdin, stdout = (check_type(text, str, f"{where}: input and output") for text in texts)
    return StdinCase(stdin=stdin, stdout=stdout)


def _make_call_case(name: str, given: Any, wanted: Any, where: str, match: Any = "wrapped") -> CallCase:
    if name:
        check_expression(name, f"{where}: function name")
    args, _ = parse_value(given, f"{where}: input")
    if not isinstance(args, list | tuple):
        raise MalformedTestsError(f"{where}: the input is {short(args)}: give a list with one entry per argument.")
    returns, is_json = parse_value(wanted, f"{where}: output")
    return CallCase(
        entry=name,
        args=wire.encode(tuple(map(_convert_keys, args))),
        kwargs=wire.encode({}),
        returns=returns,
        match=match if is_json else "exact",
        as_online_judge=True,
    )


def _convert_keys(value: Any) -> Any:
    """Convert the keys of an object to integers if all are strings of digits, since JSON keys are always strings."""
    if isinstance(value, dict) and value and all(isinstance(key, str) and key.lstrip("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _parse_line(text: str, where: str) -> Any:
    """Parse the value in a line, as JSON or as a Python literal."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return parse_python_literal(text)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        raise MalformedTestsError(f"{where}: {short(text)} is neither JSON nor a Python literal.") from None
