"""Replay of a recorded run without engines or without a trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option, path_option

__all__ = ["ReplayConfig"]


class ReplayConfig(Section):
    """A replay of a recorded run by `roll replay`; see docs/replay.md."""

    run: str = path_option(
        ...,
        "Directory of the recorded run, which must have been trained with `tracking.record_rollouts`.",
        examples=["runs/x"],
    )
    only: Literal["train", "rollout"] = option(
        "train",
        "`train`: train on the recorded batches, without engines. `rollout`: generate and score "
        "answers to the recorded prompts, without training.",
    )
    checkpoint: str | None = path_option(
        None,
        "Checkpoint of the recorded run from which the replay starts. With `only: rollout`, it can be any model, run "
        "or checkpoint; its weights generate the answers. By default `model.path`.",
    )
    lengths: Literal["recorded", "free"] = option(
        "recorded",
        "Lengths of answers with `only: rollout`. `recorded`: every answer has the recorded reward and the recorded "
        "numbers of tokens and turns, so that engines and schedules are compared on equal work. `free`: the model "
        "determines the lengths.",
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> ReplayConfig:
        if self.only == "train" and self.lengths == "free":
            raise ValueError(
                "`lengths: free` is not supported with `only: train`, which generates no answers: set only to rollout"
            )
        return self
