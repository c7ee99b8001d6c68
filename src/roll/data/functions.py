"""Prompts of small programming tasks: one-line functions, scored by hidden test cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from roll.config.data import FunctionsData
from roll.data.conversations import build_messages
from roll.data.source import PromptList
from roll.errors import DataError
from roll.types import Prompt

__all__ = ["FUNCTION_KINDS", "FunctionKind", "build_functions_prompts"]

DrawArguments: TypeAlias = Callable[[np.random.Generator], tuple[Any, ...]]
WORDS = ("apple", "river", "stone", "cloud", "maple", "tiger", "ocean", "candle", "window", "garden")


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionKind:
    """A type of one-line functions, such as adding a constant; in its fields, `{k}` stands for the constant."""

    name: str
    parameters: str
    meaning: str
    expression: str
    """Expression of a correct solution."""
    solve: Callable[..., Any]
    """The solution as a function of the constant and the arguments."""
    draw: DrawArguments
    """Samples the arguments of a test case."""


def _draw_number(rng: np.random.Generator) -> tuple[Any, ...]:
    return (int(rng.integers(-50, 100)),)


def _draw_two_numbers(rng: np.random.Generator) -> tuple[Any, ...]:
    return (*_draw_number(rng), *_draw_number(rng))


def _draw_list(rng: np.random.Generator) -> tuple[Any, ...]:
    return ([int(item) for item in rng.integers(-20, 40, size=int(rng.integers(1, 7)))],)


def _draw_word(rng: np.random.Generator) -> tuple[Any, ...]:
    return (WORDS[int(rng.integers(len(WORDS)))] * int(rng.integers(1, 4)),)


def _build_kind(
    name: str, parameters: str, meaning: str, expression: str, solve: Callable[..., Any], draw: DrawArguments
) -> FunctionKind:
    return FunctionKind(
        name=name, parameters=parameters, meaning=meaning, expression=expression, solve=solve, draw=draw
    )


FUNCTION_KINDS = (
    _build_kind("add_{k}", "x", "x plus {k}", "x + {k}", lambda k, x: x + k, _draw_number),
    _build_kind("subtract_{k}", "x", "x minus {k}", "x - {k}", lambda k, x: x - k, _draw_number),
    _build_kind("multiply_by_{k}", "x", "x times {k}", "x * {k}", lambda k, x: x * k, _draw_number),
    _build_kind("remainder_{k}", "x", "the remainder of x divided by {k}", "x % {k}", lambda k, x: x % k, _draw_number),
    _build_kind(
        "square_plus_{k}", "x", "the square of x, plus {k}", "x * x + {k}", lambda k, x: x * x + k, _draw_number
    ),
    _build_kind(
        "above_{k}", "x", "True if x is greater than {k}, else False", "x > {k}", lambda k, x: x > k, _draw_number
    ),
    _build_kind(
        "sum_plus_{k}", "a, b", "the sum of a, b and {k}", "a + b + {k}", lambda k, a, b: a + b + k, _draw_two_numbers
    ),
    _build_kind(
        "larger_plus_{k}",
        "a, b",
        "the larger of a and b, plus {k}",
        "max(a, b) + {k}",
        lambda k, a, b: max(a, b) + k,
        _draw_two_numbers,
    ),
    _build_kind(
        "total_times_{k}",
        "numbers",
        "the sum of the list numbers, times {k}",
        "sum(numbers) * {k}",
        lambda k, numbers: sum(numbers) * k,
        _draw_list,
    ),
    _build_kind(
        "count_above_{k}",
        "numbers",
        "how many items of the list numbers are greater than {k}",
        "sum(n > {k} for n in numbers)",
        lambda k, numbers: sum(n > k for n in numbers),
        _draw_list,
    ),
    _build_kind(
        "add_{k}_to_each",
        "numbers",
        "a list with {k} added to each item of the list numbers",
        "[n + {k} for n in numbers]",
        lambda k, numbers: [n + k for n in numbers],
        _draw_list,
    ),
    _build_kind(
        "first_{k}",
        "text",
        "the first {k} characters of the string text",
        "text[:{k}]",
        lambda k, text: text[:k],
        _draw_word,
    ),
    _build_kind(
        "repeat_{k}", "text", "the string text repeated {k} times", "text * {k}", lambda k, text: text * k, _draw_word
    ),
    _build_kind(
        "longer_than_{k}",
        "text",
        "True if the string text has more than {k} characters, else False",
        "len(text) > {k}",
        lambda k, text: len(text) > k,
        _draw_word,
    ),
)


def build_functions_prompts(config: FunctionsData, domain: str, seed: int) -> tuple[PromptList, PromptList]:
    """Build training and held-out prompts, which have no pair of function type and constant in common.

    Raises:
        DataError: `held_out` leaves no prompt for training or for evaluation.
    """
    pairs = [(kind, k) for kind in FUNCTION_KINDS for k in range(2, 2 + config.num_constants)]
    order = np.random.default_rng([seed, 0xF0C5]).permutation(len(pairs))
    num_held_out = round(len(pairs) * config.held_out)
    if config.held_out and num_held_out in (0, len(pairs)):
        side = "evaluation" if num_held_out == 0 else "training"
        raise DataError(
            f"functions: held_out {config.held_out} leaves no task (of {len(pairs)}) for {side}: change held_out."
        )
    prompts = [_build_prompt(config, domain, *pairs[int(index)], seed) for index in order]
    return PromptList(prompts[num_held_out:]), PromptList(prompts[:num_held_out])


def _build_prompt(config: FunctionsData, domain: str, kind: FunctionKind, k: int, seed: int) -> Prompt:
    name, meaning, expression = (text.format(k=k) for text in (kind.name, kind.meaning, kind.expression))
    rng = np.random.default_rng([seed, FUNCTION_KINDS.index(kind), k])
    cases = [{"args": list(args), "returns": kind.solve(k, *args)} for args in _draw_cases(kind, rng, config.num_cases)]
    text = f"Write a Python function {name}({kind.parameters}) that returns {meaning}."
    return Prompt(
        uid=f"{domain}/{name}",
        domain=domain,
        messages=build_messages(text, config.system_prompt, config.prompt_template),
        answer=f"```python\ndef {name}({kind.parameters}):\n    return {expression}\n```",
        metadata={"tests": cases, "entry_point": name},
    )


def _draw_cases(kind: FunctionKind, rng: np.random.Generator, num_cases: int) -> list[tuple[Any, ...]]:
    return [kind.draw(rng) for _ in range(num_cases)]
