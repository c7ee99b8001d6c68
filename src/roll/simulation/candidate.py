"""Times and bottlenecks of simulated plans."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll.config.simulation import SimulationConfig
from roll.simulation.hardware import Device, Model
from roll.simulation.run import SimulatedRun, build_engine_settings

__all__ = ["Candidate", "build_candidate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A simulated plan."""

    name: str
    config: SimulationConfig
    step_s: float
    wait_s: float
    train_s: float
    sync_s: float
    busy_share: float
    """Fraction of time in which the engines were busy."""
    tail_share: float
    """Time to generate the longest answer alone, as a fraction of the step time."""
    num_preempted: float
    num_tokens: float
    """Number of generated tokens that a step trains on."""
    longest: float
    """Generated tokens of the longest rollout of a step."""
    scoring_share: float = 0.0
    """Scoring time as a fraction of the time that rollouts spend in generation and scoring."""
    divisor: int = 1
    """Divisor of devices and prompts in the simulation; 1 for full size."""

    @property
    def generation_device_s(self) -> float:
        """Time of generation in one step, summed over the generating devices."""
        return self.busy_share * self.step_s * self.config.placement.generation

    @property
    def bottleneck(self) -> str:
        """Bottleneck of a step: a role, such as `training`, or `the longest answers`."""
        if self.sync_s > 0.25 * self.step_s:
            return "weight sync"
        if self.config.rollout.scheduling.async_ratio > 0 and self.wait_s < 0.1 * self.step_s:
            return "training"
        if self.train_s > self.wait_s:
            return "training"
        if self.tail_share > 0.6:
            return "the longest answers"
        if max(self.busy_share, self.tail_share) * self.step_s >= 0.5 * self.wait_s:
            return "generation throughput"
        if self.scoring_share > 0.5:
            return "rewards"
        return "environments" if self.has_turns else "generation throughput"

    @property
    def has_turns(self) -> bool:
        """True if rollouts may wait for an environment."""
        return self.config.environment is not None or self.config.recording is not None


def build_candidate(
    name: str, config: SimulationConfig, run: SimulatedRun, model: Model, device: Device, divisor: int
) -> Candidate:
    """Return the results of a simulated plan; the simulation used 1/`divisor` of the plan's devices and prompts."""

    def mean(field: str) -> float:
        return math.fsum(getattr(step, field) for step in run.steps) / len(run.steps)

    costs = build_engine_settings(config, model, device).costs
    longest = mean("longest")
    alone = longest * (costs.compute_decode_s(1) + costs.context_s * longest / 2)
    return Candidate(
        name=name,
        config=config,
        step_s=run.step_s,
        tail_share=min(1.0, alone / run.step_s),
        **{name: mean(name) for name in ("wait_s", "train_s", "sync_s", "busy_share", "num_preempted", "num_tokens")},
        longest=longest,
        scoring_share=run.recorder.scoring_time_fraction,
        divisor=divisor,
    )
