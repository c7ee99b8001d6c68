"""Prompts with sums such as `3 + 4`, for every pair of operands and every operation, in a seeded order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from roll.config.sources import SumsTask
from roll.data.conversations import build_messages
from roll.errors import DataError
from roll.types import Prompt

__all__ = ["ArithmeticPrompts", "build_arithmetic_prompts"]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
MAX_PAIRS = 5_000_000


class ArithmeticPrompts:
    """A `Source` of arithmetic prompts: one for each pair of operands and each operation.

    Args:
        config: The source's entry in the configuration.
        domain: The source's name.
        pairs: Operand pairs (a, b), each encoded as the integer `(a - min) · span + (b - min)`, where `span` is the
            number of operands.
        seed: Seed for shuffling the prompts.
    """

    def __init__(self, config: SumsTask, domain: str, pairs: NDArray[np.int64], seed: int) -> None:
        self._config, self._domain, self._pairs = config, domain, pairs
        # Only what the prompts depend on: a run resumes when an option that does not change them is new or different.
        settings = config.model_dump_json(exclude={"reward", "weight", "too_long", "device_class"})
        self.fingerprint = f"seed {seed}, {len(pairs)} pairs, {settings}"

    def __len__(self) -> int:
        return len(self._pairs) * len(self._config.operations)

    def __getitem__(self, index: int) -> Prompt:
        config = self._config
        a, operation, b = self.get_terms(index)
        return Prompt(
            uid=f"{self._domain}/{a}{operation}{b}",
            domain=self._domain,
            messages=build_messages(f"What is {a} {operation} {b}?", config.system_prompt, config.prompt_template),
            answer=str(_OPERATIONS[operation](a, b)),
        )

    def get_terms(self, index: int) -> tuple[int, str, int]:
        """Return the first operand, the operator and the second operand of a prompt, such as `(3, "+", 4)`."""
        config = self._config
        pair, which = divmod(index, len(config.operations))
        span = config.max_operand - config.min_operand + 1
        a, b = (config.min_operand + part for part in divmod(int(self._pairs[pair]), span))
        return a, config.operations[which], b


def build_arithmetic_prompts(config: SumsTask, domain: str, seed: int) -> tuple[ArithmeticPrompts, ArithmeticPrompts]:
    """Build training and held-out prompts, which have no ordered pair of operands in common.

    `(3, 4)` is held out for all operations or for none. Operands 1 … 9 make 81 pairs; with `held_out` 0.3, 57 pairs are
    trained on and 24 are held out.

    Raises:
        DataError: `held_out` leaves no pair for training or for evaluation, or there are too many pairs to list.
    """
    num_pairs = (config.max_operand - config.min_operand + 1) ** 2
    if num_pairs > MAX_PAIRS:
        raise DataError(
            f"arithmetic with operands {config.min_operand} … {config.max_operand} has {num_pairs:,} pairs, but at "
            f"most {MAX_PAIRS:,} are supported: lower max_operand."
        )
    num_held_out = round(num_pairs * config.held_out)
    if config.held_out and num_held_out in (0, num_pairs):
        side = "evaluation" if num_held_out == 0 else "training"
        raise DataError(
            f"arithmetic: held_out {config.held_out} leaves no operand pair (of {num_pairs}) for {side}: change "
            "held_out, or use a larger range of operands."
        )
    order = np.random.default_rng([seed, 0xA417]).permutation(num_pairs)
    held_out, training = order[:num_held_out], order[num_held_out:]
    return ArithmeticPrompts(config, domain, training, seed), ArithmeticPrompts(config, domain, held_out, seed)
