"""The configuration of offline distillation: a teacher scores every token of given answers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import option
from roll.config.distillation import DistillationBase, OfflineDistillationConfig
from roll.config.supervised import SupervisedConfig

__all__ = ["DistillOfflineConfig"]


class DistillOfflineConfig(DistillationBase, SupervisedConfig):
    """Offline distillation (arXiv 1503.02531): a teacher scores every token of given answers."""

    pipeline: Literal["distill_offline"] = option("distill_offline", "Name of the pipeline.")
    distillation: OfflineDistillationConfig = option(OfflineDistillationConfig(), "Distillation loss.")

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        if any(teacher.backend == "engine" for teacher in self.teacher):
            raise ValueError(
                "teacher.backend engine is not supported for offline distillation, which requires top-k log-probs or "
                "full distributions: set teacher.backend to trainer"
            )
        return self

    @property
    def trainer_loads_teachers(self) -> bool:
        """True if the student's loss needs the teachers' whole distributions."""
        return self.distillation.mode == "loss"
