"""A configuration of TRL's command line (`trl grpo --config FILE`) as one of ROLL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.config.document import read
from roll.config.migration import trl_examples, trl_grpo
from roll.config.migration.convert import Converted, convert
from roll.config.migration.rules import Rule, with_defaults
from roll.errors import ConfigError

__all__ = ["TRAINERS", "TRL_VERSION", "from_trl"]

TRL_VERSION = "1.16"
TRAINERS: Mapping[str, Sequence[Rule]] = {
    "grpo": with_defaults(trl_grpo.GRPO, {"learning_rate": 1e-6, "remove_unused_columns": False}),
    "sft": with_defaults(trl_examples.SFT, {"learning_rate": 2e-5}),
    "dpo": with_defaults(trl_examples.DPO, {"learning_rate": 1e-6}),
}
"""Rules of every trainer that is converted."""
_START: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"pipeline": "rlvr", "algorithm.type": "grpo", "algorithm.filters.skip_zero_variance": False},
    "sft": {"pipeline": "sft"},
    "dpo": {"pipeline": "preference"},
}


def from_trl(path: str | Path, *, trainer: str | None = None, processes: int = 1, rows: int | None = None) -> Converted:
    """Convert a file, YAML or JSON.

    Args:
        path: the file.
        trainer: `grpo`, `sft` or `dpo`; by default whose keys the file has.
        processes: that TRL would be started with, as `accelerate launch --num_processes` says; they multiply the batch.
        rows: of the data set, where the file counts epochs.

    Raises:
        ConfigError: the file cannot be read, says of no trainer, or lacks what a run needs.
    """
    given = dict(read(path).tree)
    chosen = trainer or _guess(given, str(path))
    if chosen not in TRAINERS:
        raise ConfigError(f"trainer '{chosen}' is not known. Known: {', '.join(TRAINERS)}.")
    said: dict[str, Any] = {"processes": processes, "rows": rows, "updates_per_step": lambda values: 1}
    said["total_steps"] = trl_examples.steps
    if chosen == "grpo":
        said |= {"updates_per_step": trl_grpo.updates, "total_steps": trl_grpo.steps}
    if given.get("model_name_or_path") is None:
        raise ConfigError(f"{path}: model_name_or_path does not say which model is trained.")
    return convert(
        TRAINERS[chosen],
        given,
        source=f"TRL's {Path(path).name} ({chosen})",
        start=_START[chosen],
        said_by_caller=said,
    )


def _guess(given: Mapping[str, Any], name: str) -> str:
    keys = {trainer: {rule.key for rule in rules} for trainer, rules in TRAINERS.items()}
    own = {
        trainer: known.difference(*(other for of, other in keys.items() if of != trainer))
        for trainer, known in keys.items()
    }
    found = [trainer for trainer in TRAINERS if own[trainer] & set(given)]
    if len(found) != 1:
        raise ConfigError(f"{name}: its keys do not say which trainer it is for. Say it: --trainer grpo, sft or dpo.")
    return found[0]
