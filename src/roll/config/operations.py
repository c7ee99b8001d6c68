"""Checkpoints, weight sync, and where a run is written."""

from __future__ import annotations

from typing import Literal

from roll.config.base import Section, option

__all__ = ["CheckpointConfig", "TrackingConfig", "WeightSyncConfig"]


class CheckpointConfig(Section):
    """Checkpoints, so that no work is lost."""

    every_num_steps: int = option(0, "Save every N steps; 0 means as `every_s` says.", ge=0)
    every_s: float | None = option(
        600.0,
        "Save at the end of a step where the last save was longer ago; null means only at the end, and whenever a "
        "signal, an alarm or an error ends the run.",
        unit="s",
        gt=0,
    )
    keep_last: int = option(1, "Newest checkpoints to keep.", ge=1)
    keep_best: bool = option(False, "Also keep the one with the best evaluation score (`eval/score`).")
    at_end: bool = option(True, "Save after the last step.")
    asynchronous: bool = option(
        False,
        "Write trainers' states while training goes on, from a copy in main memory (12 bytes for each trained weight, "
        "shared out over the ranks); a checkpoint has its name once it is whole, some steps later.",
    )


class WeightSyncConfig(Section):
    """Sending the trainer's weights to the engines, and verifying that they arrived."""

    transport: Literal["auto", "in_process", "shared_memory", "broadcast"] = option(
        "auto", "How tensors travel; `auto` takes the fastest that reaches every engine."
    )
    probe_every_num_steps: int = option(
        1, "Compare the engines' log-probs with the trainer's every N syncs; 0 means never.", ge=0
    )
    probe_tolerance: float | None = option(
        None,
        "Largest mean absolute difference of log-probs; by default three times that of the first sync.",
        gt=0,
    )


class TrackingConfig(Section):
    """Records in addition to `metrics.jsonl`."""

    tensorboard: bool = option(True, "Write TensorBoard event files.")
    wandb: str | None = option(None, "Weights & Biases project to log to.")
    swanlab: str | None = option(None, "SwanLab project to log to.")
    mlflow: str | None = option(None, "MLflow experiment to log to.")
    trackio: str | None = option(None, "Trackio project to log to.")
    table_num_rows: int = option(
        8, "Rollouts in each table that trackers get, from the highest reward to the lowest; 0 means no tables.", ge=0
    )
    table_every_num_steps: int = option(
        10, "Such a table every N steps; 0 means of evaluations only, which always have one.", ge=0
    )
    rollouts: bool = option(True, "Write every rollout to Parquet.")
    token_columns: bool = option(
        True,
        "Also write the trainer's values of every token of the rollouts (log-probs, advantages, the reference's), "
        "for `roll dashboard`.",
    )
    record_rollouts: bool = option(
        False, "Record every batch and the schedule of its rollouts, so that `roll replay` can train or generate again."
    )
    trace_rollouts: bool = option(True, "Put every rollout's states and every engine's load into `trace.json`.")
    console: Literal["auto", "live", "plain", "quiet"] = option(
        "auto", "Live display, one line per step, or nothing; `auto` is live on a terminal."
    )
