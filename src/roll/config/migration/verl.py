"""A configuration of verl's PPO trainer (Hydra) as one of ROLL."""

from __future__ import annotations

from pathlib import Path

from roll.config.migration.convert import Converted, convert
from roll.config.migration.verl_file import read_keys
from roll.config.migration.verl_rules import VERL

__all__ = ["VERL_COMMIT", "from_verl"]

VERL_COMMIT = "b178a3cd56f5 (2026-01-29)"
"""Of verl, whose keys the rules have."""


def from_verl(path: str | Path, *, rows: int | None = None) -> Converted:
    """Convert a file.

    Args:
        path: a YAML tree, whole or in part (`.yaml`), or a script or list with overrides of `verl.trainer.main_ppo`.
        rows: of the data set, where the file counts epochs.

    Raises:
        ConfigError: the file cannot be read, or lacks what a run needs.
    """
    return convert(
        VERL,
        read_keys(path),
        source=f"verl's {Path(path).name}",
        start={"pipeline": "rlvr", "algorithm.filters.skip_zero_variance": False},
        said_by_caller={"rows": rows},
    )
