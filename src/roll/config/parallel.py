"""Parallel layout of a trainer's ranks."""

from __future__ import annotations

import math

from pydantic import ValidationInfo, field_validator

from roll.config.base import Section, option

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Parallel sizes of a trainer's ranks. The remaining dimension is `dp_shard` (FSDP2).

    The layout does not change results: gradients, log-probs, checkpoints and exports equal those of a single rank.
    """

    pp: int = option(
        1,
        "Pipeline parallel size: number of stages of consecutive decoder layers. A step should have several times as "
        "many micro-batches as stages to keep the pipeline bubble small.",
        ge=1,
    )
    vpp: int = option(
        1,
        "Number of model chunks per stage (virtual pipeline stages: interleaved 1F1B, arXiv 2104.04473). The pipeline "
        "bubble shrinks by this factor, and the number of messages grows by more than this factor. `pp` must be above "
        "1, and the model must have at least pp x vpp decoder layers.",
        ge=1,
        le=1_000,
    )
    dp_replicate: int = option(
        1,
        "Number of replicas of the weights: each replica is sharded over the ranks of one group, and gradients are "
        "summed over all replicas.",
        ge=1,
    )
    cp: int = option(
        1,
        "Context parallel size: number of ranks over which the tokens of a micro-batch are split, which reduces "
        "the memory of long sequences on each rank. Attention is split over heads instead of tokens (Ulysses, "
        "arXiv 2309.14509), so the number of heads must be divisible by tp x cp.",
        ge=1,
    )
    tp: int = option(
        1,
        "Tensor parallel size: number of ranks over which weight matrices and the vocabulary are sharded. Between "
        "tensor-parallel layers, activations are split by tokens (sequence parallelism).",
        ge=1,
    )

    ep: int = option(
        1,
        "Expert parallel size: number of ranks over which the experts of an MoE model are sharded. Tokens are "
        "sent to the experts that their router chose, and no token is dropped. The ranks of dp_shard x cp x tp "
        "are regrouped for this, so their number and the number of experts must be divisible by ep.",
        ge=1,
    )

    @field_validator("vpp")
    @classmethod
    def _check_vpp(cls, vpp: int, info: ValidationInfo) -> int:
        if vpp > 1 and info.data.get("pp") == 1:
            raise ValueError(
                f"vpp {vpp} requires pp >= 2, got pp 1: set training.parallel.pp to 2 or more, or remove vpp"
            )
        return vpp

    @property
    def num_ranks(self) -> int:
        """Smallest number of ranks of a trainer with this layout; every valid number of ranks is a multiple of it."""
        return self.pp * self.dp_replicate * math.lcm(self.ranks_per_micro_batch, self.ep)

    @property
    def ranks_per_micro_batch(self) -> int:
        """Number of ranks that process one micro-batch together."""
        return self.cp * self.tp

    @property
    def ranks_per_batch_shard(self) -> int:
        """Number of ranks that process the same part of a batch; a batch has (all ranks / this number) parts."""
        return self.pp * self.ranks_per_micro_batch

    def compute_peak_activations(self, micro_batches: int) -> float:
        """Compute the peak activations of the first stage during a step; other stages have fewer.

        The unit is the activations of one micro-batch in all layers of the model; all stages are assumed to have the
        same number of layers. With one model chunk per stage, the first stage stores the activations of its layers for
        as many micro-batches as there are stages. With several chunks, the peak depends on whether the last round of
        micro-batches is full; if it is not, the returned value is an upper bound.
        """
        if self.vpp == 1:
            return 1.0
        beyond = (self.pp - 1) / self.pp
        return 1 + (beyond / self.vpp if micro_batches % self.pp == 0 else beyond)

    def find_layout_problem(self, num_ranks: int) -> str | None:
        """Return the reason why this layout is impossible with `num_ranks` ranks; `None` if it is possible."""
        if num_ranks % self.num_ranks == 0:
            return None
        names = ("pp", "dp_replicate", "cp", "tp", "ep")
        set_sizes = {name: size for name in names if (size := getattr(self, name)) > 1}
        product = " x ".join(f"{name} {size}" for name, size in set_sizes.items())
        if self.ep > 1:
            return (
                f"the number of trainer ranks ({num_ranks}) must be a multiple of {self.num_ranks} with "
                f"training.parallel {product}"
            )
        return f"the number of trainer ranks ({num_ranks}) must be divisible by training.parallel {product}"
