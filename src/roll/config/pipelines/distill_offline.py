"""The configuration of offline distillation: a teacher scores every token of given answers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import option
from roll.config.distillation import DistillationBase, OfflineDistillationConfig
from roll.config.supervised import SupervisedConfig

__all__ = ["CONFIG", "DistillOfflineConfig"]


class DistillOfflineConfig(DistillationBase, SupervisedConfig):
    """Offline distillation (arXiv 1503.02531): a teacher scores every token of given answers."""

    pipeline: Literal["distill_offline"] = option("distill_offline", "Which pipeline runs.")
    distillation: OfflineDistillationConfig = option(OfflineDistillationConfig(), "Distillation loss.")

    @model_validator(mode="after")
    def _taught(self) -> Self:
        if any(teacher.place == "engine" for teacher in self.teacher):
            raise ValueError(
                "teacher.place is engine, which says the log-probs of sampled tokens alone, but here the top-k "
                "tokens or whole distributions are needed: set teacher.place to trainer"
            )
        return self

    @property
    def trainer_holds_teachers(self) -> bool:
        """Whether the student's loss needs the teachers' whole distributions."""
        return self.distillation.place == "loss"


CONFIG = DistillOfflineConfig
