"""Sums such as `3 + 4`: every ordered pair of operands and every operation, in a seeded order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from roll.config.data import ArithmeticData
from roll.data.rows import messages_of
from roll.errors import DataError
from roll.types import Prompt

__all__ = ["arithmetic_prompts"]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
MAX_TASKS = 5_000_000


def arithmetic_prompts(config: ArithmeticData, domain: str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. They share no pair of operands: where `(3, 4)` is held out, it is for every operation.

    Raises:
        DataError: there are too few pairs to hold any out, or too many tasks to list.
    """
    operands = range(config.min_operand, config.max_operand + 1)
    num_pairs = len(operands) ** 2
    if num_pairs * len(config.operations) > MAX_TASKS:
        raise DataError(
            f"arithmetic with operands {config.min_operand}..{config.max_operand} has "
            f"{num_pairs * len(config.operations):,} tasks, at most {MAX_TASKS:,} can be listed: lower max_operand."
        )
    pairs = list(itertools.product(operands, operands))
    order = np.random.default_rng([seed, 0xA417]).permutation(num_pairs)
    num_held_out = round(num_pairs * config.held_out)
    if num_held_out == num_pairs:
        raise DataError(
            f"arithmetic: held_out {config.held_out} leaves none of {num_pairs} operand pairs for training."
        )
    held_out = [pairs[i] for i in order[:num_held_out]]
    training = [pairs[i] for i in order[num_held_out:]]
    return _prompts(config, domain, training), _prompts(config, domain, held_out)


def _prompts(config: ArithmeticData, domain: str, pairs: list[tuple[int, int]]) -> list[Prompt]:
    prompts = []
    for (a, b), operation in itertools.product(pairs, config.operations):
        text = f"What is {a} {operation} {b}? Answer with a number."
        prompts.append(
            Prompt(
                uid=f"{domain}/{a}{operation}{b}",
                domain=domain,
                messages=messages_of(text, config.system_prompt, config.prompt_template),
                answer=str(_OPERATIONS[operation](a, b)),
            )
        )
    return prompts
