"""Which sequences of a micro-batch are compared with which."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from roll.types import LossInputs

__all__ = ["Pairs", "pair_margins", "pairs_of", "shares_right"]


class Pairs(NamedTuple):
    """[P] int64 each: sequences of this micro-batch, pair after pair."""

    chosen: Tensor
    rejected: Tensor


def pairs_of(inputs: LossInputs) -> Pairs:
    """The pairs of a micro-batch: two sequences of one unit, of which one is preferred.

    Raises:
        ValueError: the batch does not say what is preferred, or a unit is not such a pair.
    """
    units, preferred = inputs.need("unit_ids"), inputs.need("preferred")
    order = torch.argsort(2 * units + (~preferred).to(units.dtype))
    chosen, rejected = order[0::2], order[1::2]
    if len(chosen) == len(rejected):
        right = (units[chosen] == units[rejected]) & preferred[chosen] & ~preferred[rejected]
        if bool(right.all()) and len(units[chosen].unique()) == len(chosen):
            return Pairs(chosen, rejected)
    counts = [(int((units == u).sum()), int(preferred[units == u].sum())) for u in units.unique()]
    size, better = next(c for c in counts if c != (2, 1))
    raise ValueError(
        f"a pair is one preferred and one other answer, each with a token in the loss; a unit has {size} such answers, "
        f"{better} of them preferred: leave it out, or give it both answers"
    )


def shares_right(difference: Tensor) -> Tensor:
    """Return how right each comparison is: 1 above 0, 0 below, and a tie is half right, as a coin's toss would be."""
    return 0.5 * (difference.sign() + 1.0)


def pair_margins(inputs: LossInputs, pairs: Pairs, constant: float = 0.0) -> Tensor | None:
    """[P] by how much the chosen answer should be better: the pair's own target plus a constant; `None`: by nothing."""
    if inputs.targets is not None:
        return inputs.targets[pairs.chosen] + constant
    return inputs.sequence_lengths.new_full(pairs.chosen.shape, constant) if constant else None
