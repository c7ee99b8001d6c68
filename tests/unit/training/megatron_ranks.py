"""Steps of the back-end `megatron` beside those of `torch`, on one rank of several."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_on_cpu import megatron_on_cpu
from training_helpers import branching_batch, make_batch, make_spec, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend

SETTINGS = {"max_tokens_per_micro_batch": 40, "epsilon": 1.0, "learning_rate": 1.0}
"""AdamW's first step then moves each weight by -g / (|g| + 1)."""


def steps_differ(mine: Any, other: Any) -> float:
    """Of two steps with trees of shared prefixes, by what each weight has moved."""
    before = {name: weight.clone() for name, weight in other.weights()}
    for batch in (make_batch(2), branching_batch()):
        for backend in (mine, other):
            assert backend.train_step(batch, PolicyLoss(ratio_level="sequence")).stepped
    moves = [{n: w - before[n] for n, w in backend.weights() if w is not None} for backend in (mine, other)]
    return relative_error(*moves) if moves[0] else 0.0


def divided(rank: int, directory: Path, models: list[Path], sizes: dict[str, int], num_ranks: int) -> None:
    """Several ranks divide every model, and learn what one learns."""
    with megatron_on_cpu():
        from roll.training.megatron.backend import MegatronBackend

        for model in models:
            spec = make_spec(model, backend="megatron", parallel=ParallelConfig(**sizes), **SETTINGS)
            where = {"rank": rank, "world_size": num_ranks, "init_method": f"file://{directory}/meeting"}
            mine = MegatronBackend(dataclasses.replace(spec, **where))
            assert steps_differ(mine, TorchBackend(make_spec(model, **SETTINGS))) <= 1e-5, model.name
