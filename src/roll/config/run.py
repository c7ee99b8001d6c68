"""The base of every pipeline's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from roll.config.alarms import AlarmsConfig
from roll.config.base import EXTENSION_PATTERN, NAME_PATTERN, Section, option, path_option
from roll.config.cluster import ClusterConfig, RoleDevices
from roll.config.model import ModelConfig
from roll.config.operations import CheckpointConfig, TrackingConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["RunConfig"]

S = TypeVar("S")


class RunConfig(Section):
    """The base of all pipelines' configurations; each pipeline adds its own sections."""

    pipeline: str = option(
        ...,
        "The pipeline: a name, `path/to/file.py:Class`, `package.module:Class`, or a name that an installed package "
        "registers (entry points `roll.pipelines`).",
        pattern=EXTENSION_PATTERN,
    )
    name: str = option(
        ...,
        "Name of the run and of the run directory.",
        examples=["my-run"],
        pattern=NAME_PATTERN,
    )
    output_dir: str = path_option("runs", "Parent directory of the run directories.", min_length=1)
    seed: int = option(0, "Random seed of the run.", ge=0, lt=2**64)
    model: ModelConfig = option(..., "The model to train.", examples=["smollm2-135m-instruct"])
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "When to save checkpoints, and how many to keep.")
    cluster: ClusterConfig = option(ClusterConfig(), "Placement of the roles.")
    tracking: TrackingConfig = option(TrackingConfig(), "Records of the run, and experiment trackers.")
    alarms: AlarmsConfig = option(AlarmsConfig(), "Conditions that warn of a problem or stop the run.")

    @model_validator(mode="after")
    def _check_device_mapping(self) -> Self:
        mapping, roles, local = self.cluster.device_mapping, self.roles, self.cluster.type == "local"
        for name, field in type(mapping).model_fields.items():
            devices, role, usual = getattr(mapping, name), roles.get(name), field.get_default(call_default_factory=True)
            if role is None:
                if devices != usual:
                    raise ValueError(f"cluster.device_mapping.{name} is set, but {self.describe_missing_role(name)}")
            elif role.wider and local:
                raise ValueError(
                    f"{role.section}.tensor_parallel {list(role.widths)} requires several engines, but cluster.type "
                    "local has one: set cluster.type=ray, or set tensor_parallel to one number"
                )
            elif devices and len(devices) % role.widths[-1]:
                raise ValueError(
                    f"cluster.device_mapping.{name} has {len(devices)} devices, but the number must be divisible by "
                    f"{role.section}.tensor_parallel {role.widths[-1]}"
                )
            elif role.kind == "trainer" and (problem := self._find_layout_problem(role)):
                raise ValueError(f"cluster.device_mapping.{name}: {problem}")
            elif local and devices and (role.count > 1 or (usual is None and devices != [0])):
                what = "trainer ranks" if role.kind == "trainer" else "engines"
                raise ValueError(
                    f"cluster.device_mapping.{name} maps devices {devices} to {role.count} {what}, but cluster.type "
                    f"local uses only device 0: set cluster.type=ray, or remove cluster.device_mapping.{name}"
                )
        rule = self.cluster.sharing
        if rule not in ("auto", "disaggregated") and not self.find_colocated_trainers("actor_infer"):
            raise ValueError(
                f"cluster.sharing is '{rule}', but no trainer shares a device with engines: set sharing to auto, or "
                "map a trainer and engines to the same devices (cluster.device_mapping)"
            )
        return self

    @model_validator(mode="after")
    def _check_elastic_engines(self) -> Self:
        if self.cluster.elastic is not None and not self.supports_elastic_engines:
            raise ValueError(
                f"cluster.elastic adds engines that generate rollouts, but the pipeline {self.pipeline} trains without "
                "rollouts: remove cluster.elastic"
            )
        if (problem := self.cluster.find_elastic_problem()) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> Self:
        training = getattr(self, "training", None)
        if isinstance(training, TrainingConfig) and training.router_replay != "none" and not hasattr(self, "algorithm"):
            raise ValueError(
                f"training.router_replay '{training.router_replay}' is not supported with the pipeline "
                f"{self.pipeline}, which has no importance ratio: remove training.router_replay"
            )
        return self

    @model_validator(mode="after")
    def _check_credit_layers(self) -> Self:
        training, credit = getattr(self, "training", None), getattr(getattr(self, "algorithm", None), "credit", None)
        if isinstance(training, TrainingConfig) and training.parallel.pp > 1 and credit and credit.type != "none":
            raise ValueError(
                f"algorithm.credit.type {credit.type} is not supported with pipeline parallelism: set "
                "training.parallel.pp to 1, or credit.type to none"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        training, lora = getattr(self, "training", None), self.model.lora
        if not isinstance(training, TrainingConfig) or lora is None:
            return self
        if lora.use_dora and (training.backend != "torch" or training.parallel.tp > 1):
            raise ValueError(
                "model.lora.use_dora requires whole rows of the weights: use the torch back-end with "
                "training.parallel.tp 1, or set model.lora.use_dora to false"
            )
        is_sharded = training.backend != "torch" or training.parallel.tp > 1 or training.parallel.pp > 1
        if lora.base != "as_is" and is_sharded:
            raise ValueError(
                f"model.lora.base is '{lora.base}', but 4-bit weights cannot be sharded: use the torch back-end with "
                "training.parallel.tp and pp 1 (every rank then holds all weights), or set model.lora.base to as_is"
            )
        return self

    @model_validator(mode="after")
    def _check_fp8(self) -> Self:
        training, lora = getattr(self, "training", None), self.model.lora
        if not isinstance(training, TrainingConfig) or training.fp8 == "none":
            return self
        if self.model.dtype != "bfloat16":
            raise ValueError(
                f"training.fp8 requires model.dtype bfloat16, got '{self.model.dtype}': set training.fp8 to none, or "
                "model.dtype to bfloat16"
            )
        if lora is not None and lora.base == "nf4":
            raise ValueError(
                "training.fp8 is not supported with 4-bit weights (model.lora.base), whose matmuls are in bfloat16: "
                "set training.fp8 to none, or model.lora.base to as_is"
            )
        return self

    def _find_layout_problem(self, role: RoleDevices) -> str | None:
        """Return the reason why `training.parallel` is impossible for a role, and a remedy; `None` if it is
        possible."""
        training = getattr(self, "training", None)
        if not isinstance(training, TrainingConfig) or not (
            problem := training.parallel.find_layout_problem(role.count)
        ):
            return None
        several = "" if self.cluster.type == "ray" else " (and set cluster.type=ray, which runs several)"
        return f"{problem}: map a multiple of {training.parallel.num_ranks} devices{several}, or change the sizes"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Move a pipeline's sections after `model`; files and documentation list the sections in this order."""
        names = list(RunConfig.model_fields)
        before, after = names[: names.index("model") + 1], names[names.index("model") + 1 :]
        own = [name for name in cls.model_fields if name not in names]
        own.sort(key=lambda name: name not in ("data", "environments"))
        cls.__pydantic_fields__ = {name: cls.model_fields[name] for name in (*before, *own, *after)}
        cls.model_rebuild(force=True)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name, with their devices; a pipeline adds its roles."""
        return {"actor_train": RoleDevices(kind="trainer", devices=self.cluster.device_mapping.actor_train)}

    @property
    def supports_elastic_engines(self) -> bool:
        """True if engines may join and leave during the run (`cluster.elastic`)."""
        return False

    @property
    def starts_engines(self) -> bool:
        """True if the run has engines that generate."""
        return any(role.kind == "engine" for role in self.roles.values())

    def find_colocated_trainers(self, role: str) -> list[str]:
        """Find the trainer roles that share devices with a role; empty if the run does not have the role."""
        roles = self.roles
        devices = set(roles[role].devices) if role in roles else set()
        return [name for name, other in roles.items() if other.kind == "trainer" and devices & set(other.devices)]

    def describe_missing_role(self, role: str) -> str:
        """Describe why a role in the device mapping does not exist in this run, and a remedy."""
        return f"the pipeline {self.pipeline} has no such role: remove the key (the roles are {', '.join(self.roles)})"

    def with_model(self, path: str) -> Self:
        """Return the configuration with the model in `path`, for `roll eval` of a trained model."""
        return self.model_copy(update={"model": self.model.model_copy(update={"path": path})})

    def get_section(self, name: str, kind: type[S]) -> S:
        """Return a section that does not exist in every pipeline.

        Raises:
            ConfigError: the pipeline has no such section, or the configuration omits it.
        """
        found = getattr(self, name, None)
        if isinstance(found, kind):
            return found
        raise ConfigError(
            f"'{self.name}' runs the pipeline {self.pipeline}, which has no section `{name}`, but this command "
            "requires it."
        )

    @property
    def run_dir(self) -> Path:
        """Output directory of this run."""
        return Path(self.output_dir) / self.name
