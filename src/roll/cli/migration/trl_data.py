"""Data sets, evaluation and the length of a run, as TRL's scripts define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from roll.cli.migration.rules import (
    LibraryValues,
    Rule,
    UnsupportedValueError,
    companion_rule,
    conversion_rule,
    renamed_key_rule,
    run_all,
)
from roll.cli.migration.trl_common import is_fraction
from roll.errors import ConfigError

__all__ = ["build_data_rules", "build_step_rules"]


def _convert_table(path: str, name: str | None, split: str) -> dict[str, Any]:
    if PurePath(path).suffix in (".jsonl", ".parquet"):
        return {"source": "file", "path": path}
    entry: dict[str, Any] = {"source": "huggingface", "path": path}
    return entry | ({"name": name} if name else {}) | ({"split": split} if split != "train" else {})


def _convert_tables(values: LibraryValues) -> list[dict[str, Any]]:
    if values.datasets:
        entries = []
        for number, one in enumerate(values.datasets):
            odd = sorted(set(one) - {"path", "name", "split"})
            if odd:
                raise UnsupportedValueError(
                    f"the keys {', '.join(odd)} of a dataset are not supported: prepare the rows in a file"
                )
            entry = _convert_table(one["path"], one.get("name"), one.get("split", "train"))
            entries.append(entry | ({"domain": f"set-{number}"} if len(values.datasets) > 1 else {}))
        return entries
    if not values.dataset_name:
        raise ConfigError("one of dataset_name and datasets is required.")
    entry = _convert_table(values.dataset_name, values.dataset_config, values.dataset_train_split)
    if values.eval_strategy != "no" and entry["source"] == "huggingface":
        entry["held_out_split"] = values.dataset_test_split
    return [entry]


def build_data_rules(convert_more: Callable[[LibraryValues], Mapping[str, Any]]) -> list[Rule]:
    """Return the rules for TRL's data set keys; `convert_more` computes additional ROLL keys for every data set."""

    def convert(values: LibraryValues) -> Mapping[str, Any]:
        more, tables = run_all(lambda: convert_more(values), lambda: _convert_tables(values))
        evaluated = values.eval_strategy != "no"
        return {
            "data": [
                entry | dict(more) | ({} if evaluated or "held_out_split" in entry else {"held_out": 0.0})
                for entry in tables
            ]
        }

    return [
        conversion_rule("dataset_name", None, ["data"], convert, "without evaluation in TRL, no rows are held out"),
        *(
            companion_rule(key, default, ["data"], "with dataset_name")
            for key, default in (
                ("dataset_config", None),
                ("dataset_train_split", "train"),
                ("dataset_test_split", "test"),
            )
        ),
        companion_rule("datasets", [], ["data"], "instead of dataset_name"),
    ]


def _convert_eval_every(value: Any, values: LibraryValues) -> int:
    if values.eval_strategy != "steps":
        return 0
    steps = float(value or values.logging_steps)
    if is_fraction(steps):
        raise UnsupportedValueError("a fraction of all steps is not supported: set evaluation.every_num_steps")
    return max(1, round(steps / values.updates_per_step(values)))


def _convert_warmup(value: float, values: LibraryValues) -> int:
    """Return the warm-up in ROLL steps; TRL gives it as a number of optimizer steps, or as a fraction of all steps."""
    if not value:
        return 0
    updates = values.updates_per_step(values)
    if not is_fraction(float(value)):
        return math.ceil(value / updates)
    total = values.total_steps(values)
    if total is None:
        raise UnsupportedValueError("a fraction of all steps depends on the number of rows: set training.warmup_steps")
    return math.ceil(float(value) * total)


def build_step_rules() -> list[Rule]:
    """Return the rules for warm-up and evaluation, which TRL counts in optimizer steps.

    The caller must add the functions `updates_per_step` and `total_steps` to the values: the rules call them.
    """
    return [
        renamed_key_rule(
            "warmup_steps",
            0,
            "training.warmup_steps",
            _convert_warmup,
            "in steps of ROLL; a value below 1 is a fraction of all steps",
        ),
        renamed_key_rule("eval_steps", None, "evaluation.every_num_steps", _convert_eval_every),
        companion_rule("eval_strategy", "no", ["evaluation.every_num_steps", "data"], "`no` evaluates only at the end"),
        renamed_key_rule("eval_on_start", False, "evaluation.before_training", lambda value, _: bool(value)),
    ]
