"""The order in which rollouts run, which of them a step takes, and how far generation may run ahead of training."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Strict, model_validator

from roll.config.base import Section, option

__all__ = ["SchedulingConfig"]

TAIL_REDUNDANCY = 1.25
"""RollPacker's factor for prompts and for rollouts (arXiv 2509.21009, sections 3 and 6.3)."""


class SchedulingConfig(Section):
    """How rollouts are scheduled. Policies that contradict each other are rejected."""

    type: Literal["queue", "batch", "tail_batching"] = option(
        "queue",
        "`queue`: every rollout is a task of its own, which goes to a free slot and is scored the moment it ends. "
        "`batch`: prompts are dealt out to the engines, and all are generated before any is scored: the baseline. "
        "`tail_batching`: short rounds that leave the longest prompts for later, and long rounds of these.",
    )
    async_ratio: float = option(
        0.0,
        "How far generation may run ahead of training, in batches; 0 is synchronous. No token is trained that is "
        "more than this (rounded up) policy versions old.",
        ge=0,
    )
    stale_policy: Literal["wait", "drop"] = option(
        "wait",
        "What happens to rollouts that would get too old: `wait`: the update waits for them. `drop`: they are given "
        "up, which favours short answers; lengths of what was dropped are reported.",
    )
    pause_mode: Literal["keep", "abort", "drain"] = option(
        "keep",
        "What engines do with running requests while they get new weights: `keep` freezes them, `abort` ends them and "
        "continues them from their partial tokens, `drain` finishes them first.",
    )
    interrupted_turns: Literal["continue", "restart"] = option(
        "continue",
        "What becomes of an answer that `pause_mode: abort` interrupted: `continue` goes on from its partial tokens, "
        "each of which knows its policy version; `restart` asks again, so that one version writes a turn, at the price "
        "of what was written, and in favour of answers short enough to end between two updates.",
    )
    prompt_redundancy: float | None = option(
        None,
        "Launch this many times as many prompts as a step trains, and close the step when enough are done. "
        f"Without a value: 1, with tail batching {TAIL_REDUNDANCY}.",
        ge=1,
    )
    rollout_redundancy: float | None = option(
        None,
        "Launch this many times as many rollouts of each prompt as a group needs. "
        f"Without a value: 1, with tail batching {TAIL_REDUNDANCY}.",
        ge=1,
    )
    choose: Literal["launch_order", "first_finished"] | None = option(
        None,
        "Which of the redundant ones count: `launch_order` takes the first that were launched and replaces only what "
        "failed or was filtered, so that it favours no length; `first_finished` is faster and favours short answers. "
        "Without a value: `launch_order`, with tail batching `first_finished`.",
    )
    leftovers: Literal["defer", "drop"] = option(
        "defer",
        "What becomes of redundant prompts that were not taken: `defer`: the next step begins with them. `drop`: they "
        "expire.",
    )
    replicate_prompts: bool = option(
        True, "Spread the rollouts of a prompt over the engines; `false` keeps a prompt's rollouts on one engine."
    )
    early_stop_groups: bool = option(
        True,
        "Early stopping: abort a group as soon as no outcome of its running rollouts can pass the filters. Needs "
        "`reward_range`.",
    )
    reward_range: Annotated[tuple[float, float], Strict(False)] | None = option(
        None, "Lowest and highest possible reward of a rollout, for `early_stop_groups`.", examples=[[0.0, 1.0]]
    )
    domain_quotas: bool = option(
        False,
        "Train the domains in the proportion of their weights, also where some are faster, or filtered more often, "
        "than others: exactly in every synchronous step, long and short rounds alike; with an `async_ratio` above 0, "
        "in what is launched, and so over all steps.",
    )
    max_kv_used: float = option(
        0.95, "An engine whose KV cache is fuller gets no further request while it has any.", gt=0, le=1
    )

    @model_validator(mode="after")
    def _consistent(self) -> SchedulingConfig:
        redundant = self.num_prompts(1000) > 1000
        if self.async_ratio > 0:
            if self.type != "queue":
                raise ValueError(
                    f"type {self.type} is synchronous, but async_ratio is {self.async_ratio:g}: set async_ratio to 0, "
                    "or type to queue, in which a slow prompt holds up no step"
                )
            if redundant:
                raise ValueError(
                    f"prompt_redundancy {self.prompt_redundancy:g} closes synchronous steps early, but async_ratio is "
                    f"{self.async_ratio:g}, with which no step waits for a slow prompt: remove the one or the other"
                )
        if self.interrupted_turns == "restart" and self.pause_mode != "abort":
            raise ValueError(
                f"interrupted_turns restart needs answers that are interrupted, but pause_mode {self.pause_mode} "
                "interrupts none: set pause_mode to abort, or remove interrupted_turns"
            )
        if self.type == "batch" and (redundant or self.num_rollouts(1000) > 1000):
            raise ValueError("type batch waits for every rollout, so redundant ones only cost: set type to queue")
        if self.type == "tail_batching":
            if not redundant:
                raise ValueError(
                    "type tail_batching needs prompt_redundancy above 1: without redundant prompts no round is short"
                )
            if self.choose == "launch_order":
                raise ValueError("type tail_batching closes rounds by what finished first: remove choose")
            if self.leftovers == "drop":
                raise ValueError("type tail_batching trains the leftovers in long rounds: set leftovers to defer")
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must go from low to high, got {list(self.reward_range)}")
        return self

    @property
    def max_staleness(self) -> int:
        """Policy versions by which the oldest token of a training sample may lag behind the trainer."""
        return math.ceil(self.async_ratio)

    @property
    def first_finished(self) -> bool:
        """Whether rollouts are taken in the order in which they finish, not in the order of launch."""
        return (self.choose or ("first_finished" if self.type == "tail_batching" else "launch_order")) != "launch_order"

    @property
    def selects_rollouts(self) -> bool:
        """Whether some launched rollouts are not trained, depending on when they finished or on their reward so far."""
        redundant = self.num_prompts(1000) > 1000 or self.num_rollouts(1000) > 1000
        return redundant or self.stale_policy == "drop" or (self.early_stop_groups and self.reward_range is not None)

    def num_prompts(self, wanted: int) -> int:
        """Return the number of prompts to launch for a step that trains `wanted` prompts."""
        return _times(self.prompt_redundancy, self.type, wanted)

    def num_rollouts(self, wanted: int) -> int:
        """Return the number of rollouts to launch for a group of `wanted` rollouts."""
        return _times(self.rollout_redundancy, self.type, wanted)


def _times(factor: float | None, kind: str, wanted: int) -> int:
    used = factor if factor is not None else (TAIL_REDUNDANCY if kind == "tail_batching" else 1.0)
    return math.ceil(round(used * wanted, 9))
