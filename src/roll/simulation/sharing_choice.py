"""Choose the rule of `sharing: auto` by short simulations of all rules that the placement of a run allows.

    placement: synchronous    colocated, stream_training
               asynchronous   elastic_overlap, partial_overlap, colocated

The first rule of each line is the one that runs use without a simulation. It is kept unless another rule is at least
`MIN_GAIN` times as fast. Large runs are simulated with a fraction of their devices and prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roll.config.sharing import SharingRule
from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate

__all__ = ["SharingChoice", "choose_sharing_rule", "resolve_sharing", "shrink"]

MIN_GAIN = 1.01
"""Minimum speed-up over the rule that runs use without a simulation."""
NUM_REQUESTS = 128
"""Number of requests per step to which a run is scaled down, so that all rules are simulated within seconds."""
MIN_ROLLOUTS, MIN_ENGINES = 32, 4
"""Minimum numbers of rollouts per step and of engines of a run that is scaled down."""
MAX_ROUNDING = 0.1
"""Maximum relative error of a number of engines or prompts that is scaled down."""
SYNC_STEPS = 3
"""Number of simulated steps of a synchronous run."""
ASYNC_WARMUP, ASYNC_STEPS = 1, 3
"""Numbers of warm-up steps, in addition to those by which generation may run ahead, and of further steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingChoice:
    """The chosen rule, and the simulated step times of all rules."""

    rule: SharingRule
    step_s: Mapping[SharingRule, float]
    """Simulated step times of a scaled-down run, in seconds; empty if the placement allows only one rule."""

    def describe(self) -> str:
        """Return the rule and the reason for it, as one line."""
        if not self.step_s:
            return f"{self.rule}, the only rule for this placement"
        times = ", ".join(f"{rule} {seconds:.3g} s" for rule, seconds in self.step_s.items())
        return f"{self.rule}, by the simulated times of a step ({times})"


def list_rules(config: SimulationConfig) -> list[SharingRule]:
    """Return the rules that the placement allows; the first is the one that runs use without a simulation."""
    training, place = config.training, config.placement
    if place.is_colocated:
        return ["colocated"]
    if config.rollout.scheduling.async_ratio > 0:
        return ["elastic_overlap", "partial_overlap", "colocated"]
    can_stream = training.num_updates == 1 and training.duration is None and config.recording is None
    return ["colocated", "stream_training"] if can_stream else ["colocated"]


def choose_sharing_rule(config: SimulationConfig, *, can_stream: bool = True) -> SharingChoice:
    """Simulate the rules that the placement of `config` allows, and return the fastest one.

    The result depends only on the arguments.

    Args:
        config: The run.
        can_stream: Whether the run's algorithm supports `stream_training`.

    Raises:
        UserError: The model does not fit, or the device was measured for another engine.
    """
    rules = [rule for rule in list_rules(config) if can_stream or rule != "stream_training"]
    if len(rules) == 1:
        return SharingChoice(rule=rules[0], step_s={})
    small = shrink(config)
    step_s: dict[SharingRule, float] = {}
    for rule in rules:
        step_s[rule] = simulate(small.with_changes({"placement.sharing": rule}, rule)).step_s
    fastest = min(rules, key=lambda rule: step_s[rule])
    return SharingChoice(rule=fastest if step_s[rules[0]] >= MIN_GAIN * step_s[fastest] else rules[0], step_s=step_s)


def resolve_sharing(config: SimulationConfig) -> tuple[SimulationConfig, str]:
    """Return the configuration with the rule that `placement.sharing: auto` takes, and a line that describes it.

    A configuration with another rule is returned as it is, with an empty line.
    """
    if config.placement.sharing != "auto":
        return config, ""
    choice = choose_sharing_rule(config)
    place = config.placement.model_copy(update={"sharing": choice.rule})
    return config.model_copy(update={"placement": place}), f"placement.sharing auto: {choice.describe()}"


def shrink(config: SimulationConfig) -> SimulationConfig:
    """Return a short, scaled-down version of a run."""
    place, prompts, width = config.placement, config.rollout.prompts_per_step, config.engine.width
    num_shared = place.training // width
    numbers = (config.num_engines - num_shared, num_shared, prompts)
    turns = 1 if config.environment is None else config.environment.num_turns
    largest = min(
        turns * config.rollouts_per_step // NUM_REQUESTS,
        config.rollouts_per_step // MIN_ROLLOUTS,
        config.num_engines // MIN_ENGINES,
    )
    if config.device_classes:
        largest = 1  # the devices of each class are given
    divisor = next((d for d in range(largest, 1, -1) if all(_is_accurate(n, d) for n in numbers)), 1)
    kept, num_shared, prompts = (_divide(number, divisor) for number in numbers)
    ahead = math.ceil(config.rollout.scheduling.async_ratio)
    warmup = ahead + ASYNC_WARMUP if ahead else 0
    return config.with_changes(
        {
            "placement.generation": (kept + num_shared) * width,
            "placement.training": num_shared * width,
            "rollout.prompts_per_step": prompts,
            "num_steps": warmup + (ASYNC_STEPS if ahead else SYNC_STEPS),
            "warmup_steps": warmup,
            "num_seeds": 1,
            "failures": [],
        },
        "scaled-down run",
    )


def _divide(number: int, divisor: int) -> int:
    return max(1, round(number / divisor))


def _is_accurate(number: int, divisor: int) -> bool:
    return abs(_divide(number, divisor) * divisor / number - 1) <= MAX_ROUNDING
