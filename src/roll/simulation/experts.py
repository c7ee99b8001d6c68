"""Expert parallelism of a trainer: the data that each size of `training.parallel.ep` moves between ranks in one update.

Without expert parallelism, FSDP gathers all experts of a layer for every micro-batch, in the forward and in the
backward pass, and reduces their gradients. With `ep` ranks that divide the experts, each rank gathers only its own
part, or nothing if no other rank has the same experts; instead every token is sent to the experts that its router
chose, and back (an all-to-all each way, arXiv 2006.16668), in the forward pass, its recomputation and the backward
pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.distributions import mean_of
from roll.config.simulation import SimulationConfig
from roll.simulation.costs import DEVICES_PER_MACHINE
from roll.simulation.hardware import Device, Model
from roll.simulation.memory import PROMPT_ROOM, TRAINER_SHARE, TrainerSettings, trainer_bytes

__all__ = ["ExpertParallel", "choose_expert_parallel", "expert_traffic_s"]

GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""
ALL_TO_ALLS = 6
"""Number of all-to-alls: to the experts and back, in the forward pass, its recomputation and the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """One size of `training.parallel.ep`."""

    size: int
    traffic_s: float
    """Duration of one rank's collectives in an update, in seconds, without overlap."""
    memory_bytes: int
    """Memory of a rank."""
    fits: bool
    """Whether the memory of a rank is within the device's memory."""


def expert_traffic_s(
    made_of: Model, on: Device, *, ranks: int, ep: int, tokens_per_rank: float, micro_batches: int
) -> float:
    """Return the seconds of communication that an update of an MoE model takes on every rank.

    Args:
        made_of: the model.
        on: the devices, for their bandwidths.
        ranks: number of the trainer's ranks.
        ep: number of ranks that divide the experts.
        tokens_per_rank: tokens of all micro-batches of the update.
        micro_batches: number of micro-batches of the update on each rank.
    """
    element = made_of.element_bytes
    shared = made_of.num_parameters - made_of.expert_parameters
    own_experts = made_of.expert_parameters / ep if ranks > ep else 0.0
    gathered = micro_batches * (shared + own_experts) * (2 * element + GRADIENT_BYTES) * (ranks > 1)
    moved = ALL_TO_ALLS * tokens_per_rank * made_of.num_layers * made_of.experts_per_token * made_of.hidden_size
    travelled = moved * element * (ep - 1) / ep
    return gathered / _bandwidth(on, ranks) + travelled / _bandwidth(on, ep)


def choose_expert_parallel(
    config: SimulationConfig, made_of: Model, on: Device, trainer: TrainerSettings | None = None
) -> tuple[ExpertParallel, ...]:
    """Compare the sizes of `ep` that divide both the trainer's ranks and the experts.

    Returns:
        All sizes, the best one first: those that fit into memory before the others, then by their traffic. Empty for a
            dense model.
    """
    if not made_of.num_experts:
        return ()
    ranks = config.placement.num_training
    limit = config.rollout.max_new_tokens
    longest = limit + PROMPT_ROOM
    sample = mean_of(config.prompt_tokens) + mean_of(config.answer_tokens, limit)
    tokens = config.rollouts_per_step * sample / ranks
    micro_batches = max(1, math.ceil(tokens / longest))
    found = []
    for size in (s for s in range(1, ranks + 1) if ranks % s == 0 and made_of.num_experts % s == 0):
        memory = sum(trainer_bytes(made_of, on, ranks=ranks, longest=longest, ep=size, trainer=trainer).values())
        traffic_s = expert_traffic_s(
            made_of, on, ranks=ranks, ep=size, tokens_per_rank=tokens, micro_batches=micro_batches
        )
        fits = memory <= TRAINER_SHARE * on.memory_bytes
        found.append(ExpertParallel(size=size, traffic_s=traffic_s, memory_bytes=memory, fits=fits))
    return tuple(sorted(found, key=lambda e: (not e.fits, e.traffic_s, e.size)))


def _bandwidth(on: Device, ranks: int) -> float:
    return on.link_bandwidth if ranks <= DEVICES_PER_MACHINE else on.network_bandwidth
