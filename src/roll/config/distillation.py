"""On-policy distillation: who teaches, and what is learnt from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from roll.config.base import Section, option

__all__ = ["DistillationConfig", "TeacherConfig"]


class TeacherConfig(Section):
    """A model whose weights never change. It must write the tokens that the student writes."""

    model: str = option(
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
        "`distillation.place` loss, the student's own trainer holds it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value


class DistillationConfig(Section):
    """How the student comes near its teacher, on answers of its own. Both distributions are taken at
    `rollout.temperature`, with which the answers were sampled."""

    place: Literal["loss", "reward"] = option(
        "loss",
        "`loss`: the divergence over the whole vocabulary, token by token, exact (GKD). `reward`: the log-ratio at the "
        "sampled tokens alone, as their advantages in a policy gradient.",
    )
    divergence: Literal["reverse", "forward", "jsd"] = option(
        "reverse",
        "`reverse`: KL(student || teacher). `forward`: KL(teacher || student). `jsd`: generalised Jensen-Shannon, "
        "between the two. A reward is always the reverse one.",
    )
    beta: float = option(0.5, "Of `jsd`: near 0 it is like `forward`, near 1 like `reverse`.", gt=0, lt=1)
    limit: float | None = option(None, "With `place` reward: advantages are cut at this size, in nats.", gt=0)
    coefficient: float = option(1.0, "What the divergence counts beside `reward_weight`.", gt=0)
    reward_weight: float = option(
        0.0,
        "What the advantage of the sources' rewards within a group counts beside the teacher; 0: only the teacher "
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
