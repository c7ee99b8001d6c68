"""Converts a configuration of TRL's command line (`trl grpo --config FILE`), or a script that trains with TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.cli.migration import trl_examples, trl_grpo
from roll.cli.migration.convert import Converted, KeyResult, convert
from roll.cli.migration.rules import Rule, with_defaults
from roll.cli.migration.trl_older import OLDER, RENAMED
from roll.cli.migration.trl_script import Script, read_script
from roll.config.document import read
from roll.errors import ConfigError

__all__ = ["TRAINERS", "TRL_VERSION", "from_trl"]

TRL_VERSION = "1.16"
TRAINERS: Mapping[str, Sequence[Rule]] = {
    "grpo": with_defaults(trl_grpo.GRPO, {"learning_rate": 1e-6, "remove_unused_columns": False}),
    "sft": with_defaults(trl_examples.SFT, {"learning_rate": 2e-5}),
    "dpo": with_defaults(trl_examples.DPO, {"learning_rate": 1e-6}),
    "reward": with_defaults(trl_examples.REWARD, {"learning_rate": 1e-4}),
}
"""Rules of every supported trainer."""
_START: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"pipeline": "rlvr", "algorithm.type": "grpo", "algorithm.filters.skip_zero_variance": False},
    "sft": {"pipeline": "sft"},
    "dpo": {"pipeline": "preference"},
    "reward": {"pipeline": "reward_model"},
}


def from_trl(
    path: str | Path,
    *,
    trainer: str | None = None,
    processes: int = 1,
    rows: int | None = None,
    further: Mapping[str, Any] | None = None,
) -> Converted:
    """Convert a file.

    Args:
        path: YAML or JSON with the keys of TRL's command line, or a Python script (`.py`), which is read and never run.
        trainer: `grpo`, `sft`, `dpo` or `reward`; by default determined by the file's keys, or by the script.
        processes: number of processes of the TRL run (`accelerate launch --num_processes`); they multiply the batch.
        rows: number of rows of the data set, if the file counts epochs.
        further: keys of TRL, with their values, that are not in the file or could not be read.

    Raises:
        ConfigError: the file cannot be read, does not determine a trainer, or lacks a required value; the message has
            all problems.
    """
    if trainer is not None and trainer not in TRAINERS:
        raise ConfigError(f"trainer '{trainer}' is not known. Known: {', '.join(TRAINERS)}.")
    further = dict(further or {})
    script = read_script(path) if Path(path).suffix == ".py" else Script(given=dict(read(path).tree))
    unread = [said for said in script.unread if said.key not in further]
    given, older = _in_newer_names(script.given | further)
    chosen = trainer or script.trainer or _guess(given, str(path))
    if script.trainer and chosen != script.trainer:
        raise ConfigError(f"{path} makes a trainer of the kind {script.trainer}, not {chosen}: leave --trainer out.")
    said: dict[str, Any] = {"processes": processes, "rows": rows, "updates_per_step": lambda values: 1}
    said["total_steps"] = trl_examples.steps
    if chosen == "grpo":
        said |= {"updates_per_step": trl_grpo.updates, "total_steps": trl_grpo.steps}
    no_model = f"{path}: model_name_or_path does not say which model is trained."
    converted = convert(
        [*TRAINERS[chosen], *OLDER],
        given,
        source=f"TRL's {Path(path).name} ({chosen})",
        start=_START[chosen],
        said_by_caller=said,
        problems=[no_model] if given.get("model_name_or_path") is None else [],
        unread=unread,
    )
    return replace(converted, said=[_by_older_name(one, older) for one in converted.said])


def _in_newer_names(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return keys by the names of TRL 1.16, and the older names of renamed keys."""
    older = {new: old for old, new in RENAMED.items() if old in given and new not in given}
    return {RENAMED[key] if key in older.values() else key: value for key, value in given.items()}, older


def _by_older_name(said: KeyResult, older: Mapping[str, str]) -> KeyResult:
    return replace(said, key=older[said.key]) if said.key in older else said


def _guess(given: Mapping[str, Any], name: str) -> str:
    keys = {trainer: {rule.key for rule in rules} for trainer, rules in TRAINERS.items()}
    own = {
        trainer: known.difference(*(other for of, other in keys.items() if of != trainer))
        for trainer, known in keys.items()
    }
    found = [trainer for trainer in TRAINERS if own[trainer] & set(given)]
    if len(found) != 1:
        raise ConfigError(
            f"{name}: its keys do not say which trainer it is for. Say it: --trainer grpo, sft, dpo or reward."
        )
    return found[0]
