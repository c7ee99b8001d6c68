"""The configuration of offline distillation: a teacher judges every token of given answers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import option
from roll.config.distillation import OfflineDistillationConfig, Teachers, check_domains, teacher_by_domain
from roll.config.supervised import SupervisedConfig

__all__ = ["CONFIG", "DistillOfflineConfig"]


class DistillOfflineConfig(SupervisedConfig):
    """Offline distillation (arXiv 1503.02531): a teacher judges every token of given answers."""

    pipeline: Literal["distill_offline"] = option("distill_offline", "Which pipeline runs.")
    teacher: Teachers = option(
        ...,
        "Who teaches: a model, or a list of teachers with the sources (`domains`) that each judges.",
        min_length=1,
        examples=["runs/sft"],
    )
    distillation: OfflineDistillationConfig = option(OfflineDistillationConfig(), "What is learnt from the teacher.")

    @model_validator(mode="after")
    def _taught(self) -> Self:
        check_domains(self.teacher, self.domains)
        if any(teacher.place == "engine" for teacher in self.teacher):
            raise ValueError(
                "teacher.place is engine, which says the log-probs of sampled tokens alone, but here the likeliest "
                "tokens or whole distributions are learnt from: set teacher.place to trainer"
            )
        return self

    @property
    def domains(self) -> list[str]:
        """Of the sources."""
        return [entry.domain or entry.source for entry in self.data]

    @property
    def teacher_of(self) -> dict[str, int]:
        """By domain, which teacher judges its answers."""
        return teacher_by_domain(self.teacher, self.domains)

    @property
    def trainer_holds_teachers(self) -> bool:
        """Whether the student's own loss needs the teachers' whole distributions."""
        return self.distillation.place == "loss"


CONFIG = DistillOfflineConfig
