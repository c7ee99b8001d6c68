"""Adaptive limits on the time of rewards in the worker pool."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import Section, option
from roll.config.rewards.base import RewardSection

__all__ = ["AdaptiveLimit", "PooledReward"]


class AdaptiveLimit(Section):
    """The limit on the CPU time of a reward follows the time of right answers (RollPacker, arXiv 2509.21009).

    The limit is `factor` times the longest CPU time of a right answer, at least `min_cpu_s` and at most `time_limit_s`.
    An answer that exceeds it counts as wrong.
    """

    factor: float = option(1.5, "Limit as a multiple of the longest CPU time of a right answer.", ge=1)
    min_cpu_s: float = option(2.0, "Minimum of the limit.", unit="s", gt=0)
    min_right: int = option(
        3, "Number of right answers from which the limit is adapted; before, `time_limit_s` applies.", ge=1
    )
    scope: Literal["prompt", "domain"] = option(
        "prompt", "Answers whose times are compared: those to the same prompt, or those of the same domain."
    )
    audit_share: float = option(
        0.05,
        "Share of answers without an adaptive limit, which show whether right answers would be cut off: metric "
        "`right_over_limit`.",
        ge=0,
        le=1,
    )
    right_at: float = option(1.0, "Value from which an answer counts as right, if the reward gives no verdict.")


class PooledReward(RewardSection):
    """Settings of rewards whose functions run in the worker pool."""

    adaptive_limit: AdaptiveLimit | None = option(
        None,
        "Limit on CPU time that follows the time of right answers; `true` for its defaults. By default only "
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
                f"adaptive_limit has no effect, since its min_cpu_s {limit.min_cpu_s:g} is not below time_limit_s "
                f"{self.time_limit_s:g}: raise time_limit_s, for example to 30, or lower min_cpu_s"
            )
        return self
