"""The configuration of `roll simulate` and `roll plan`: hardware, workload, and a run's `rollout` section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from roll.config.base import Section, option, path_option
from roll.config.device_classes import ClassName, DeviceClass
from roll.config.distributions import DistributionConfig, FixedDistribution
from roll.config.document import Document, read
from roll.config.overrides import apply_overrides
from roll.config.problems import describe_errors, format_problems
from roll.config.rollout import RolloutConfig
from roll.config.sharing import find_sharing_problem
from roll.config.simulated_domains import SimulatedDomain, choose_domain_classes, find_simulated_classes
from roll.config.simulated_placement import DEVICES_PER_MACHINE, SimulatedPlacement
from roll.config.simulated_roles import (
    EnvironmentLatencyConfig,
    FailureConfig,
    SimulatedEngineConfig,
    SimulatedRewardConfig,
    SimulatedTrainingConfig,
)
from roll.errors import ConfigError

__all__ = ["PaperConfig", "SimulationConfig", "load_simulation"]


class PaperConfig(Section):
    """A published result that a workload should reproduce."""

    source: str = option(..., "Publication that reports the result.")
    ratio: float = option(
        ..., "Step time of `baseline` divided by step time of `variant`; the lowest value of a published range.", gt=0
    )
    max_ratio: float | None = option(None, "Highest value of a published range; by default `ratio`.", gt=0)
    variant: str = option(..., "Name of the faster variant.")
    baseline: str = option(..., "Name of the variant with which it was compared.")
    missing: str = option("", "Constants that the source does not report and that this file assumes.")
    read: bool = option(
        True, "Whether the ratio was read in the source itself; otherwise it comes from notes about the source."
    )

    @property
    def ratios(self) -> str:
        """The published value or range, as text."""
        return f"{self.ratio:g}" if self.max_ratio is None else f"{self.ratio:g} to {self.max_ratio:g}"


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
    device_classes: dict[ClassName, DeviceClass] = option(
        {},
        "Classes of different devices by name, as in `cluster.device_classes` of a run; every device belongs to one. "
        "Engines use the devices from 0, and the trainer uses the last devices. With prices, the cost of a step is "
        "reported.",
        examples=[
            {"h20": {"devices": "0-23", "price_per_hour": 1.9}, "h800": {"devices": "24-31", "price_per_hour": 5.3}}
        ],
    )
    domains: dict[str, SimulatedDomain] = option(
        {},
        "Domains of prompts by name, which replace `prompt_tokens`, `answer_tokens` and `environment` for their "
        "prompts; by default, all prompts have the same distributions.",
        examples=[{"code": {"answer_tokens": {"type": "fixed", "value": 2000}, "device_class": "decode_heavy"}}],
    )
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
        if self.recording is not None and self.domains:
            raise ValueError("recording and domains cannot be combined: a recording has its own prompts; remove one")
        if self.warmup_steps >= self.num_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be less than num_steps {self.num_steps}")
        width, generation = self.engine.widths[-1], self.placement.generation
        if generation % width:
            raise ValueError(
                f"placement.generation {generation} must be a multiple of engine.tensor_parallel {width}, the number "
                "of devices of each engine"
            )
        if (preferred := self.preferred_classes) and self.rollout.scheduling.type == "batch":
            raise ValueError(
                f"domains.{next(iter(preferred))} prefers a device class, but `rollout.scheduling.type: batch` assigns "
                "prompts to engines in turn: set the type to queue, or remove device_class"
            )
        self._check_sharing()
        self._check_widths()
        if self.streams_training:
            self._check_streaming()
        for failure in self.failures:
            if failure.engine >= self.num_engines:
                raise ValueError(f"failures.engine {failure.engine} must be between 0 and {self.num_engines - 1}")
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
        if place.training % self.engine.width and place.shares_devices:
            raise ValueError(
                "placement.training must be divisible by engine.tensor_parallel with placement.sharing "
                f"{place.sharing}, got {place.training} and {self.engine.width}"
            )
        if place.sharing != "auto":
            problem = find_sharing_problem(
                place.rule,
                async_ratio=ahead,
                num_engines=self.num_engines,
                num_shared=self.num_released_engines,
            )
            if problem:
                raise ValueError(problem.replace("cluster.sharing", "placement.sharing"))

    def _check_widths(self) -> None:
        """Raise `ValueError` if engines of several widths cannot be simulated."""
        widths, place = self.engine.widths, self.placement
        if len(widths) == 1:
            return
        key = f"engine.tensor_parallel {list(widths)}"
        if widths[-1] > DEVICES_PER_MACHINE:
            raise ValueError(
                f"{key}: an engine of {widths[-1]} devices would span several machines of {DEVICES_PER_MACHINE} "
                f"devices: use widths up to {DEVICES_PER_MACHINE}"
            )
        if place.overlaps or place.sharing == "auto":
            raise ValueError(
                f"{key} cannot be combined with placement.sharing {place.sharing}: set one width, or set "
                "placement.sharing to colocated or disaggregated"
            )
        if self.device_classes or self.failures:
            other = "device_classes" if self.device_classes else "failures"
            raise ValueError(f"{key} cannot be combined with {other}: set one width, or remove {other}")

    @property
    def streams_training(self) -> bool:
        """True if the trainer computes gradients of finished groups while other groups are generated."""
        return self.rollout.scheduling.stream_training or self.placement.sharing == "stream_training"

    @property
    def num_released_engines(self) -> int:
        """Number of engines that release their devices to the trainer."""
        return self.placement.training // self.engine.width if self.placement.overlaps else 0

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
        """Number of engines at the start."""
        return self.placement.generation // self.engine.width

    @property
    def engine_classes(self) -> list[str]:
        """Device class of every engine; empty without device classes."""
        return self._find_classes()[0]

    @property
    def engine_devices(self) -> list[str]:
        """Name of the device of every engine."""
        names = self.engine_classes
        return [self.device_classes[name].device or name for name in names] or [self.device] * self.num_engines

    @property
    def training_device(self) -> str:
        """Name of the trainer's device."""
        name = self._find_classes()[1]
        return (self.device_classes[name].device or name) if name else self.device

    @property
    def preferred_classes(self) -> dict[str, str]:
        """Preferred device class by domain, or `measured`."""
        return choose_domain_classes(self.domains, self.device_classes, self.engine_classes)

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices per hour; `None` if prices are not known."""
        classes = self.device_classes.values()
        if not classes or any(each.price_per_hour is None for each in classes):
            return None
        return sum(len(each.devices) * (each.price_per_hour or 0.0) for each in classes)

    def _find_classes(self) -> tuple[list[str], str]:
        """Return the class of every engine and of the trainer; empty without device classes."""
        if not self.device_classes:
            return [], ""
        return find_simulated_classes(self.device_classes, self.placement, self.engine.width)

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
