"""Configuration that all runs have in common, for any pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import model_validator

from roll.config.alarms import AlarmsConfig
from roll.config.base import EXTENSION, NAME, Section, option, path_option
from roll.config.cluster import ClusterConfig, RoleDevices
from roll.config.model import ModelConfig
from roll.config.operations import CheckpointConfig, TrackingConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError

__all__ = ["RunConfig"]

S = TypeVar("S")


class RunConfig(Section):
    """The base of every pipeline's configuration, which adds its own sections."""

    pipeline: str = option(
        ...,
        "Which pipeline runs: a name, `path/to/file.py:Class`, `package.module:Class`, or a name that an installed "
        "package gives (entry points `roll.pipelines`).",
        pattern=EXTENSION,
    )
    name: str = option(
        ...,
        "Name of the run and of its directory.",
        examples=["my-run"],
        pattern=NAME,
    )
    output_dir: str = path_option("runs", "Directory that holds the run directories.", min_length=1)
    seed: int = option(0, "Seed of everything that is random.", ge=0, lt=2**64)
    model: ModelConfig = option(..., "The model to train.", examples=["smollm2-135m-instruct"])
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "When checkpoints are saved, and which are kept.")
    cluster: ClusterConfig = option(ClusterConfig(), "Where roles run.")
    tracking: TrackingConfig = option(TrackingConfig(), "What is recorded.")
    alarms: AlarmsConfig = option(AlarmsConfig(), "When a run warns or stops.")

    @model_validator(mode="after")
    def _mapped_roles_fit(self) -> Self:
        mapping, roles, local = self.cluster.device_mapping, self.roles, self.cluster.type == "local"
        for name, field in type(mapping).model_fields.items():
            devices, role, usual = getattr(mapping, name), roles.get(name), field.get_default(call_default_factory=True)
            if role is None:
                if devices != usual:
                    raise ValueError(f"cluster.device_mapping.{name} is set but {self.missing_role_message(name)}")
            elif devices and len(devices) % role.tensor_parallel:
                raise ValueError(
                    f"cluster.device_mapping.{name} has {len(devices)} devices, which {role.section}.tensor_parallel "
                    f"{role.tensor_parallel} does not divide"
                )
            elif role.kind == "trainer" and (misfit := self._layout_misfit(role)):
                raise ValueError(f"cluster.device_mapping.{name}: {misfit}")
            elif local and devices and (role.count > 1 or (usual is None and devices != [0])):
                what = "trainer ranks" if role.kind == "trainer" else "engines"
                raise ValueError(
                    f"cluster.device_mapping.{name} names devices {devices} for {role.count} {what}, but cluster.type "
                    "local runs it on device 0 alone: set cluster.type=ray, or leave it out"
                )
        if self.cluster.offload_colocated is True and not self.colocated_trainers("actor_infer"):
            raise ValueError(
                "cluster.offload_colocated is true, but no trainer shares a device with engines: set it to auto, or "
                "map a trainer and engines to the same devices (cluster.device_mapping)"
            )
        return self

    @model_validator(mode="after")
    def _replay_is_used(self) -> Self:
        training = getattr(self, "training", None)
        if isinstance(training, TrainingConfig) and training.router_replay != "none" and not hasattr(self, "algorithm"):
            raise ValueError(
                f"training.router_replay is '{training.router_replay}', but the pipeline {self.pipeline} compares no "
                "policy with an older one: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _credit_sees_all_layers(self) -> Self:
        training, credit = getattr(self, "training", None), getattr(getattr(self, "algorithm", None), "credit", None)
        if isinstance(training, TrainingConfig) and training.parallel.pp > 1 and credit and credit.type != "none":
            raise ValueError(
                f"algorithm.credit.type {credit.type} looks at layers that several stages have: set "
                "training.parallel.pp to 1, or credit.type to none"
            )
        return self

    @model_validator(mode="after")
    def _base_in_4_bits(self) -> Self:
        training, lora = getattr(self, "training", None), self.model.lora
        if not isinstance(training, TrainingConfig) or lora is None or lora.base == "as_is":
            return self
        if training.backend != "torch" or training.parallel.tp > 1 or training.parallel.pp > 1:
            raise ValueError(
                f"model.lora.base is '{lora.base}', and weights in 4 bits are not divided: take the back-end torch and "
                "training.parallel.tp and pp 1 (every rank then has all of them), or set it to as_is"
            )
        return self

    @model_validator(mode="after")
    def _in_8_bits(self) -> Self:
        training, lora = getattr(self, "training", None), self.model.lora
        if not isinstance(training, TrainingConfig) or training.fp8 == "none":
            return self
        if self.model.dtype != "bfloat16":
            raise ValueError(
                f"training.fp8 is '{training.fp8}', and model.dtype is '{self.model.dtype}': set the one to none, or "
                "the other to bfloat16"
            )
        if lora is not None and lora.base == "nf4":
            raise ValueError(
                f"training.fp8 is '{training.fp8}', and weights in 4 bits (model.lora.base) are read back to be "
                "multiplied in bfloat16: set the one to none, or the other to as_is"
            )
        return self

    def _layout_misfit(self, role: RoleDevices) -> str | None:
        """Return why the ranks of a role cannot be divided as `training.parallel` requires, and what to do."""
        training = getattr(self, "training", None)
        if not isinstance(training, TrainingConfig) or not (
            misfit := training.parallel.invalid_layout_reason(role.count)
        ):
            return None
        several = "" if self.cluster.type == "ray" else " (and set cluster.type=ray, which runs several)"
        return f"{misfit}: map a multiple of {training.parallel.num_ranks} devices{several}, or change the sizes"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Place a pipeline's own sections after `model`: files and pages then begin with what is trained."""
        names = list(RunConfig.model_fields)
        before, after = names[: names.index("model") + 1], names[names.index("model") + 1 :]
        own = [name for name in cls.model_fields if name not in names]
        own.sort(key=lambda name: name not in ("data", "environments"))
        cls.__pydantic_fields__ = {name: cls.model_fields[name] for name in (*before, *own, *after)}
        cls.model_rebuild(force=True)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name, with their devices; a pipeline adds its own."""
        return {"actor_train": RoleDevices(kind="trainer", devices=self.cluster.device_mapping.actor_train)}

    @property
    def starts_engines(self) -> bool:
        """Whether the run has engines that generate."""
        return any(role.kind == "engine" for role in self.roles.values())

    def colocated_trainers(self, role: str) -> list[str]:
        """Return the trainer roles that share devices with this role; empty if the run does not have the role."""
        roles = self.roles
        devices = set(roles[role].devices) if role in roles else set()
        return [name for name, other in roles.items() if other.kind == "trainer" and devices & set(other.devices)]

    def missing_role_message(self, role: str) -> str:
        """Return why this run has no such role, which the device mapping names, and what to do."""
        return f"the pipeline {self.pipeline} has no such role: remove it (here are {', '.join(self.roles)})"

    def with_model(self, path: str) -> Self:
        """Return the same run with another model, for `roll eval` of a trained model."""
        return self.model_copy(update={"model": self.model.model_copy(update={"path": path})})

    def section(self, name: str, kind: type[S]) -> S:
        """Return a section that only some pipelines have.

        Raises:
            ConfigError: the pipeline has no such section, or the configuration omits it.
        """
        found = getattr(self, name, None)
        if isinstance(found, kind):
            return found
        raise ConfigError(
            f"'{self.name}' runs the pipeline {self.pipeline} and has no section `{name}`, which this needs."
        )

    @property
    def run_dir(self) -> Path:
        """Directory to which this run writes."""
        return Path(self.output_dir) / self.name
