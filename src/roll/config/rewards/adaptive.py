"""Adaptive limits on the time of rewards in the worker pool."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import Section, option
from roll.config.rewards.base import RewardSection

__all__ = ["AdaptiveLimit", "PooledReward"]


class AdaptiveLimit(Section):
    """CPU-time limit of a reward that adapts to the times of correct answers (RollPacker, arXiv 2509.21009).

    The limit is `factor` times the longest CPU time of a correct answer, at least `min_cpu_s` and at most
    `time_limit_s`. An answer that exceeds it is treated as incorrect.
    """

    factor: float = option(1.5, "The limit is this factor times the longest CPU time of a correct answer.", ge=1)
    min_cpu_s: float = option(2.0, "Lower bound of the limit.", unit="s", gt=0)
    min_right: int = option(
        3, "Number of correct answers required before the limit adapts; until then, `time_limit_s` applies.", ge=1
    )
    scope: Literal["prompt", "domain"] = option(
        "prompt",
        "Which correct answers determine the limit. `prompt`: answers to the same prompt. `domain`: answers of the "
        "same domain.",
    )
    audit_share: float = option(
        0.05,
        "Fraction of answers that run without the adaptive limit, to measure how many correct answers it would stop "
        "(metric `right_over_limit`).",
        ge=0,
        le=1,
    )
    right_at: float = option(1.0, "Minimum value of a correct answer, if the reward gives no verdict.")


class PooledReward(RewardSection):
    """Settings of rewards whose functions run in the worker pool."""

    adaptive_limit: AdaptiveLimit | None = option(
        None,
        "CPU-time limit that adapts to the times of correct answers; `true` uses its defaults. If it is not set, only "
        "`time_limit_s` applies.",
    )

    @field_validator("adaptive_limit", mode="before", json_schema_input_type=AdaptiveLimit | bool | None)
    @classmethod
    def _expand_adaptive_limit(cls, value: Any) -> Any:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_adaptive_limit(self) -> Self:
        limit = self.adaptive_limit
        if limit is not None and limit.min_cpu_s >= self.time_limit_s:
            raise ValueError(
                f"adaptive_limit requires min_cpu_s < time_limit_s, got {limit.min_cpu_s:g} and "
                f"{self.time_limit_s:g}: raise time_limit_s, for example to 30, or lower min_cpu_s"
            )
        return self
