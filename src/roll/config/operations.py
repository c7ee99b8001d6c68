"""Checkpoints, weight sync and tracking."""

from __future__ import annotations

import re
from typing import Literal, Self, TypeAlias

from pydantic import field_validator, model_validator

from roll.config.base import Section, expand_path, option, path_option

__all__ = ["CheckpointConfig", "Quantization", "TrackingConfig", "WeightSyncConfig"]

Quantization: TypeAlias = Literal["none", "int8", "fp8"]


class CheckpointConfig(Section):
    """Schedule of checkpoints, and the number of checkpoints to keep."""

    every_num_steps: int = option(0, "Save every N steps; 0 disables saving by number of steps.", ge=0)
    every_s: float | None = option(
        600.0,
        "Save at the end of a step if the last checkpoint is older than this. `null` disables saving by time. A "
        "checkpoint is always saved when a signal, an alarm or an error ends the run.",
        unit="s",
        gt=0,
    )
    keep_last: int = option(1, "Number of most recent checkpoints to keep.", ge=1)
    keep_best: bool = option(
        False, "Whether to also keep the checkpoint with the best evaluation score (`eval/score`)."
    )
    at_end: bool = option(True, "Whether to save after the last step.")
    asynchronous: bool = option(
        False,
        "Whether to write trainer states in the background while training continues. They are first copied to host "
        "memory (12 bytes per trained weight, sharded over the ranks). A checkpoint gets its final name when it is "
        "complete, some steps later.",
    )


class WeightSyncConfig(Section):
    """Transfer of the trainer's weights to the engines, and its verification."""

    transport: Literal["auto", "in_process", "shared_memory", "broadcast", "store"] = option(
        "auto",
        "Transport of the tensors; `auto` selects the fastest of the first three that reaches every engine. `store`: "
        "files in `store`, which engines fetch while they generate.",
    )
    lora: Literal["merged", "adapter"] = option(
        "merged",
        "What engines receive with `model.lora`. `merged`: all weights, with the adapter added. `adapter`: only the "
        "adapter, which engines apply to the frozen weights that they loaded. It sends less, and in bfloat16 small "
        "changes are not lost to rounding, but generation is slower.",
    )
    quantization: Quantization = option(
        "none",
        "Format in which linear weights are sent, with one scale per output channel; `fp8` is e4m3. Engines compute "
        "with the dequantized weights. With `inference.quantization`, weights are always sent in its format.",
    )
    store: str | None = option(
        None,
        "`transport: store`: directory that trainer and engines share, or URL of `fsspec` (`s3://bucket/path`).",
        examples=["/mnt/shared/weights"],
    )
    full_copy_every_num_syncs: int = option(
        20,
        "`transport: store`: write all weights at every N-th sync. Other syncs write only the changed elements, if "
        "this is smaller.",
        ge=1,
    )
    local_copy_dir: str | None = path_option(
        None,
        "`transport: store`: directory on the engines' hosts for their copies of the weights; by default the system's "
        "directory for temporary files.",
        examples=["/local/weights"],
    )
    probe_every_num_steps: int = option(
        1,
        "Compare the engines' log-probs with the trainer's log-probs after every N-th sync; 0 disables the comparison.",
        ge=0,
    )
    probe_tolerance: float | None = option(
        None,
        "Maximum mean absolute difference of log-probs; by default three times the difference after the first sync.",
        gt=0,
    )

    @field_validator("store")
    @classmethod
    def _expand_store(cls, value: str | None) -> str | None:
        if not value:
            return value
        scheme, _, path = value.partition(":")
        if "://" not in value:
            if re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme) and path.startswith("/"):
                raise ValueError(f"'{value}' lacks a slash after its scheme: write {scheme}:/{path}")
            return str(expand_path(value))
        if not scheme or not path.strip("/") or (scheme == "file" and not path.startswith("///")):
            raise ValueError(
                f"'{value}' does not name a directory: set it to one such as /mnt/shared/weights, or to a URL such as "
                "s3://bucket/path"
            )
        if scheme == "memory":
            raise ValueError(
                f"'{value}' is in the memory of the trainer's process, where engines cannot read it: set it to a "
                "directory that trainer and engines share"
            )
        return value

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        if self.transport == "store" and not self.store:
            raise ValueError(
                "transport store requires the key store: set it to a directory that trainer and engines share, or to "
                "a URL such as s3://bucket/path"
            )
        if self.transport != "store" and self.store is not None:
            raise ValueError(
                f"store is supported only with transport store, got transport {self.transport}: set transport to "
                "store, or remove store"
            )
        return self


class TrackingConfig(Section):
    """Records of a run in addition to `metrics.jsonl`: trackers, tables and rollouts."""

    tensorboard: bool = option(True, "Whether to write TensorBoard event files.")
    wandb: str | None = option(None, "Weights & Biases project to log to.")
    swanlab: str | None = option(None, "SwanLab project to log to.")
    mlflow: str | None = option(None, "MLflow experiment to log to.")
    trackio: str | None = option(None, "Trackio project to log to.")
    table_num_rows: int = option(
        8,
        "Number of rollouts in each table that is logged to trackers, from the highest to the lowest reward; 0 "
        "disables the tables.",
        ge=0,
    )
    table_every_num_steps: int = option(
        10, "Log a table every N steps; 0 logs tables only for evaluations, which always have one.", ge=0
    )
    rollouts: bool = option(True, "Whether to write every rollout to Parquet.")
    token_columns: bool = option(
        True,
        "Whether the Parquet files also contain the trainer's values per token (log-probs, advantages, the reference "
        "model's log-probs), for `roll dashboard`.",
    )
    record_rollouts: bool = option(
        False,
        "Whether to record every batch and the schedule of its rollouts, which `roll replay` needs.",
    )
    trace_rollouts: bool = option(True, "Whether `trace.json` includes every rollout's states and every engine's load.")
    console: Literal["auto", "live", "plain", "quiet"] = option(
        "auto",
        "Output on the terminal. `live`: a live display. `plain`: one line per step. `quiet`: no output. `auto`: "
        "`live` on a terminal, otherwise `plain`.",
    )
