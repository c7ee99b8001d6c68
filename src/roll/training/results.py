"""The results of a pass over a rank's micro-batches, which stay on the device until the pass ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from roll.models.transfers import read_results
from roll.training.network.sample_outputs import merge_outputs, split_by_sample
from roll.training.packing.layout import PackedLayout
from roll.types import FloatArray, TrainingBatch

__all__ = ["PassResults"]


@dataclass(kw_only=True, slots=True)
class PassResults:
    """The accumulated results of one rank's micro-batches."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[tuple[PackedLayout, Tensor]] = field(default_factory=list)
    """The log-probs [M] of each micro-batch, on the device."""
    num_tokens: int = 0

    def read(self, batch: TrainingBatch) -> tuple[dict[str, float], dict[str, float], dict[int, FloatArray]]:
        """Wait for the device; return the sums, the maxima, and the log-probs by index of the sample."""
        numbers = read_results([*self.sums.values(), *self.maxima.values(), *(tensor for _, tensor in self.logprobs)])
        metrics = dict(zip(self.sums, map(float, numbers), strict=False))
        maxima = dict(zip(self.maxima, map(float, numbers[len(metrics) :]), strict=False))
        rows = numbers[len(metrics) + len(maxima) :]
        parts = [split_by_sample(row, layout, batch) for (layout, _), row in zip(self.logprobs, rows, strict=True)]
        return metrics, maxima, merge_outputs(parts)
