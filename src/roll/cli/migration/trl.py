"""Converts a configuration of TRL's command line (`trl grpo --config FILE`), or a script that trains with TRL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.cli.migration import trl_examples, trl_grpo
from roll.cli.migration.convert import ConvertedConfig, KeyResult, convert
from roll.cli.migration.rules import Rule, replace_defaults
from roll.cli.migration.trl_older import OLDER_KEY_RULES, RENAMED_KEYS
from roll.cli.migration.trl_script import ParsedScript, read_script
from roll.config.document import read
from roll.errors import ConfigError

__all__ = ["TRAINERS", "TRL_VERSION", "from_trl"]

TRL_VERSION = "1.16"
TRAINERS: Mapping[str, Sequence[Rule]] = {
    "grpo": replace_defaults(trl_grpo.GRPO_RULES, {"learning_rate": 1e-6, "remove_unused_columns": False}),
    "sft": replace_defaults(trl_examples.SFT_RULES, {"learning_rate": 2e-5}),
    "dpo": replace_defaults(trl_examples.DPO_RULES, {"learning_rate": 1e-6}),
    "reward": replace_defaults(trl_examples.REWARD_MODEL_RULES, {"learning_rate": 1e-4}),
}
"""Rules of every supported trainer."""
_INITIAL_KEYS: Mapping[str, Mapping[str, Any]] = {
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
    extra_values: Mapping[str, Any] | None = None,
) -> ConvertedConfig:
    """Convert a configuration file or a script of TRL.

    Args:
        path: YAML or JSON with the keys of TRL's command line, or a Python script (`.py`), which is read and never run.
        trainer: `grpo`, `sft`, `dpo` or `reward`; by default determined by the file's keys, or by the script.
        processes: number of processes of the TRL run (`accelerate launch --num_processes`); they multiply the batch.
        rows: number of rows of the data set; required if the file gives the length of the run in epochs.
        extra_values: keys of TRL, with their values, that are not in the file or could not be read.

    Raises:
        ConfigError: the file cannot be read, does not determine a trainer, or lacks a required value; the message has
            all problems.
    """
    if trainer is not None and trainer not in TRAINERS:
        raise ConfigError(f"unknown trainer '{trainer}'. Known: {', '.join(TRAINERS)}.")
    extra_values = dict(extra_values or {})
    script = read_script(path) if Path(path).suffix == ".py" else ParsedScript(values=dict(read(path).tree))
    unreadable = [result for result in script.unreadable if result.key not in extra_values]
    file_values, older = _rename_older_keys(script.values | extra_values)
    chosen = trainer or script.trainer or _guess_trainer(file_values, str(path))
    if script.trainer and chosen != script.trainer:
        raise ConfigError(
            f"{path} creates a trainer of type {script.trainer}, but --trainer is {chosen}: remove --trainer."
        )
    caller_values: dict[str, Any] = {"processes": processes, "rows": rows, "updates_per_step": lambda values: 1}
    caller_values["total_steps"] = trl_examples.count_steps
    if chosen == "grpo":
        caller_values |= {"updates_per_step": trl_grpo.count_updates, "total_steps": trl_grpo.count_steps}
    no_model = f"{path}: the key model_name_or_path, the model to train, is missing."
    converted = convert(
        [*TRAINERS[chosen], *OLDER_KEY_RULES],
        file_values,
        source=f"TRL's {Path(path).name} ({chosen})",
        initial_values=_INITIAL_KEYS[chosen],
        caller_values=caller_values,
        problems=[no_model] if file_values.get("model_name_or_path") is None else [],
        unreadable=unreadable,
    )
    return replace(converted, results=[_restore_older_name(one, older) for one in converted.results])


def _rename_older_keys(file_values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under the key names of TRL 1.16, and the older name of each key that was renamed."""
    older = {new: old for old, new in RENAMED_KEYS.items() if old in file_values and new not in file_values}
    return {RENAMED_KEYS[key] if key in older.values() else key: value for key, value in file_values.items()}, older


def _restore_older_name(result: KeyResult, older: Mapping[str, str]) -> KeyResult:
    return replace(result, key=older[result.key]) if result.key in older else result


def _guess_trainer(file_values: Mapping[str, Any], name: str) -> str:
    keys = {trainer: {rule.key for rule in rules} for trainer, rules in TRAINERS.items()}
    own = {
        trainer: known.difference(*(other for of, other in keys.items() if of != trainer))
        for trainer, known in keys.items()
    }
    found = [trainer for trainer in TRAINERS if own[trainer] & set(file_values)]
    if len(found) != 1:
        raise ConfigError(
            f"{name}: cannot determine the trainer from the keys: set --trainer to grpo, sft, dpo or reward."
        )
    return found[0]
