"""The configuration of on-policy distillation: a teacher scores every token of the student's answers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.cluster import ClusterConfig, DeviceMapping, Devices, RoleDevices
from roll.config.distillation import DistillationBase, DistillationConfig
from roll.config.engines import EngineRequirement
from roll.config.online import OnlineConfig
from roll.config.truncation import find_distillation_truncation_problem

__all__ = ["DistillConfig"]


class DistillDeviceMapping(DeviceMapping):
    """Devices of each role, including the teachers."""

    teacher: Devices | None = option(
        None,
        "Devices of the teachers: a teacher in a trainer has one rank on each device, a teacher in an engine uses "
        "`inference.tensor_parallel` of them; by default those of `actor_train`, or the first ones of `actor_infer`.",
    )


class DistillClusterConfig(ClusterConfig):
    """Placement of the roles."""

    device_mapping: DistillDeviceMapping = option(DistillDeviceMapping(), "Devices of each role.")


class DistillConfig(DistillationBase, OnlineConfig):
    """On-policy distillation (GKD, arXiv 2306.13649): a teacher scores every token of the student's answers."""

    pipeline: Literal["distill"] = option("distill", "Name of the pipeline.")
    distillation: DistillationConfig = option(DistillationConfig(), "Distillation loss.")
    cluster: DistillClusterConfig = option(DistillClusterConfig(), "Placement of the roles.")

    @model_validator(mode="after")
    def _check_teachers(self) -> DistillConfig:
        backends = {teacher.backend for teacher in self.teacher}
        if len(backends) > 1:
            raise ValueError("all teachers must have the same backend, got trainer and engine")
        if self.distillation.mode == "loss" and "engine" in backends:
            raise ValueError(
                "distillation.mode loss is not supported with teacher.backend engine, which returns only the "
                "log-probs of sampled tokens: set teacher.backend to trainer, or distillation.mode to reward"
            )
        if "engine" in backends and self.rollout.temperature != 1.0:
            raise ValueError(
                f"teacher.backend engine requires rollout.temperature 1, got {self.rollout.temperature:g}: set "
                "rollout.temperature to 1, or teacher.backend to trainer"
            )
        needed, width = len(self.teacher), self.inference.width
        if "engine" in backends and self.cluster.type == "ray" and self.roles["teacher"].count != needed:
            found = len(self.roles["teacher"].devices)
            raise ValueError(
                f"{needed} teachers in engines require {needed * width} devices ({width} each), but only {found} are "
                "available: set cluster.device_mapping.teacher"
            )
        problem = find_distillation_truncation_problem(self.distillation, self.rollout)
        if problem:
            raise ValueError(problem)
        if self.distillation.reward_weight and self.rollout.group_size == 1:
            raise ValueError(
                f"distillation.reward_weight {self.distillation.reward_weight:g} requires rollout.group_size >= 2, "
                "got 1: raise group_size, or set reward_weight to 0"
            )
        return self

    @property
    def required_engine_capabilities(self) -> list[EngineRequirement]:
        """Capabilities that the run requires from its engines, including scoring if teachers are in engines."""
        asked = self.teacher[0].backend == "engine"
        needed = EngineRequirement(
            capability="scores_sequences", reason="teacher.backend engine", alternative="set teacher.backend to trainer"
        )
        return [*super().required_engine_capabilities, *([needed] if asked else [])]

    @property
    def trainer_loads_teachers(self) -> bool:
        """True if the student's loss needs the teachers' whole distributions."""
        return self.distillation.mode == "loss"

    def describe_missing_role(self, role: str) -> str:
        """Describe why a role in the device mapping does not exist in this run, and a remedy."""
        if role == "teacher":
            return "with `distillation.mode: loss`, the teachers are in the student's trainer: remove the key"
        return super().describe_missing_role(role)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name, including the teachers if they are a separate role."""
        mapping, roles, width = self.cluster.device_mapping, super().roles, self.inference.width
        if self.trainer_loads_teachers:
            return roles
        if self.teacher[0].backend == "trainer":
            roles["teacher"] = RoleDevices(kind="trainer", devices=mapping.teacher or mapping.actor_train)
        else:
            devices = mapping.teacher or mapping.actor_infer[: len(self.teacher) * width]
            roles["teacher"] = RoleDevices(
                kind="engine", devices=devices, tensor_parallel=width, section="inference", log_name="teacher"
            )
        return roles
