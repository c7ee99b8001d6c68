"""Estimate the communication time of MoE layers in one update, for each size of `training.parallel.ep`.

Without expert parallelism, FSDP gathers all experts of a layer for every micro-batch, in the forward and in the
backward pass, and reduces their gradients. With the experts sharded over `ep` ranks, each rank gathers only its local
experts, or none if no other rank has the same experts. Instead, every token is sent to the experts that its router
chose, and back (an all-to-all each way, arXiv 2006.16668), in the forward pass, its recomputation and the backward
pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.distributions import compute_mean
from roll.config.simulated_placement import DEVICES_PER_MACHINE
from roll.config.simulation import SimulationConfig
from roll.simulation.hardware import Device, Model
from roll.simulation.memory import (
    MAX_TRAINER_MEMORY_FRACTION,
    RESERVED_PROMPT_TOKENS,
    TrainerSettings,
    estimate_trainer_bytes,
)

__all__ = ["ExpertParallel", "choose_expert_parallel", "compute_expert_traffic_s"]

GRADIENT_BYTES = 4
"""Bytes of a gradient element: gradients are reduced in float32."""
NUM_ALL_TO_ALLS = 6
"""Number of all-to-alls: to the experts and back, in the forward pass, its recomputation and the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel:
    """Traffic and memory of a trainer rank with one size of `training.parallel.ep`."""

    size: int
    traffic_s: float
    """Duration of one rank's collectives in an update, in seconds, without overlap."""
    memory_bytes: int
    """Memory of a rank."""
    fits: bool
    """True if the memory of a rank is within the device's memory."""


def compute_expert_traffic_s(
    model: Model, device: Device, *, ranks: int, ep: int, tokens_per_rank: float, micro_batches: int
) -> float:
    """Return the communication time of a rank in an update of an MoE model, in seconds.

    Args:
        model: The model.
        device: The devices, for their bandwidths.
        ranks: Number of the trainer's ranks.
        ep: Number of ranks over which the experts are sharded.
        tokens_per_rank: Tokens of all micro-batches of the update.
        micro_batches: Number of micro-batches of the update on each rank.
    """
    element = model.element_bytes
    shared = model.num_parameters - model.expert_parameters
    own_experts = model.expert_parameters / ep if ranks > ep else 0.0
    gathered = micro_batches * (shared + own_experts) * (2 * element + GRADIENT_BYTES) * (ranks > 1)
    moved = NUM_ALL_TO_ALLS * tokens_per_rank * model.num_layers * model.experts_per_token * model.hidden_size
    travelled = moved * element * (ep - 1) / ep
    return gathered / _select_bandwidth(device, ranks) + travelled / _select_bandwidth(device, ep)


def choose_expert_parallel(
    config: SimulationConfig, model: Model, device: Device, trainer: TrainerSettings | None = None
) -> tuple[ExpertParallel, ...]:
    """Estimate traffic and memory for all sizes of `ep` that divide both the number of ranks and the number of experts.

    Returns:
        The estimates, best size first: sizes that fit into memory come before sizes that do not, and then less traffic
            comes first. Empty for a dense model.
    """
    if not model.num_experts:
        return ()
    ranks = config.placement.num_training_devices
    limit = config.rollout.max_new_tokens
    max_length = limit + RESERVED_PROMPT_TOKENS
    sample = compute_mean(config.prompt_tokens) + compute_mean(config.answer_tokens, limit)
    tokens = config.rollouts_per_step * sample / ranks
    micro_batches = max(1, math.ceil(tokens / max_length))
    found = []
    for size in (s for s in range(1, ranks + 1) if ranks % s == 0 and model.num_experts % s == 0):
        memory = sum(
            estimate_trainer_bytes(model, device, ranks=ranks, max_length=max_length, ep=size, trainer=trainer).values()
        )
        traffic_s = compute_expert_traffic_s(
            model, device, ranks=ranks, ep=size, tokens_per_rank=tokens, micro_batches=micro_batches
        )
        fits = memory <= MAX_TRAINER_MEMORY_FRACTION * device.memory_bytes
        found.append(ExpertParallel(size=size, traffic_s=traffic_s, memory_bytes=memory, fits=fits))
    return tuple(sorted(found, key=lambda e: (not e.fits, e.traffic_s, e.size)))


def _select_bandwidth(device: Device, ranks: int) -> float:
    return device.link_bandwidth if ranks <= DEVICES_PER_MACHINE else device.network_bandwidth
