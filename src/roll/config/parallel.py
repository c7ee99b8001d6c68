"""How the ranks of a trainer divide the model and its work."""

from __future__ import annotations

import math

from pydantic import ValidationInfo, field_validator

from roll.config.base import Section, option

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Sizes of the parallel dimensions of a trainer's ranks; the rest is `dp_shard` (FSDP2).

    This changes only where numbers are computed: gradients, log-probs, checkpoints and exports equal those of one rank.
    """

    pp: int = option(
        1,
        "Stages of consecutive decoder layers (pipeline parallel), which micro-batches pass through one after the "
        "other: a step needs several times as many micro-batches as stages.",
        ge=1,
    )
    vpp: int = option(
        1,
        "Parts of the layers that each stage has (virtual pipeline stages: interleaved 1F1B, arXiv 2104.04473). Stages "
        "then wait so many times less for each other, and send more than so many times as many messages. Needs pp, and "
        "pp x vpp decoder layers.",
        ge=1,
        le=1_000,
    )
    dp_replicate: int = option(
        1, "Copies of the weights: each is sharded over the ranks of one group, and gradients are added over all.", ge=1
    )
    cp: int = option(
        1,
        "Ranks that divide the tokens of a micro-batch (context parallel): long sequences need less memory of each. "
        "Attention divides its heads instead (Ulysses, arXiv 2309.14509), so tp x cp divides the number of heads.",
        ge=1,
    )
    tp: int = option(
        1,
        "Ranks that divide weight matrices and vocabulary (tensor parallel), and between them the tokens (sequence "
        "parallel).",
        ge=1,
    )

    ep: int = option(
        1,
        "Ranks that divide the experts of a mixture (expert parallel): tokens travel to the experts that they chose, "
        "and none is dropped. These are no further ranks but those of dp_shard x cp x tp, regrouped: ep divides their "
        "number, and the number of experts.",
        ge=1,
    )

    @field_validator("vpp")
    @classmethod
    def _of_several_stages(cls, vpp: int, info: ValidationInfo) -> int:
        if vpp > 1 and info.data.get("pp") == 1:
            raise ValueError(
                f"vpp {vpp} gives every stage of a pipeline several parts of the layers, and pp 1 is no pipeline: set "
                "training.parallel.pp to 2 or more, or leave vpp out"
            )
        return vpp

    @property
    def num_ranks(self) -> int:
        """The number of a trainer's ranks must be a multiple of this."""
        return self.pp * self.dp_replicate * math.lcm(self.ranks_per_micro_batch, self.ep)

    @property
    def ranks_per_micro_batch(self) -> int:
        """Number of ranks that process one micro-batch together."""
        return self.cp * self.tp

    @property
    def share_ranks(self) -> int:
        """Number of ranks that process the same samples; a batch is split into (number of ranks / this) shares."""
        return self.pp * self.ranks_per_micro_batch

    def in_flight(self, micro_batches: int) -> float:
        """Return the most activations that the first stage holds during a step; other stages hold fewer.

        The unit is the activations of one micro-batch in all layers; stages are assumed to have equally many layers.
        With one part per stage, the first stage holds its share of the layers for as many micro-batches as there are
        stages. With several, it depends on whether the last round of micro-batches is full; if it is not, this is an
        upper bound.
        """
        if self.vpp == 1:
            return 1.0
        beyond = (self.pp - 1) / self.pp
        return 1 + (beyond / self.vpp if micro_batches % self.pp == 0 else beyond)

    def invalid_layout_reason(self, count: int) -> str | None:
        """Return why `count` ranks cannot be divided this way; `None` if they can."""
        if count % self.num_ranks == 0:
            return None
        names = ("pp", "dp_replicate", "cp", "tp", "ep")
        set_sizes = {name: size for name in names if (size := getattr(self, name)) > 1}
        product = " x ".join(f"{name} {size}" for name, size in set_sizes.items())
        ranks = f"{count} trainer rank{'s' * (count > 1)}"
        if self.ep > 1:
            return f"{ranks} cannot be divided by training.parallel's {product} (a multiple of {self.num_ranks} can)"
        return f"{ranks} cannot be divided by training.parallel's {product}"
