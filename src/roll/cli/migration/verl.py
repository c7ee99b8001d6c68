"""Converts a configuration of verl's PPO trainer (Hydra)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.cli.migration.convert import ConvertedConfig, KeyResult, convert
from roll.cli.migration.verl_file import find_shell_parts, read_keys
from roll.cli.migration.verl_rules import VERL_RULES

__all__ = ["VERL_COMMIT", "from_verl"]

VERL_COMMIT = "b178a3cd56f5 (2026-01-29)"
"""Commit of verl whose keys the rules have."""


def from_verl(path: str | Path, *, rows: int | None = None) -> ConvertedConfig:
    """Convert a configuration of verl.

    Args:
        path: a YAML tree, whole or in part (`.yaml`), or a script or list with overrides of `verl.trainer.main_ppo`.
        rows: number of rows of the data set; required if the file gives the length of the run in epochs.

    Raises:
        ConfigError: the file cannot be read, or lacks a required value.
    """
    keys = read_keys(path)
    unset = {key: names for key, value in keys.items() if (names := find_shell_parts(value))}
    converted = convert(
        VERL_RULES,
        {key: value for key, value in keys.items() if key not in unset},
        source=f"verl's {Path(path).name}",
        initial_values={"pipeline": "rlvr", "algorithm.filters.skip_zero_variance": False},
        caller_values={"rows": rows},
    )
    return replace(
        converted, results=[*converted.results, *(_report_unset(key, keys[key], names) for key, names in unset.items())]
    )


def _report_unset(key: str, value: Any, names: list[str]) -> KeyResult:
    text = (
        f"only a shell can resolve {', '.join(names)}, so verl's default is used: replace it with its value and "
        "convert again"
    )
    return KeyResult(key=key, value=value, in_file=True, outcome="unsupported", text=text)
