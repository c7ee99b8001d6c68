"""Distillation: the teachers, and what the student learns from them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, model_validator

from roll.config.base import Section, option, path_option
from roll.config.run import RunConfig
from roll.types import Divergence

__all__ = ["DistillationBase", "DistillationConfig", "OfflineDistillationConfig", "TeacherConfig"]

DivergenceName: TypeAlias = Literal["reverse", "forward", "jsd"]


class TeacherConfig(Section):
    """A model with frozen weights. It must have the student's token ids."""

    model: str = path_option(
        ...,
        "A name from the catalogue, a Hugging Face directory, a hub id, or the directory of a run or of one of its "
        "checkpoints.",
        min_length=1,
        examples=["runs/quickstart"],
    )
    domains: list[str] = option([], "Sources whose answers it scores; by default all that no other teacher does.")
    place: Literal["trainer", "engine"] = option(
        "trainer",
        "What computes its log-probs: a frozen trainer, or an engine of the kind that `inference.engine` says. For "
        "`distillation.place` loss, the student's own trainer holds it. For given texts, a trainer.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Teachers: TypeAlias = Annotated[
    list[TeacherConfig],
    BeforeValidator(_as_list, json_schema_input_type=str | TeacherConfig | list[str | TeacherConfig]),
]


class DistillationBase(RunConfig):
    """Common base of every distillation's configuration."""

    teacher: Teachers = option(
        ...,
        "Who teaches: a model, or a list of teachers with the sources (`domains`) that each scores.",
        min_length=1,
        examples=["runs/quickstart"],
    )

    @model_validator(mode="after")
    def _each_source_has_one_teacher(self) -> Self:
        known = self._domains_of_sources()
        named = Counter(domain for teacher in self.teacher for domain in teacher.domains)
        for domain, count in named.items():
            if domain not in known:
                raise ValueError(f"teacher.domains names '{domain}', but the sources are {', '.join(known)}")
            if count > 1:
                raise ValueError(f"teacher.domains: '{domain}' has {count} teachers, but a source has one")
        others = [teacher.model for teacher in self.teacher if not teacher.domains]
        if len(others) > 1:
            raise ValueError(
                f"teachers '{others[0]}' and '{others[1]}' both name no domains: say which sources each one scores"
            )
        if not others and (left := [domain for domain in known if domain not in named]):
            raise ValueError(f"'{left[0]}' has no teacher: add it to a teacher's domains")
        return self

    @property
    def teacher_of(self) -> dict[str, int]:
        """The teacher that scores the answers of each domain."""
        named = {domain: i for i, teacher in enumerate(self.teacher) for domain in teacher.domains}
        rest = next((i for i, teacher in enumerate(self.teacher) if not teacher.domains), -1)
        return {domain: named.get(domain, rest) for domain in self._domains_of_sources()}

    def _domains_of_sources(self) -> list[str]:
        return [entry.domain or entry.source for entry in self.section("data", list)]


class DistillationConfig(Section):
    """How the student learns from its teacher, on its own answers. Both distributions are taken at
    `rollout.temperature`, with which the answers were sampled.
    """

    place: Literal["loss", "reward"] = option(
        "loss",
        "`loss`: the divergence over the whole vocabulary, token by token, exact (GKD). `reward`: the log-ratio at the "
        "sampled tokens alone, as their advantages in a policy gradient.",
    )
    divergence: DivergenceName = option(
        "reverse",
        "`reverse`: KL(student || teacher). `forward`: KL(teacher || student). `jsd`: generalised Jensen-Shannon, "
        "between the two. A reward is always the reverse one.",
    )
    beta: float = option(0.5, "Of `jsd`: near 0 it is like `forward`, near 1 like `reverse`.", gt=0, lt=1)
    limit: float | None = option(None, "With `place` reward: advantages are cut at this size, in nats.", gt=0)
    coefficient: float = option(1.0, "Weight of the divergence next to `reward_weight`.", gt=0)
    reward_weight: float = option(
        0.0,
        "What the advantage of the sources' rewards within a group counts relative to the teacher; 0: only the teacher "
        "teaches.",
        ge=0,
    )
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token counts alike, or every answer."
    )

    @model_validator(mode="after")
    def _used(self) -> DistillationConfig:
        if self.place == "reward" and self.divergence != "reverse":
            raise ValueError(
                f"divergence {self.divergence} needs whole distributions, but place is reward, which sees the sampled "
                "tokens alone: set place to loss, or divergence to reverse"
            )
        if self.place == "loss" and self.limit is not None:
            raise ValueError("limit cuts advantages, which place loss does not have: remove it, or set place to reward")
        return self

    @property
    def form(self) -> Divergence:
        """The divergence."""
        return Divergence(kind=self.divergence, beta=self.beta)


class OfflineDistillationConfig(Section):
    """How the student learns from its teacher, on given texts."""

    place: Literal["precomputed", "loss"] = option(
        "precomputed",
        "`precomputed`: before the first step, the teacher's top-k log-probs are computed and stored on disk; all "
        "other tokens count as one. `loss`: the student's trainer holds the teacher, and the divergence is over the "
        "whole vocabulary.",
    )
    divergence: DivergenceName = option(
        "forward",
        "`forward`: KL(teacher || student). With `place` loss also `reverse`: KL(student || teacher), and `jsd`: "
        "generalised Jensen-Shannon, between the two.",
    )
    beta: float = option(0.5, "Of `jsd`: near 0 it is like `forward`, near 1 like `reverse`.", gt=0, lt=1)
    temperature: float = option(
        1.0, "With `place` loss: of both distributions (Hinton); the gradient is not multiplied by its square.", gt=0
    )
    weight: float = option(
        1.0, "What the teacher counts; the rest to 1 is for the likelihood of the given answers (Hinton).", gt=0, le=1
    )
    top_k: int = option(
        32,
        "With `place` precomputed: number of the teacher's top-k tokens per position. Use 8 or more: with 1 or 2, "
        "float32 saturates.",
        ge=1,
    )
    directory: str | None = path_option(
        None,
        "With `place` precomputed: directory of the log-probs, which several runs can share; by default `teacher` in "
        "the run directory.",
        min_length=1,
    )
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token counts alike, or every answer."
    )

    @model_validator(mode="after")
    def _used(self) -> OfflineDistillationConfig:
        if self.place == "precomputed" and self.divergence != "forward":
            raise ValueError(
                f"divergence {self.divergence} needs whole distributions, but place is precomputed, which has only "
                "the teacher's top-k tokens: set place to loss, or divergence to forward"
            )
        if self.place == "precomputed" and self.temperature != 1.0:
            raise ValueError(
                f"temperature {self.temperature:g} is of whole distributions, but place is precomputed, which has "
                "only the teacher's top-k tokens: set place to loss, or temperature to 1"
            )
        if self.place == "loss" and self.directory is not None:
            raise ValueError("directory is used only with place precomputed: remove it, or set place to precomputed")
        return self

    @property
    def form(self) -> Divergence:
        """The divergence."""
        return Divergence(kind=self.divergence, beta=self.beta, temperature=self.temperature)

    @property
    def method(self) -> str:
        """The objective in a few words."""
        over = f" over the top {self.top_k} tokens" if self.place == "precomputed" else ""
        return f"{self.divergence} divergence{over}"
