"""Engines, rewards, environments and the trainer of a simulation, and failures of its engines."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.distributions import DistributionConfig, FixedDistribution, UniformDistribution
from roll.config.operations import Quantization
from roll.config.widths import EngineWidthsSection, TensorParallel

__all__ = [
    "EnvironmentLatencyConfig",
    "FailureConfig",
    "SimulatedEngineConfig",
    "SimulatedRewardConfig",
    "SimulatedTrainingConfig",
]


class SimulatedEngineConfig(EngineWidthsSection):
    """Size, limits and timing of one simulated engine."""

    tensor_parallel: TensorParallel = option(
        1,
        "Number of devices of one engine. A list such as `[1, 2]`: engines of each of these sizes use the same devices "
        "in turns (`inference.tensor_parallel` of a run).",
    )
    max_num_seqs: int = option(256, "Maximum number of requests that one engine runs at once.", ge=1)
    max_batched_tokens: int = option(8192, "Maximum number of tokens of one step, decoded and prefilled.", ge=2)
    memory_share: float = option(0.85, "Fraction of the device's memory for weights and KV cache.", gt=0, le=1)
    kv_capacity: int | None = option(
        None, "Size of the KV cache; by default all memory that the weights do not use.", unit="tokens", ge=1
    )
    recompute_on_update: bool = option(
        True,
        "Whether requests that are held during a weight update are prefilled again, as in ROLL's vLLM engine.",
    )
    prefix_block: int | None = option(
        None,
        "Number of tokens of a prefix cache block; requests with the same block prefill it only once. Null disables "
        "the prefix cache.",
        ge=1,
    )
    step_s: float | None = option(
        None, "Constant duration of every engine step, instead of the device's roofline model.", unit="seconds", gt=0
    )
    restart_s: float = option(60.0, "Time to replace an engine that died.", unit="seconds", ge=0)

    @model_validator(mode="after")
    def _check_prefill_room(self) -> SimulatedEngineConfig:
        if self.max_num_seqs >= self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs must be < max_batched_tokens to leave space for prefill, got {self.max_num_seqs} and "
                f"{self.max_batched_tokens}: raise max_batched_tokens"
            )
        return self


class SimulatedRewardConfig(Section):
    """Scoring of simulated rollouts: its latency, and the fraction of correct rollouts."""

    latency: DistributionConfig = option(FixedDistribution(value=0.0), "Time to score one rollout, in seconds.")
    num_workers: int | None = option(None, "Maximum number of rollouts that are scored at once; by default all.", ge=1)
    solve_rate: DistributionConfig = option(
        UniformDistribution(low=0.0, high=1.0),
        "Distribution, over prompts, of the probability that a rollout of the prompt is correct.",
    )
    filter_groups: bool = option(
        False, "Whether groups whose rollouts are all correct or all wrong are filtered and replaced."
    )
    max_refills: int = option(
        20, "Maximum number of replacement groups in a step, as a multiple of the batch size.", ge=1
    )


class EnvironmentLatencyConfig(Section):
    """Rollouts of several turns, between which a simulated environment responds after a delay."""

    num_turns: int = option(..., "Number of turns of every rollout.", ge=1)
    latency: DistributionConfig = option(..., "Latency of the environment after each turn, in seconds.")
    observation_tokens: int = option(32, "Length of each observation.", unit="tokens", ge=1)
    lockstep: bool = option(
        False, "Whether every turn of all rollouts of a step waits for the slowest environment (the baseline)."
    )


class SimulatedTrainingConfig(Section):
    """Durations of simulated updates and weight syncs."""

    passes: float = option(
        4.0,
        "Compute per token in forward passes: 3 for an update, and 1 for each pass that computes log-probs.",
        ge=0,
    )
    efficiency: float | None = option(
        None,
        "Fraction of the device's peak FLOPs that training reaches; by default the device's `training_efficiency`.",
        gt=0,
        le=1,
    )
    overhead_s: float = option(1.0, "Constant overhead of every update.", unit="seconds", ge=0)
    num_updates: int = option(
        1,
        "Number N of sequential updates into which a batch is split. Times, samples and tokens are then reported per "
        "update, and the rollouts of the last update are N - 1 policy versions old.",
        ge=1,
    )
    duration: DistributionConfig | None = option(
        None, "Duration of an update in seconds; by default it is computed from FLOPs."
    )
    sync_s: float | None = option(
        None,
        "Duration of a weight sync; by default it is computed from the size of the weights and the interconnect.",
        unit="seconds",
        ge=0,
    )
    quantization: Quantization = option(
        "none", "Format in which a weight sync sends linear weights, like a run's `weight_sync.quantization`."
    )
    share_prefix: bool = option(
        False, "Whether a group's prompt is computed once for all rollouts, as `training.share_prefix` of a run."
    )
    expert_parallel: int = option(
        1,
        "Number of ranks over which the experts are sharded, as `training.parallel.ep` of a run. `roll plan` "
        "chooses it.",
        ge=1,
    )


class FailureConfig(Section):
    """A failure of one engine at a given time."""

    type: Literal["death", "stall", "slowdown"] = option(
        "death",
        "`death`: the engine dies and is replaced. `stall`: the engine pauses. `slowdown`: its steps take longer.",
    )
    engine: int = option(0, "Index of the engine, from 0.", ge=0)
    at_s: float = option(..., "Time of the failure.", unit="seconds", ge=0)
    duration_s: float = option(60.0, "Duration of a stall or a slowdown.", unit="seconds", gt=0)
    factor: float = option(2.0, "Factor on the duration of engine steps during a slowdown.", gt=0)
