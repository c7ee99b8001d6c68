"""Cases in the form of programming data sets: pairs of inputs and outputs (APPS, TACO, LiveCodeBench).

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
    no_others,
    of_kind,
    plain,
    value_of,
)
from roll.rewards.code.inside import wire
from roll.rewards.code.literals import python_literal

__all__ = ["is_pair", "is_pairs", "pair_case", "pair_cases"]

_NAMES = ("fn_name", "func_name", "function_name")
_KINDS = ("testtype", "type", "test_type")
_OF_STDIN = ("stdin", "stdin_stdout", "stdio", "standard_input")
_OF_CALLS = ("functional", "function_call", "call_based", "function")
_IGNORED = {"explanation", "id", "metadata"}
"""Keys that do not affect the verdict."""


def is_pairs(tests: Mapping[str, Any]) -> bool:
    """Return whether an object holds the inputs and outputs of all cases."""
    return "inputs" in tests or (isinstance(plain(tests.get("input")), list) and not _kind_key(tests))


def is_pair(case: Mapping[str, Any]) -> bool:
    """Return whether an object is one case, written as an input and an output."""
    return "input" in case and "output" in case


def pair_cases(tests: Mapping[str, Any]) -> list[Case]:
    """Return the cases of an object with all inputs and outputs.

    Args:
        tests: `inputs` and `outputs`, or `input` and `output`. If it names a function, the cases call the function;
            else they run the program.

    Raises:
        MalformedTestsError: The cases cannot be used.
    """
    given, wanted = ("inputs", "outputs") if "inputs" in tests else ("input", "output")
    no_others(tests, {given, wanted, *_NAMES, *_IGNORED}, "the tests")
    inputs = of_kind(tests[given], list, given)
    outputs = of_kind(tests.get(wanted), list, wanted)
    if len(inputs) != len(outputs):
        raise MalformedTestsError(f"there are {len(inputs)} inputs and {len(outputs)} outputs: give one per input.")
    name = _name_of(tests)
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if name:
        return [_call(name, given, wanted, f"case {index}") for index, (given, wanted) in pairs]
    return [_program(given, wanted, f"case {index}") for index, (given, wanted) in pairs]


def pair_case(case: Mapping[str, Any], entry: str | None, where: str) -> Case:
    """Return one case.

    Args:
        case: `input`, `output` and the kind of case (`testtype` or `type`); without a kind, the case calls a function
            if it names one.
        entry: The function under test if the case names none; without either, the only function of the answer.
        where: The case's place, for messages.

    Raises:
        MalformedTestsError: The case cannot be used.
    """
    no_others(case, {"input", "output", *_NAMES, *_KINDS, *_IGNORED}, where)
    name, key = _name_of(case), _kind_key(case)
    kind = of_kind(case[key], str, f"{where}: {key}").lower() if key else ("functional" if name else "stdin")
    if kind in _OF_STDIN:
        return _program(case["input"], case["output"], where)
    if kind not in _OF_CALLS:
        known = [*_OF_STDIN, *_OF_CALLS]
        raise MalformedTestsError(
            f"{where}: {key} is '{kind}': give one of {', '.join(known)}.{did_you_mean(kind, known)}"
        )
    given, wanted = plain(case["input"]), plain(case["output"])
    if isinstance(given, str):  # LiveCodeBench: one argument per line
        given = [_written(line, f"{where}: input") for line in given.splitlines() if line.strip()]
        wanted = _written(wanted, f"{where}: output") if isinstance(wanted, str) else wanted
        return _call(name or entry or "", given, wanted, where, match="json")
    return _call(name or entry or "", given, wanted, where)


def _name_of(tests: Mapping[str, Any]) -> str:
    key = next((key for key in _NAMES if tests.get(key)), None)
    return of_kind(tests[key], str, key) if key else ""


def _kind_key(case: Mapping[str, Any]) -> str | None:
    return next((key for key in _KINDS if case.get(key)), None)


def _program(given: Any, wanted: Any, where: str) -> StdinCase:
    """Return a case of input and output; lists are joined as lines."""
    texts = ["\n".join(map(str, each)) if isinstance(each, list) else each for each in map(plain, (given, wanted))]
    texts = [str(each) if isinstance(each, int | float) and not isinstance(each, bool) else each for each in texts]
    stdin, stdout = (of_kind(text, str, f"{where}: input and output") for text in texts)
    return StdinCase(stdin=stdin, stdout=stdout)


def _call(name: str, given: Any, wanted: Any, where: str, match: Any = "wrapped") -> CallCase:
    if name:
        check_expression(name, f"{where}: function name")
    args, _ = value_of(given, f"{where}: input")
    if not isinstance(args, list | tuple):
        raise MalformedTestsError(f"{where}: the input is {short(args)}: give a list with one entry per argument.")
    returns, is_json = value_of(wanted, f"{where}: output")
    return CallCase(
        entry=name,
        args=wire.encode(tuple(map(_with_whole_keys, args))),
        kwargs=wire.encode({}),
        returns=returns,
        match=match if is_json else "exact",
        as_online_judge=True,
    )


def _with_whole_keys(value: Any) -> Any:
    """Return an argument; if all keys of an object are integers, convert them to numbers, which JSON cannot express."""
    if isinstance(value, dict) and value and all(isinstance(key, str) and key.lstrip("-").isdecimal() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _written(text: str, where: str) -> Any:
    """Parse the value in a line, as JSON or as a Python literal."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return python_literal(text)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        raise MalformedTestsError(f"{where}: {short(text)} is neither JSON nor a Python literal.") from None
