"""Scheduling: the order of rollouts, the selection of a step's rollouts, and asynchronous generation."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Strict, model_validator

from roll.config.base import Section, option

__all__ = ["SchedulingConfig"]

TAIL_REDUNDANCY = 1.25
"""RollPacker's redundancy factor for prompts and for rollouts (arXiv 2509.21009, sections 3 and 6.3)."""


class SchedulingConfig(Section):
    """Scheduling of rollouts. Settings that contradict each other are rejected."""

    type: Literal["queue", "batch", "tail_batching"] = option(
        "queue",
        "`queue`: every rollout is a separate task, which runs in a free slot and is scored as soon as it ends. "
        "`batch`: prompts are distributed to the engines, and all answers are generated before any is scored (the "
        "baseline). `tail_batching`: prompts with the longest answers are deferred and later generated together in "
        "long rounds.",
    )
    async_ratio: float = option(
        0.0,
        "Number of batches by which generation may run ahead of training; 0 means synchronous training. This value, "
        "rounded up, is the maximum staleness of a token in policy versions.",
        ge=0,
    )
    stale_policy: Literal["wait", "drop"] = option(
        "wait",
        "How to handle rollouts that would exceed the maximum staleness. `wait`: the update waits for them. `drop`: "
        "they are dropped, which biases training toward short answers; the lengths of dropped rollouts are reported.",
    )
    pause_mode: Literal["keep", "abort", "drain"] = option(
        "keep",
        "How to handle running requests during a weight sync. `keep`: requests are held and continue "
        "afterwards. `abort`: requests are aborted and continue from their partial tokens. `drain`: requests are "
        "completed first.",
    )
    interrupted_turns: Literal["continue", "restart"] = option(
        "continue",
        "How to handle an answer that `pause_mode: abort` interrupted. `continue`: it continues from its partial "
        "tokens; the policy version of each token is recorded. `restart`: it is generated again from the start, so "
        "that the whole turn has a single policy version. This discards the partial tokens and favors answers that are "
        "short enough to finish between two updates.",
    )
    prompt_redundancy: float | None = option(
        None,
        "Number of launched prompts as a multiple of the prompts that a step trains on; the step ends when enough of "
        f"them are done. By default 1; with tail batching, {TAIL_REDUNDANCY}.",
        ge=1,
    )
    rollout_redundancy: float | None = option(
        None,
        "Number of launched rollouts of each prompt as a multiple of the rollouts that a group needs. "
        f"By default 1; with tail batching, {TAIL_REDUNDANCY}.",
        ge=1,
    )
    choose: Literal["launch_order", "first_finished"] | None = option(
        None,
        "Which of the redundant prompts and rollouts are used for training. `launch_order`: those launched first; "
        "later ones only replace failed or filtered ones, so there is no length bias. `first_finished`: those that "
        "finish first, which is faster but favors short answers. By default `launch_order`; with tail batching, "
        "`first_finished`.",
    )
    leftovers: Literal["defer", "drop"] = option(
        "defer",
        "How to handle redundant prompts that were not trained on. `defer`: the next step begins with them. "
        "`drop`: they expire.",
    )
    replicate_prompts: bool = option(
        True, "Whether the rollouts of a prompt are distributed over the engines; `false` keeps them on one engine."
    )
    early_stop_groups: bool = option(
        True,
        "Whether a group is aborted as soon as it can no longer pass the filters, regardless of the rewards of its "
        "running rollouts (early stopping). Requires `reward_range`.",
    )
    reward_range: Annotated[tuple[float, float], Strict(False)] | None = option(
        None, "Lowest and highest possible reward of a rollout, for `early_stop_groups`.", examples=[[0.0, 1.0]]
    )
    domain_quotas: bool = option(
        False,
        "Whether the groups to train on come from the domains in proportion to the domains' weights, even if some "
        "domains are faster or filtered more often than others. In synchronous runs, the proportions are exact in "
        "every step, in long and in short rounds. With an `async_ratio` above 0, they hold for the launched prompts, "
        "and therefore over all steps.",
    )
    routing: Literal["measured_pace", "least_loaded"] = option(
        "measured_pace",
        "How requests are distributed to engines. `measured_pace`: to the engine that is predicted to take the least "
        "time per token, from the times of its recent answers and the number of its requests; if all engines are "
        "about equally fast, this is the same as `least_loaded`. `least_loaded`: to the engine with the smallest share "
        "of `max_num_seqs` in use, regardless of its speed. `type: batch` ignores this key and assigns prompts to "
        "engines in turn.",
    )
    stream_training: bool = option(
        False,
        "Whether the trainer computes the gradients of finished groups while the other groups of a synchronous step "
        "are still generated (RollPacker's stream trainer). The updates are the same up to rounding. The rounding "
        "depends on the order in which groups finish, so runs are not bitwise reproducible.",
    )
    max_kv_used: float = option(
        0.95,
        "A busy engine gets no further requests while more than this fraction of its KV cache is in use.",
        gt=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> SchedulingConfig:
        redundant = self.compute_num_prompts(1000) > 1000
        if self.async_ratio > 0:
            if self.type == "batch":
                raise ValueError(
                    f"`type: batch` requires async_ratio 0, got {self.async_ratio:g}: set async_ratio to 0, or type "
                    "to queue"
                )
            if self.type == "tail_batching" and self.stale_policy == "drop":
                raise ValueError(
                    "`type: tail_batching` is not supported with `stale_policy: drop`, because it defers stale groups "
                    "instead of dropping them: set stale_policy to wait"
                )
            if self.stream_training:
                raise ValueError(
                    f"stream_training requires async_ratio 0, got {self.async_ratio:g}: with an async_ratio above 0, "
                    "training already overlaps with generation. Remove one of the two"
                )
            if self.prompt_redundancy is not None and self.prompt_redundancy > 1:
                raise ValueError(
                    f"prompt_redundancy {self.prompt_redundancy:g} requires async_ratio 0, got {self.async_ratio:g}: "
                    "with an async_ratio above 0, steps do not wait for slow prompts. Remove one of the two"
                )
        if self.interrupted_turns == "restart" and self.pause_mode != "abort":
            raise ValueError(
                f"`interrupted_turns: restart` requires `pause_mode: abort`, got {self.pause_mode}: set pause_mode to "
                "abort, or remove interrupted_turns"
            )
        if self.type == "batch" and (redundant or self.compute_num_rollouts(1000) > 1000):
            raise ValueError(
                "redundancy is not supported with `type: batch`, which waits for all rollouts: set type to queue"
            )
        if self.type == "tail_batching":
            if not redundant and self.async_ratio == 0:
                raise ValueError("`type: tail_batching` requires redundant prompts: set prompt_redundancy above 1")
            if self.choose == "launch_order":
                raise ValueError(
                    "`choose: launch_order` is not supported with `type: tail_batching`, which uses the rollouts that "
                    "finish first: remove `choose`"
                )
            if self.leftovers == "drop":
                raise ValueError(
                    "`type: tail_batching` requires `leftovers: defer`, because it trains on deferred prompts in long "
                    "rounds"
                )
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must be [lowest, highest], got {list(self.reward_range)}")
        return self

    @property
    def routing_policy(self) -> Literal["measured_pace", "least_loaded", "round_robin"]:
        """Policy of the router."""
        return "round_robin" if self.type == "batch" else self.routing

    @property
    def max_staleness(self) -> int:
        """Maximum age of a trained token, in policy versions."""
        return math.ceil(self.async_ratio)

    @property
    def trains_first_finished(self) -> bool:
        """True if a step trains on the rollouts that finished first, not on the rollouts that were launched first."""
        return (self.choose or ("first_finished" if self.type == "tail_batching" else "launch_order")) != "launch_order"

    @property
    def selects_rollouts(self) -> bool:
        """True if some launched rollouts are not used for training, depending on their finish time or reward so far."""
        redundant = self.compute_num_prompts(1000) > 1000 or self.compute_num_rollouts(1000) > 1000
        return redundant or self.stale_policy == "drop" or (self.early_stop_groups and self.reward_range is not None)

    def compute_num_prompts(self, num_trained: int) -> int:
        """Compute the number of prompts to launch, including redundant ones, for a step of `num_trained` prompts."""
        return _apply_redundancy(self.prompt_redundancy, self.type, num_trained)

    def compute_num_rollouts(self, num_trained: int) -> int:
        """Compute the number of rollouts to launch, including redundant ones, for a group of `num_trained` rollouts."""
        return _apply_redundancy(self.rollout_redundancy, self.type, num_trained)


def _apply_redundancy(factor: float | None, schedule: str, num_trained: int) -> int:
    used = factor if factor is not None else (TAIL_REDUNDANCY if schedule == "tail_batching" else 1.0)
    return math.ceil(round(used * num_trained, 9))
