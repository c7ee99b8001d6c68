"""Distillation: the teachers, and the student's loss."""

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
    """A model with frozen weights, whose tokenizer must use the same token ids as the student's tokenizer."""

    model: str = path_option(
        ...,
        "A name from the catalog, a Hugging Face directory, a hub id, or the directory of a run "
        "or of one of its checkpoints.",
        min_length=1,
        examples=["runs/quickstart"],
    )
    domains: list[str] = option(
        [], "Sources whose answers the teacher scores; by default all sources that no other teacher scores."
    )
    backend: Literal["trainer", "engine"] = option(
        "trainer",
        "Role that computes the teacher's log-probs: a frozen trainer, or an engine of the kind `inference.engine`. "
        "With `distillation.mode: loss`, the student's trainer holds the teacher. Offline distillation supports only "
        "`trainer`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


def _convert_to_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Teachers: TypeAlias = Annotated[
    list[TeacherConfig],
    BeforeValidator(_convert_to_list, json_schema_input_type=str | TeacherConfig | list[str | TeacherConfig]),
]


class DistillationBase(RunConfig):
    """Base of both distillation configurations: the teachers, and the sources whose answers each teacher scores."""

    teacher: Teachers = option(
        ...,
        "The teacher: a model, or a list of teachers with the sources (`domains`) that each one scores.",
        min_length=1,
        examples=["runs/quickstart"],
    )

    @model_validator(mode="after")
    def _check_one_teacher_per_source(self) -> Self:
        known = self._list_domains()
        named = Counter(domain for teacher in self.teacher for domain in teacher.domains)
        for domain, count in named.items():
            if domain not in known:
                raise ValueError(
                    f"teacher.domains contains '{domain}', which is not a source: choose from {', '.join(known)}"
                )
            if count > 1:
                raise ValueError(f"teacher.domains: '{domain}' has {count} teachers, but must have exactly one")
        others = [teacher.model for teacher in self.teacher if not teacher.domains]
        if len(others) > 1:
            raise ValueError(
                f"teachers '{others[0]}' and '{others[1]}' both have no domains: set the `domains` of each teacher"
            )
        if not others and (left := [domain for domain in known if domain not in named]):
            raise ValueError(f"the source '{left[0]}' has no teacher: add it to the `domains` of a teacher")
        return self

    @property
    def teacher_by_domain(self) -> dict[str, int]:
        """Index of the teacher that scores the answers of each domain."""
        named = {domain: i for i, teacher in enumerate(self.teacher) for domain in teacher.domains}
        rest = next((i for i, teacher in enumerate(self.teacher) if not teacher.domains), -1)
        return {domain: named.get(domain, rest) for domain in self._list_domains()}

    def _list_domains(self) -> list[str]:
        return [entry.domain or entry.source for entry in self.get_section("data", list)]


class DistillationConfig(Section):
    """Settings of on-policy distillation: the student learns from its teacher, on the student's answers.

    Both distributions are computed at `rollout.temperature`, the temperature at which the answers were sampled.
    """

    mode: Literal["loss", "reward"] = option(
        "loss",
        "`loss`: the exact divergence over the whole vocabulary, token by token (GKD). `reward`: only the log-ratios "
        "of the sampled tokens, as advantages in a policy gradient.",
    )
    divergence: DivergenceName = option(
        "reverse",
        "`reverse`: KL(student || teacher). `forward`: KL(teacher || student). `jsd`: generalized Jensen-Shannon "
        "divergence, between the two. With `mode: reward` only `reverse` is supported.",
    )
    beta: float = option(
        0.5, "Beta of `jsd`: values near 0 approximate `forward`, values near 1 `reverse`.", gt=0, lt=1
    )
    limit: float | None = option(
        None, "With `mode: reward`: bound on the absolute value of a token's advantage, in nats.", gt=0
    )
    coefficient: float = option(1.0, "Weight of the divergence relative to `reward_weight`.", gt=0)
    reward_weight: float = option(
        0.0,
        "Weight of the group-normalized advantage of the sources' rewards, relative to the teacher; 0 trains only on "
        "the teacher.",
        ge=0,
    )
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token has the same weight, or every answer."
    )

    @model_validator(mode="after")
    def _check_mode(self) -> DistillationConfig:
        if self.mode == "reward" and self.divergence != "reverse":
            raise ValueError(
                f"divergence {self.divergence} requires full distributions, but `mode: reward` uses only the sampled "
                "tokens: set mode to loss, or divergence to reverse"
            )
        if self.mode == "loss" and self.limit is not None:
            raise ValueError(
                "limit is not supported with `mode: loss`, which has no advantages: remove limit, or set mode to reward"
            )
        return self

    @property
    def divergence_spec(self) -> Divergence:
        """The configured divergence with its parameters, for the loss."""
        return Divergence(kind=self.divergence, beta=self.beta)


class OfflineDistillationConfig(Section):
    """Settings of offline distillation: the student learns from its teacher, on given answers."""

    mode: Literal["precomputed", "loss"] = option(
        "precomputed",
        "`precomputed`: before the first step, the teacher's top-k log-probs are computed and stored on disk; "
        "all other tokens are treated as one token. `loss`: the teacher is in the student's trainer, and the "
        "divergence covers the whole vocabulary.",
    )
    divergence: DivergenceName = option(
        "forward",
        "`forward`: KL(teacher || student). With `mode: loss` also `reverse`: KL(student || teacher), and `jsd`: "
        "generalized Jensen-Shannon divergence, between the two.",
    )
    beta: float = option(
        0.5, "Beta of `jsd`: values near 0 approximate `forward`, values near 1 `reverse`.", gt=0, lt=1
    )
    temperature: float = option(
        1.0,
        "With `mode: loss`: temperature of both distributions (Hinton); the gradient is not multiplied by the square "
        "of the temperature.",
        gt=0,
    )
    weight: float = option(
        1.0,
        "Weight w of the divergence; the negative log-likelihood of the given answers has weight 1 - w (Hinton).",
        gt=0,
        le=1,
    )
    top_k: int = option(
        32,
        "With `mode: precomputed`: number of the teacher's top-k tokens per position. Use 8 or more: with 1 or 2, "
        "float32 saturates.",
        ge=1,
    )
    directory: str | None = path_option(
        None,
        "With `mode: precomputed`: directory of the log-probs, which several runs can share; by default `teacher` in "
        "the run directory.",
        min_length=1,
    )
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "Whether every token has the same weight, or every answer."
    )

    @model_validator(mode="after")
    def _check_mode(self) -> OfflineDistillationConfig:
        if self.mode == "precomputed" and self.divergence != "forward":
            raise ValueError(
                f"divergence {self.divergence} requires full distributions, but `mode: precomputed` stores only the "
                "teacher's top-k tokens: set mode to loss, or divergence to forward"
            )
        if self.mode == "precomputed" and self.temperature != 1.0:
            raise ValueError(
                f"temperature {self.temperature:g} requires full distributions, but `mode: precomputed` stores only "
                "the teacher's top-k tokens: set mode to loss, or temperature to 1"
            )
        if self.mode == "loss" and self.directory is not None:
            raise ValueError(
                "directory is supported only with `mode: precomputed`: remove directory, or set mode to precomputed"
            )
        return self

    @property
    def divergence_spec(self) -> Divergence:
        """The configured divergence with its parameters, for the loss."""
        return Divergence(kind=self.divergence, beta=self.beta, temperature=self.temperature)

    @property
    def method(self) -> str:
        """A short description of the divergence, for display."""
        over = f" over the top {self.top_k} tokens" if self.mode == "precomputed" else ""
        return f"{self.divergence} divergence{over}"
