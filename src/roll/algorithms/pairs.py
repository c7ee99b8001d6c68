"""Pairs of chosen and rejected sequences in a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from roll.types import LossInputs

__all__ = ["Pairs", "compute_comparison_accuracy", "find_pairs", "get_pair_margins"]


class Pairs(NamedTuple):
    """Indices of the chosen and the rejected sequence of each pair in the micro-batch, int64 [P] each."""

    chosen: Tensor
    rejected: Tensor


def find_pairs(inputs: LossInputs) -> Pairs:
    """Find the preference pairs of a micro-batch; the two sequences of a pair have the same unit ID.

    Raises:
        ValueError: The batch has no `preferred` column, or a unit does not consist of one preferred and one other
            sequence.
    """
    units, preferred = inputs.require("unit_ids"), inputs.require("preferred")
    order = torch.argsort(2 * units + (~preferred).to(units.dtype))
    chosen, rejected = order[0::2], order[1::2]
    if len(chosen) == len(rejected):
        right = (units[chosen] == units[rejected]) & preferred[chosen] & ~preferred[rejected]
        if bool(right.all()) and len(units[chosen].unique()) == len(chosen):
            return Pairs(chosen, rejected)
    counts = [(int((units == u).sum()), int(preferred[units == u].sum())) for u in units.unique()]
    size, better = next(c for c in counts if c != (2, 1))
    raise ValueError(
        "every preference pair must have one chosen and one rejected answer, each with a loss token, but a pair has "
        f"{size} answers with a loss token, {better} of them chosen: remove it, or complete the pair"
    )


def compute_comparison_accuracy(difference: Tensor) -> Tensor:
    """Compute the accuracy of each comparison: 1 if the difference is positive, 0 if negative, and 0.5 for a tie."""
    return 0.5 * (difference.sign() + 1.0)


def get_pair_margins(inputs: LossInputs, pairs: Pairs, constant: float = 0.0) -> Tensor | None:
    """Return the margin of each pair (`target` plus `constant`), shape [P]; `None` if there are no margins."""
    if inputs.targets is not None:
        return inputs.targets[pairs.chosen] + constant
    return inputs.sequence_lengths.new_full(pairs.chosen.shape, constant) if constant else None
