"""The settings of rewards that an HTTP service computes."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.base import option, path_option
from roll.config.rewards.base import RewardSection, check_url

__all__ = ["RemoteReward"]


class RemoteReward(RewardSection):
    """An HTTP service scores the answers in batches: `roll reward serve`, or your own service that implements the
    protocol in docs/rewards.md.

    If the service cannot be reached, or does not return a valid score, the rollout has an infrastructure error, not a
    reward of 0.
    """

    type: Literal["remote"] = option(..., "Reward type.")
    url: str = option(
        ...,
        "Base URL of the service; requests go to `<url>/score`.",
        examples=["http://host:8600"],
    )
    api_key_env: str | None = option(
        None,
        "Environment variable with the service's bearer token, which is never written to a file.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        examples=["REWARD_TOKEN"],
    )
    decides: bool = option(
        True,
        "Whether the service decides if a task is solved. If true, each result must contain the field `correct`, "
        "unless `solved_at` is set.",
    )
    solved_at: float | None = option(
        None,
        "The task is solved if the reward is at least this value. By default, the result's field `correct` decides.",
    )
    metadata_keys: list[str] | None = option(
        None, "Columns that are sent to the service; by default all columns.", examples=[["tests", "entry_point"]]
    )
    send_token_ids: bool = option(
        False,
        "Whether the token ids of answers are sent. A service that computes the rewards `length` or `repetition` "
        "needs them.",
    )
    batch_size: int = option(16, "Maximum number of answers in one request.", ge=1, le=256)
    max_concurrent: int = option(16, "Maximum number of concurrent requests.", ge=1)
    time_limit_s: float = option(
        60.0, "Time limit of one request; a request that exceeds it is retried.", unit="s", gt=0
    )
    max_attempts: int = option(
        5, "Number of consecutive failed requests after which an answer fails with an infrastructure error.", ge=1
    )
    backoff_s: float = option(
        1.0,
        "Maximum wait before the second attempt. It doubles with each further attempt, up to a minute.",
        unit="s",
        gt=0,
    )
    cache_size: int = option(
        20_000,
        "Maximum number of results that are cached in memory. Set it to 0 to disable the cache if the service's "
        "results are random.",
        ge=0,
    )
    cache_dir: str | None = path_option(
        None, "Directory of a result cache that several runs can share.", examples=["cache/reward"]
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        return check_url(value, "http://host:8600")

    @model_validator(mode="after")
    def _check_combinations(self) -> RemoteReward:
        if self.solved_at is not None and not self.decides:
            raise ValueError(
                f"solved_at {self.solved_at} has no effect with `decides: false`: remove one of the two keys"
            )
        if self.cache_dir is not None and not self.cache_size:
            raise ValueError("cache_dir requires cache_size > 0, got 0: remove cache_dir, or raise cache_size")
        return self
