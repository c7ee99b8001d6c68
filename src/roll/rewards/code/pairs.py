"""Cases as pairs of inputs and outputs, as in APPS, TACO and LiveCodeBench.

{"inputs": […], "outputs": […]}, {"input": […], "output": […]}           with `fn_name`: arguments and results
{"input": …, "output": …, "testtype": "functional" | "stdin"}            one case
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roll.errors import shorten
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
from roll.rewards.code.literals import parse_python_literal
from roll.rewards.code.sandbox_programs import wire

__all__ = ["has_pair_lists", "is_pair", "parse_pair", "parse_pairs"]

_FUNCTION_NAME_KEYS = ("fn_name", "func_name", "function_name")
_TYPE_KEYS = ("testtype", "type", "test_type")
_STDIN_TYPES = ("stdin", "stdin_stdout", "stdio", "standard_input")
_CALL_TYPES = ("functional", "function_call", "call_based", "function")
_IGNORED_KEYS = {"explanation", "id", "metadata"}
"""Keys that do not affect the verdict."""


def has_pair_lists(tests: Mapping[str, Any]) -> bool:
    """Return whether an object lists the inputs and outputs of all cases, as APPS does."""
    return "inputs" in tests or (isinstance(to_plain(tests.get("input")), list) and not _find_type_key(tests))


def is_pair(case: Mapping[str, Any]) -> bool:
    """Return whether an object is a single case with the keys `input` and `output`."""
    return "input" in case and "output" in case


def parse_pairs(tests: Mapping[str, Any]) -> list[Case]:
    """Parse an object that lists the inputs and outputs of all cases.

    Args:
        tests: The object, with lists under `inputs` and `outputs`, or under `input` and `output`. If it names a
            function, the cases call this function; otherwise they run the program.

    Raises:
        MalformedTestsError: The cases cannot be used.
    """
    input_key, output_key = ("inputs", "outputs") if "inputs" in tests else ("input", "output")
    check_keys(tests, {input_key, output_key, *_FUNCTION_NAME_KEYS, *_IGNORED_KEYS}, "the tests")
    inputs = check_type(tests[input_key], list, input_key)
    outputs = check_type(tests.get(output_key), list, output_key)
    if len(inputs) != len(outputs):
        raise MalformedTestsError(
            f"the number of outputs must match the number of inputs, got {len(outputs)} outputs and {len(inputs)} "
            "inputs."
        )
    name = _get_name(tests)
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name:
        return [
            _make_call_case(name, input_value, expected, f"case {index}") for index, (input_value, expected) in pairs
        ]
    return [_make_stdin_case(input_value, expected, f"case {index}") for index, (input_value, expected) in pairs]


def parse_pair(case: Mapping[str, Any], entry: str | None, location: str) -> Case:
    """Parse one case with an input and an output.

    Args:
        case: `input`, `output` and the type of case (`testtype` or `type`). Without a type, the case calls a function
            if it names one, and otherwise passes its input through stdin.
        entry: The function under test if the case names none. If both are missing, the answer must define one function.
        location: The case's location, for messages.

    Raises:
        MalformedTestsError: The case cannot be used.
    """
    check_keys(case, {"input", "output", *_FUNCTION_NAME_KEYS, *_TYPE_KEYS, *_IGNORED_KEYS}, location)
    name, key = _get_name(case), _find_type_key(case)
    kind = check_type(case[key], str, f"{location}: {key}").lower() if key else ("functional" if name else "stdin")
    if kind in _STDIN_TYPES:
        return _make_stdin_case(case["input"], case["output"], location)
    if kind not in _CALL_TYPES:
        known = [*_STDIN_TYPES, *_CALL_TYPES]
        raise MalformedTestsError(
            f"{location}: {key} must be one of {', '.join(known)}, got '{kind}'.{did_you_mean(kind, known)}"
        )
    input_value, expected = to_plain(case["input"]), to_plain(case["output"])
    if isinstance(input_value, str):  # LiveCodeBench: one argument per line
        input_value = [_parse_line(line, f"{location}: input") for line in input_value.splitlines() if line.strip()]
        expected = _parse_line(expected, f"{location}: output") if isinstance(expected, str) else expected
        return _make_call_case(name or entry or "", input_value, expected, location, match="json")
    return _make_call_case(name or entry or "", input_value, expected, location)


def _get_name(tests: Mapping[str, Any]) -> str:
    key = next((key for key in _FUNCTION_NAME_KEYS if tests.get(key)), None)
    return check_type(tests[key], str, key) if key else ""


def _find_type_key(case: Mapping[str, Any]) -> str | None:
    return next((key for key in _TYPE_KEYS if case.get(key)), None)


def _make_stdin_case(input_value: Any, expected: Any, location: str) -> StdinCase:
    """Build a case that runs the program on stdin; if input or output is a list, its items become lines."""
    texts = [
        "\n".join(map(str, each)) if isinstance(each, list) else each for each in map(to_plain, (input_value, expected))
    ]
    texts = [str(each) if isinstance(each, int | float) and not isinstance(each, bool) else each for each in texts]
    stdin, stdout = (check_type(text, str, f"{location}: input and output") for text in texts)
    return StdinCase(stdin=stdin, stdout=stdout)


def _make_call_case(name: str, input_value: Any, expected: Any, location: str, match: Any = "wrapped") -> CallCase:
    if name:
        check_expression(name, f"{location}: function name")
    args, _ = parse_value(input_value, f"{location}: input")
    if not isinstance(args, list | tuple):
        raise MalformedTestsError(
            f"{location}: the input must be a list with one entry per argument, got {shorten(args)}."
        )
    returns, is_json = parse_value(expected, f"{location}: output")
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


def _parse_line(text: str, location: str) -> Any:
    """Parse the value in a line, as JSON or as a Python literal."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return parse_python_literal(text)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        raise MalformedTestsError(f"{location}: expected JSON or a Python literal, got {shorten(text)}.") from None
