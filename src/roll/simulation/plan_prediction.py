"""Predictions of the step times of asynchronous plans, from the simulation of another plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.sharing import SharingRule
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.candidate import Candidate
from roll.simulation.hardware import Device, Model
from roll.simulation.run import build_engine_settings

__all__ = ["Split", "predict_step_s", "predict_train_s"]


@dataclass(frozen=True, slots=True)
class Split:
    """The devices of engines and of the trainer."""

    width: int
    """Number of devices of an engine."""
    generation: int
    training: int
    """Number of devices of the trainer; 0 if it uses those of all engines."""
    sharing: SharingRule | None = None
    """Rule by which the trainer shares devices with some of the engines; `None` if it does not."""

    @classmethod
    def from_config(cls, config: SimulationConfig) -> Split:
        """Return the split of a simulation."""
        place = config.placement
        rule = None if place.sharing is None else place.rule
        return cls(config.engine.width, place.generation, place.training, rule)

    def build_changes(self) -> dict[str, object]:
        """Return the changes to the configuration of a simulation, by dotted key."""
        return {
            "placement.generation": self.generation,
            "placement.training": self.training,
            "placement.sharing": self.sharing,
            "engine.tensor_parallel": self.width,
        }


def predict_step_s(split: Split, async_ratio: float, reference: Candidate, model: Model, device: Device) -> float:
    """Return a lower estimate of the step time of a split, in seconds; 0 if its engines cannot hold the model.

    It is the time of a weight sync, and the maximum of the time to train a step, to generate its tokens with full
    engines, and to generate the longest answer within `async_ratio + 1` steps.

    Args:
        split: The split.
        async_ratio: Number of steps that generation may run ahead.
        reference: A simulated plan of the same workload, which determines the numbers of tokens.
        model: The model.
        device: The device.
    """
    config = reference.config
    changes = {**split.build_changes(), "rollout.scheduling.async_ratio": async_ratio}
    try:
        settings = build_engine_settings(config.with_changes(changes), model, device)
    except ConfigError:
        return 0.0
    costs, limits = settings.costs, settings.limits
    num_engines = split.generation / split.width
    mean = reference.num_tokens / config.rollouts_per_step
    in_flight = config.rollouts_per_step * (async_ratio + 1) / num_engines
    batch = max(1, math.floor(min(limits.max_num_seqs, in_flight, limits.kv_capacity / max(1.0, mean / 2))))
    token_s = costs.compute_decode_s(batch) / batch + costs.context_s * mean / 2
    longest_s = reference.longest * (costs.compute_decode_s(1) + costs.context_s * reference.longest / 2)
    return reference.sync_s + max(
        predict_train_s(split.training, reference),
        reference.num_tokens * token_s / num_engines,
        longest_s / (async_ratio + 1),
    )


def predict_train_s(training: int, reference: Candidate) -> float:
    """Return the time to train a step on `training` devices, in seconds."""
    config = reference.config
    fixed = config.training.overhead_s if config.training.duration is None else reference.train_s
    return fixed + max(0.0, reference.train_s - fixed) * config.placement.num_training_devices / training
