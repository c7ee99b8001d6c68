"""How the ranks of a trainer divide the model and its work."""

from __future__ import annotations

import math

from roll.config.base import Section, option

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Sizes of the dimensions of a trainer's ranks; what they leave over is `dp_shard` (FSDP2).

    Changes where numbers are computed, never what they are: gradients, log-probs, checkpoints and exports are those of
    one rank.
    """

    pp: int = option(
        1,
        "Stages of consecutive decoder layers (pipeline parallel), which micro-batches pass through one after the "
        "other: a step needs several times as many micro-batches as stages.",
        ge=1,
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

    @property
    def num_ranks(self) -> int:
        """The number of a trainer's ranks is a multiple of this."""
        return math.prod((self.pp, self.dp_replicate, self.cp, self.tp))

    @property
    def row_ranks(self) -> int:
        """Ranks that go through one micro-batch together."""
        return self.cp * self.tp

    def misfit(self, count: int) -> str | None:
        """Why `count` ranks cannot be divided like this; `None` if they can."""
        if count % self.num_ranks == 0:
            return None
        set_sizes = {n: s for n in ("pp", "dp_replicate", "cp", "tp") if (s := getattr(self, n)) > 1}
        product = " x ".join(f"{name} {size}" for name, size in set_sizes.items())
        return f"{count} trainer rank{'s' * (count > 1)} cannot be divided by training.parallel's {product}"
