"""The configuration of on-policy distillation: the student answers, a teacher scores every token."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import option
from roll.config.cluster import ClusterConfig, DeviceMapping, Devices, RoleDevices
from roll.config.distillation import DistillationBase, DistillationConfig
from roll.config.engines import EngineNeed
from roll.config.online import OnlineConfig
from roll.config.truncation import distillation_truncation_problem

__all__ = ["CONFIG", "DistillConfig"]


class DistillDevices(DeviceMapping):
    """Devices of each role, including the teachers."""

    teacher: Devices | None = option(
        None,
        "Devices of the teachers: every teacher in a trainer has a rank on each, those in engines have "
        "`inference.tensor_parallel` of them each; by default those of `actor_train`, or the first of `actor_infer`.",
    )


class DistillCluster(ClusterConfig):
    """Where roles run."""

    device_mapping: DistillDevices = option(DistillDevices(), "Devices of each role.")


class DistillConfig(DistillationBase, OnlineConfig):
    """On-policy distillation (GKD, arXiv 2306.13649): the student answers, a teacher scores every token."""

    pipeline: Literal["distill"] = option("distill", "Which pipeline runs.")
    distillation: DistillationConfig = option(DistillationConfig(), "Distillation loss.")
    cluster: DistillCluster = option(DistillCluster(), "Where roles run.")

    @model_validator(mode="after")
    def _taught(self) -> DistillConfig:
        places = {teacher.place for teacher in self.teacher}
        if len(places) > 1:
            raise ValueError("some teachers are in trainers and others in engines: give all the same place")
        if self.distillation.place == "loss" and "engine" in places:
            raise ValueError(
                "teacher.place is engine, which says the log-probs of sampled tokens alone, but distillation.place "
                "loss compares whole distributions: set teacher.place to trainer, or distillation.place to reward"
            )
        if "engine" in places and self.rollout.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature is {self.rollout.temperature:g}, but engines say a teacher's log-probs at "
                "temperature 1: set it to 1, or teacher.place to trainer"
            )
        needed, width = len(self.teacher), self.inference.tensor_parallel
        if "engine" in places and self.cluster.type == "ray" and self.roles["teacher"].count != needed:
            found = len(self.roles["teacher"].devices)
            raise ValueError(
                f"{needed} teachers in engines need {needed * width} devices, {width} each, but there are {found}: set "
                "cluster.device_mapping.teacher"
            )
        problem = distillation_truncation_problem(self.distillation, self.rollout)
        if problem:
            raise ValueError(problem)
        if self.distillation.reward_weight and self.rollout.group_size == 1:
            raise ValueError(
                f"distillation.reward_weight {self.distillation.reward_weight:g} compares the rewards of a group, but "
                "rollout.group_size is 1: raise it, or set reward_weight to 0"
            )
        return self

    @property
    def engine_needs(self) -> list[EngineNeed]:
        """See `GeneratingConfig.engine_needs`."""
        asked = self.teacher[0].place == "engine"
        needed = EngineNeed(
            capability="scores_sequences", reason="teacher.place engine", instead="set teacher.place to trainer"
        )
        return [*super().engine_needs, *([needed] if asked else [])]

    @property
    def trainer_holds_teachers(self) -> bool:
        """Whether the student's loss needs the teachers' whole distributions."""
        return self.distillation.place == "loss"

    def missing_role_message(self, role: str) -> str:
        """See `RunConfig.missing_role_message`."""
        if role == "teacher":
            return "with distillation.place loss the student's own trainer holds the teachers: remove it"
        return super().missing_role_message(role)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """See `RunConfig.roles`."""
        mapping, roles, width = self.cluster.device_mapping, super().roles, self.inference.tensor_parallel
        if self.trainer_holds_teachers:
            return roles
        if self.teacher[0].place == "trainer":
            roles["teacher"] = RoleDevices(kind="trainer", devices=mapping.teacher or mapping.actor_train)
        else:
            devices = mapping.teacher or mapping.actor_infer[: len(self.teacher) * width]
            roles["teacher"] = RoleDevices(
                kind="engine", devices=devices, tensor_parallel=width, section="inference", log_name="teacher"
            )
        return roles


CONFIG = DistillConfig
