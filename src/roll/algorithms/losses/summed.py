"""A weighted sum of losses on the same tokens, such as a policy loss and a distillation loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from roll.protocols import LossFn
from roll.types import LossInputs, LossOutputs, LossRequirements

__all__ = ["SummedLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedLoss:
    """The weighted sum of several losses, each of which is normalized by the counts of the global batch."""

    parts: tuple[tuple[float, LossFn], ...]
    """Weight and loss of each part; if two parts report the same metric, the first part's value is used."""

    @property
    def needs(self) -> LossRequirements:
        """The combined requirements of all losses.

        Raises:
            ValueError: Two losses require different variants of the same input, such as two divergences.
        """
        return _merge_requirements([loss.needs for _, loss in self.parts])

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss.

        Raises:
            ValueError: A required column is missing.
        """
        weights, found = [weight for weight, _ in self.parts], [loss(inputs) for _, loss in self.parts]
        return LossOutputs(
            loss=torch.stack([w * outputs.loss for w, outputs in zip(weights, found, strict=True)]).sum(),
            metrics={name: value for outputs in reversed(found) for name, value in outputs.metrics.items()},
            maxima={name: value for outputs in reversed(found) for name, value in outputs.maxima.items()},
        )


def _merge_requirements(needs: Iterable[LossRequirements]) -> LossRequirements:
    together: dict[str, Any] = {}
    for own in needs:
        for name in (field.name for field in fields(LossRequirements)):
            value = getattr(own, name)
            if value and together.setdefault(name, value) != value:
                raise ValueError(
                    f"the summed losses require conflicting values of LossRequirements.{name}: {together[name]} and "
                    f"{value}"
                )
    return LossRequirements(**together)
