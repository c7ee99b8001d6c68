"""Replay of a recorded run without engines or without a trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option, path_option

__all__ = ["ReplayConfig"]


class ReplayConfig(Section):
    """What `roll replay` replays, and how; see docs/replay.md."""

    run: str = path_option(
        ..., "Directory of the run, which was trained with `tracking.record_rollouts`.", examples=["runs/x"]
    )
    only: Literal["train", "rollout"] = option(
        "train",
        "`train`: the recorded batches are trained on, and no engine is started. `rollout`: the recorded prompts are "
        "answered and scored by the engines, and nothing is trained.",
    )
    checkpoint: str | None = path_option(
        None,
        "Checkpoint of the recorded run to start from, with the step after it. With `only: rollout`: any model, run or "
        "checkpoint, whose weights then answer. By default `model.path`.",
    )
    lengths: Literal["recorded", "free"] = option(
        "recorded",
        "With `only: rollout`. `recorded`: every answer gets the number of tokens and turns and the reward that it "
        "had, so that engines and schedules are compared on equal work. `free`: as the model answers.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ReplayConfig:
        if self.only == "train" and self.lengths == "free":
            raise ValueError("lengths free asks for new answers, but only is train: set only to rollout")
        return self
