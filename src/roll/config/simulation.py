"""Input of `roll simulate` and `roll plan`: hardware and workload, and the run's own `rollout` section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from roll.config.base import Section, option, path_option
from roll.config.distributions import DistributionConfig, FixedDistribution, UniformDistribution
from roll.config.document import Document, read
from roll.config.inference import Quantization
from roll.config.overrides import apply_overrides
from roll.config.problems import describe, message
from roll.config.rollout import RolloutConfig
from roll.errors import ConfigError

__all__ = [
    "EnvironmentLatencyConfig",
    "FailureConfig",
    "PaperConfig",
    "SimulatedEngineConfig",
    "SimulatedPlacement",
    "SimulatedRewardConfig",
    "SimulatedTrainingConfig",
    "SimulationConfig",
    "load_simulation",
]


class SimulatedPlacement(Section):
    """Devices of the roles."""

    generation: int = option(8, "Devices that generate.", ge=1)
    training: int = option(0, "Devices that train; 0: those that generate, in turns.", ge=0)

    @property
    def colocated(self) -> bool:
        """Whether training and generation share devices."""
        return self.training == 0

    @property
    def num_training(self) -> int:
        """Number of devices that train."""
        return self.training or self.generation

    @property
    def num_devices(self) -> int:
        """Number of all devices."""
        return self.generation + self.training


class SimulatedEngineConfig(Section):
    """One engine."""

    tensor_parallel: int = option(1, "Devices of one engine.", ge=1)
    max_num_seqs: int = option(256, "Requests that one engine runs at once.", ge=1)
    max_batched_tokens: int = option(8192, "Tokens of one step, decoded and prefilled.", ge=2)
    memory_share: float = option(0.85, "Share of the device's memory for weights and cache.", gt=0, le=1)
    kv_capacity: int | None = option(None, "Size of the cache; by default what the memory leaves.", unit="tokens", ge=1)
    recompute_on_update: bool = option(
        True, "Requests that were kept while weights changed are prefilled again, as ROLL's vLLM engine does."
    )
    prefix_block: int | None = option(
        None, "Requests share whole blocks of so many prompt tokens, so that they are prefilled once.", ge=1
    )
    step_s: float | None = option(
        None, "Every step takes this long, whatever it does, instead of the device's roofline.", unit="seconds", gt=0
    )
    restart_s: float = option(60.0, "To replace an engine that died.", unit="seconds", ge=0)

    @model_validator(mode="after")
    def _room_to_prefill(self) -> SimulatedEngineConfig:
        if self.max_num_seqs >= self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} leaves no room to prefill in a step of max_batched_tokens "
                f"{self.max_batched_tokens}: raise max_batched_tokens"
            )
        return self


class SimulatedRewardConfig(Section):
    """Scoring."""

    latency: DistributionConfig = option(FixedDistribution(value=0.0), "Of one rollout, in seconds.")
    num_workers: int | None = option(None, "Rollouts that are scored at once; by default all.", ge=1)
    solve_rate: DistributionConfig = option(
        UniformDistribution(low=0.0, high=1.0), "How likely a rollout of a prompt is right, over prompts."
    )
    filter_groups: bool = option(
        False, "Groups whose rollouts are all right or all wrong are filtered, and replaced by others."
    )
    max_refills: int = option(20, "Groups that take others' places in a step, at most, in multiples of a batch.", ge=1)


class EnvironmentLatencyConfig(Section):
    """Rollouts of several turns with an environment in between."""

    num_turns: int = option(..., "Turns of every rollout.", ge=1)
    latency: DistributionConfig = option(..., "Of the environment after each turn, in seconds.")
    observation_tokens: int = option(32, "What it says.", unit="tokens", ge=1)
    lockstep: bool = option(
        False, "Every turn of all rollouts of a step waits for the slowest environment: the baseline."
    )


class SimulatedTrainingConfig(Section):
    """Updates and weight syncs."""

    passes: float = option(
        4.0, "Forward passes' worth of arithmetic per token: an update is 3, log-probs are 1 each.", ge=0
    )
    efficiency: float | None = option(
        None, "Share of the device's peak that training reaches, instead of the device's own.", gt=0, le=1
    )
    overhead_s: float = option(1.0, "Of every update.", unit="seconds", ge=0)
    num_updates: int = option(
        1,
        "Updates that a batch is split into, one after the other under the same rollouts. Times, samples and tokens "
        "are then those of one update, and the last one's rollouts are this many policy versions old, less one.",
        ge=1,
    )
    duration: DistributionConfig | None = option(None, "Of an update in seconds, instead of the arithmetic.")
    sync_s: float | None = option(
        None, "Of a weight sync, instead of what weights and interconnect say.", unit="seconds", ge=0
    )
    quantization: Quantization = option("none", "As `inference.quantization` of a run: what a weight sync sends.")
    share_prefix: bool = option(
        False, "As `training.share_prefix` of a run: a group's prompt is computed once for all its rollouts."
    )
    expert_parallel: int = option(
        1, "As `training.parallel.ep` of a run: ranks that divide the experts. `roll plan` chooses it.", ge=1
    )


class FailureConfig(Section):
    """A failure at a given time."""

    type: Literal["death", "stall"] = option("death", "`death`: the engine is gone. `stall`: it makes a pause.")
    engine: int = option(0, "Which one, from 0.", ge=0)
    at_s: float = option(..., "When.", unit="seconds", ge=0)
    duration_s: float = option(60.0, "Of a stall.", unit="seconds", gt=0)


class PaperConfig(Section):
    """A published figure that a workload should reproduce."""

    source: str = option(..., "Where it was published.")
    ratio: float = option(..., "Step time of `baseline` divided by step time of `variant`.", gt=0)
    variant: str = option(..., "The variant that is faster.")
    baseline: str = option(..., "The variant that it was compared with.")
    missing: str = option("", "Constants that the source does not give, and that this file had to choose.")
    read: bool = option(True, "Whether the source itself was read; if not, what is known of it comes from notes.")


class SimulationConfig(Section):
    """A workload on some hardware, and variants of its scheduling."""

    name: str = option(..., "Of the simulation; its results go to `<output_dir>/<name>`.", pattern=r"^[\w.-]+$")
    output_dir: str = path_option("runs/simulations", "Where results go.")
    seed: int = option(0, "The first seed.", ge=0)
    num_seeds: int = option(1, "So many seeds are simulated, one after the other.", ge=1)
    num_steps: int = option(5, "Training steps.", ge=1)
    warmup_steps: int = option(0, "Steps at the beginning that do not count.", ge=0)
    model: str = path_option(
        ..., "A known model, a YAML file that describes one, a config.json, a model directory or a hub id."
    )
    device: str = path_option(..., "A known device, or a YAML file that describes one.")
    placement: SimulatedPlacement = option(SimulatedPlacement(), "Devices of the roles.")
    engine: SimulatedEngineConfig = option(SimulatedEngineConfig(), "One engine.")
    rollout: RolloutConfig = option(RolloutConfig(), "As in the file of a run.")
    recording: str | None = option(
        None,
        "A run that was trained with `tracking.record_rollouts`: prompts, lengths, turns, verdicts and latencies are "
        "its own, and `answer_tokens` may be left out.",
        examples=["runs/x"],
    )
    prompt_tokens: DistributionConfig = option(FixedDistribution(value=512.0), "Length of prompts.")
    answer_tokens: DistributionConfig = option(..., "Length of answers, or of turns, if nothing cut them off.")
    answer_correlation: float = option(
        0.0, "Between the lengths of answers to one prompt (of the normal variables behind them).", ge=0, le=1
    )
    reward: SimulatedRewardConfig = option(SimulatedRewardConfig(), "Scoring.")
    environment: EnvironmentLatencyConfig | None = option(None, "For rollouts of several turns.")
    training: SimulatedTrainingConfig = option(SimulatedTrainingConfig(), "Updates and weight syncs.")
    failures: list[FailureConfig] = option([], "What goes wrong.")
    variants: dict[str, Any] = option(
        {}, "By name, changes to this file (dotted keys) that are simulated one by one; none: the file as it is."
    )
    paper: list[PaperConfig] = option([], "Published figures.")

    @model_validator(mode="before")
    @classmethod
    def _lengths_are_recorded(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("recording") is not None:
            return {"answer_tokens": {"type": "fixed", "value": 1.0}, **value}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SimulationConfig:
        if self.recording is not None and self.environment is not None:
            raise ValueError("recording has the turns of every rollout, so environment would say it twice: remove one")
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves none of num_steps {self.num_steps} to measure")
        width, generation = self.engine.tensor_parallel, self.placement.generation
        if generation % width:
            raise ValueError(
                f"placement.generation {generation} is no multiple of engine.tensor_parallel {width}: engines have "
                "that many devices each"
            )
        if self.rollout.scheduling.async_ratio > 0 and self.placement.colocated:
            raise ValueError(
                f"rollout.scheduling.async_ratio is {self.rollout.scheduling.async_ratio:g}, but training shares the "
                "devices of generation, so that they cannot overlap: set placement.training"
            )
        num_engines = generation // width
        for failure in self.failures:
            if failure.engine >= num_engines:
                raise ValueError(f"failures name engine {failure.engine}, but there are {num_engines}, from 0")
        for figure in self.paper:
            for variant in (figure.variant, figure.baseline):
                if variant not in self.variants:
                    raise ValueError(f"paper names the variant '{variant}', which variants does not have")
        return self

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return self.placement.generation // self.engine.tensor_parallel

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts that a step trains."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    def variant(self, name: str) -> SimulationConfig:
        """Return this configuration with one variant's changes.

        Raises:
            ConfigError: a change is wrong, or the variant does not exist.
        """
        if name not in self.variants:
            raise ConfigError(f"'{self.name}' has no variant '{name}'. It has: {', '.join(self.variants) or 'none'}.")
        return self.changed(self.variants[name] or {}, f"variant {name}")

    def with_overrides(self, overrides: Sequence[str]) -> SimulationConfig:
        """Return this configuration with `key=value` overrides.

        Raises:
            ConfigError: an override is wrong.
        """
        return _validate(Document(name="", tree=self.model_dump(mode="json")), overrides) if overrides else self

    def changed(self, changes: Mapping[str, Any], name: str = "") -> SimulationConfig:
        """Return this configuration, without variants, with other values.

        Args:
            changes: new values by dotted key.
            name: name of the change in messages.

        Raises:
            ConfigError: a change is wrong.
        """
        tree = self.model_dump(mode="json") | {"variants": {}, "paper": []}
        return _validate(Document(name=name, tree=tree), changes)


def load_simulation(source: str | Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Load a workload, and check that each of its variants is valid.

    Raises:
        ConfigError: the file cannot be read, or the file or a variant is not valid; one line for each problem.
    """
    document = read(source)
    if "data" in document.tree and "device" not in document.tree:
        raise ConfigError(
            f"'{document.name}' describes a run, not a simulation: give it to `roll train` or `roll check`. Once it "
            "was trained, `roll simulate --calibrate RUN` makes a simulation of it."
        )
    config = _validate(document, overrides)
    for name in config.variants:
        config.variant(name)
    return config


def _validate(document: Document, overrides: Sequence[str] | Mapping[str, Any]) -> SimulationConfig:
    if not isinstance(overrides, Mapping | list | tuple):
        raise ConfigError(f"{document.name} is {overrides!r}: write a mapping of dotted keys to values.")
    document, lines = apply_overrides(document, overrides, SimulationConfig)
    try:
        config = SimulationConfig.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(message([*lines, *describe(error, document, SimulationConfig)])) from None
    if lines:
        raise ConfigError(message(lines))
    return config
