"""The configuration of `roll simulate` and `roll plan`: hardware, workload, and a run's `rollout` section."""

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
from roll.config.problems import describe_errors, format_problems
from roll.config.rollout import RolloutConfig
from roll.config.sharing import find_sharing_problem
from roll.config.simulated_placement import SimulatedPlacement
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


class SimulatedEngineConfig(Section):
    """Size, limits and timing of one simulated engine."""

    tensor_parallel: int = option(1, "Number of devices of one engine.", ge=1)
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
        "none", "Format in which a weight sync sends linear weights, like a run's `inference.quantization`."
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


class PaperConfig(Section):
    """A published result that a workload should reproduce."""

    source: str = option(..., "Publication that reports the result.")
    ratio: float = option(..., "Step time of `baseline` divided by step time of `variant`.", gt=0)
    variant: str = option(..., "Name of the faster variant.")
    baseline: str = option(..., "Name of the variant with which it was compared.")
    missing: str = option("", "Constants that the source does not report and that this file assumes.")
    read: bool = option(
        True, "Whether the ratio was read in the source itself; otherwise it comes from notes about the source."
    )


class SimulationConfig(Section):
    """A workload on some hardware, and variants of its scheduling."""

    name: str = option(
        ..., "Name of the simulation; results are written to `<output_dir>/<name>`.", pattern=r"^[\w.-]+$"
    )
    output_dir: str = path_option("runs/simulations", "Parent directory of the results.")
    seed: int = option(0, "First seed.", ge=0)
    num_seeds: int = option(1, "Number of consecutive seeds that are simulated.", ge=1)
    num_steps: int = option(5, "Number of training steps.", ge=1)
    warmup_steps: int = option(0, "Number of first steps that are not measured.", ge=0)
    model: str = path_option(
        ..., "A known model, a YAML file that describes one, a config.json, a model directory or a hub id."
    )
    device: str = path_option(..., "A known device, or a YAML file that describes one.")
    placement: SimulatedPlacement = option(SimulatedPlacement(), "Devices of the roles.")
    engine: SimulatedEngineConfig = option(SimulatedEngineConfig(), "One engine.")
    rollout: RolloutConfig = option(RolloutConfig(), "The section `rollout` of a run.")
    recording: str | None = option(
        None,
        "A run that was trained with `tracking.record_rollouts`, from which prompts, lengths, turns, verdicts and "
        "latencies are taken; `answer_tokens` may then be omitted.",
        examples=["runs/x"],
    )
    prompt_tokens: DistributionConfig = option(FixedDistribution(value=512.0), "Length of prompts.")
    answer_tokens: DistributionConfig = option(..., "Length of answers, or of turns, before any length limit.")
    answer_correlation: float = option(
        0.0,
        "Correlation between the lengths of answers to one prompt (of the underlying normal variables).",
        ge=0,
        le=1,
    )
    answer_growth: float = option(
        1.0,
        "Factor by which the answers of the last step are longer than those of the first step. Lengths grow "
        "exponentially with the number of prompts.",
        gt=0,
    )
    reward: SimulatedRewardConfig = option(SimulatedRewardConfig(), "Scoring.")
    environment: EnvironmentLatencyConfig | None = option(None, "Environment, for rollouts of several turns.")
    training: SimulatedTrainingConfig = option(SimulatedTrainingConfig(), "Updates and weight syncs.")
    failures: list[FailureConfig] = option([], "Failures of engines.")
    variants: dict[str, Any] = option(
        {},
        "Variants by name, each a mapping of dotted keys to new values; every variant is simulated. Without variants "
        "the file itself is simulated.",
    )
    paper: list[PaperConfig] = option([], "Published results to compare with.")

    @model_validator(mode="before")
    @classmethod
    def _fill_answer_tokens(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("recording") is not None:
            return {"answer_tokens": {"type": "fixed", "value": 1.0}, **value}
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> SimulationConfig:
        if self.recording is not None and self.environment is not None:
            raise ValueError(
                "recording and environment cannot be combined, because both define the turns of rollouts: remove one "
                "of the two"
            )
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be less than num_steps {self.num_steps}")
        width, generation = self.engine.tensor_parallel, self.placement.generation
        if generation % width:
            raise ValueError(
                f"placement.generation {generation} must be a multiple of engine.tensor_parallel {width}, the number "
                "of devices of each engine"
            )
        self._check_sharing()
        if self.streams_training:
            self._check_streaming()
        num_engines = generation // width
        for failure in self.failures:
            if failure.engine >= num_engines:
                raise ValueError(f"failures.engine {failure.engine} must be between 0 and {num_engines - 1}")
        for figure in self.paper:
            for variant in (figure.variant, figure.baseline):
                if variant not in self.variants:
                    raise ValueError(f"the variant '{variant}' in paper is not defined in `variants`")
        return self

    def _check_sharing(self) -> None:
        """Raise `ValueError` if the simulated devices cannot be shared by the rule."""
        place, ahead = self.placement, self.rollout.scheduling.async_ratio
        if ahead > 0 and place.is_colocated and place.sharing is None:
            raise ValueError(
                f"rollout.scheduling.async_ratio must be 0 if training and generation share devices, got {ahead:g}: "
                "set placement.training, or placement.sharing to colocated"
            )
        if place.training % self.engine.tensor_parallel and place.overlaps:
            raise ValueError(
                "placement.training must be divisible by engine.tensor_parallel with placement.sharing "
                f"{place.sharing}, got {place.training} and {self.engine.tensor_parallel}"
            )
        problem = find_sharing_problem(
            place.rule,
            async_ratio=ahead,
            num_engines=self.num_engines,
            num_shared=self.num_released_engines,
        )
        if problem:
            raise ValueError(problem.replace("cluster.sharing", "placement.sharing"))

    @property
    def streams_training(self) -> bool:
        """True if the trainer computes gradients of finished groups while other groups are generated."""
        return self.rollout.scheduling.stream_training or self.placement.sharing == "stream_training"

    @property
    def num_released_engines(self) -> int:
        """Number of engines that release their devices to the trainer."""
        return self.placement.training // self.engine.tensor_parallel if self.placement.overlaps else 0

    def _check_streaming(self) -> None:
        """Raise `ValueError` if the simulation cannot train on groups while other groups are generated."""
        key = (
            "placement.sharing" if self.placement.sharing == "stream_training" else "rollout.scheduling.stream_training"
        )
        if self.placement.is_colocated:
            raise ValueError(f"{key} requires separate devices for training: set placement.training")
        if self.training.num_updates > 1:
            raise ValueError(f"{key} requires one update per step: set training.num_updates to 1")
        if self.training.duration is not None:
            raise ValueError(
                f"{key} requires a duration that depends on the number of tokens: remove training.duration"
            )

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return self.placement.generation // self.engine.tensor_parallel

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts that a step trains on."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    def select_variant(self, name: str) -> SimulationConfig:
        """Return a copy of this configuration with the changes of one variant.

        Raises:
            ConfigError: a change is invalid, or the variant does not exist.
        """
        if name not in self.variants:
            raise ConfigError(
                f"unknown variant '{name}' of '{self.name}'. Available variants: {', '.join(self.variants) or 'none'}."
            )
        return self.with_changes(self.variants[name] or {}, f"variant {name}")

    def with_overrides(self, overrides: Sequence[str]) -> SimulationConfig:
        """Return a copy of this configuration with overrides, `key=value`.

        Raises:
            ConfigError: an override is invalid.
        """
        return _validate(Document(name="", tree=self.model_dump(mode="json")), overrides) if overrides else self

    def with_changes(self, changes: Mapping[str, Any], name: str = "") -> SimulationConfig:
        """Return a copy of this configuration without variants and with changed values.

        Args:
            changes: new values by dotted key.
            name: name of the change in messages.

        Raises:
            ConfigError: a change is invalid.
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
            f"'{document.name}' describes a run, not a simulation: use it with `roll train` or `roll check`. After the "
            "training, `roll simulate --calibrate RUN` derives a simulation from the run."
        )
    config = _validate(document, overrides)
    for name in config.variants:
        config.select_variant(name)
    return config


def _validate(document: Document, overrides: Sequence[str] | Mapping[str, Any]) -> SimulationConfig:
    if not isinstance(overrides, Mapping | list | tuple):
        raise ConfigError(f"{document.name} must be a mapping of dotted keys to values, got {overrides!r}.")
    document, lines = apply_overrides(document, overrides, SimulationConfig)
    try:
        config = SimulationConfig.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(format_problems([*lines, *describe_errors(error, document, SimulationConfig)])) from None
    if lines:
        raise ConfigError(format_problems(lines))
    return config
