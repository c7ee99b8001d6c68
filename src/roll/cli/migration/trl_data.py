"""Data sets, evaluation and the length of a run, as TRL's scripts define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from roll.cli.migration.rules import Rule, UnsupportedValue, Values, converted_with, handled_by, moved, run_all
from roll.cli.migration.trl_common import is_fraction
from roll.errors import ConfigError

__all__ = ["data_rules", "length_rules"]


def _table(path: str, name: str | None, split: str) -> dict[str, Any]:
    if PurePath(path).suffix in (".jsonl", ".parquet"):
        return {"source": "file", "path": path}
    entry: dict[str, Any] = {"source": "huggingface", "path": path}
    return entry | ({"name": name} if name else {}) | ({"split": split} if split != "train" else {})


def _tables(values: Values) -> list[dict[str, Any]]:
    if values.datasets:
        entries = []
        for number, one in enumerate(values.datasets):
            odd = sorted(set(one) - {"path", "name", "split"})
            if odd:
                raise UnsupportedValue(f"a data set's {', '.join(odd)}: prepare the rows and name their file")
            entry = _table(one["path"], one.get("name"), one.get("split", "train"))
            entries.append(entry | ({"domain": f"set-{number}"} if len(values.datasets) > 1 else {}))
        return entries
    if not values.dataset_name:
        raise ConfigError("neither dataset_name nor datasets names the data.")
    entry = _table(values.dataset_name, values.dataset_config, values.dataset_train_split)
    if values.eval_strategy != "no" and entry["source"] == "huggingface":
        entry["held_out_split"] = values.dataset_test_split
    return [entry]


def data_rules(further: Callable[[Values], Mapping[str, Any]]) -> list[Rule]:
    """Return the rules of the data sets; `further` returns additional keys for each data set."""

    def convert(values: Values) -> Mapping[str, Any]:
        more, tables = run_all(lambda: further(values), lambda: _tables(values))
        evaluated = values.eval_strategy != "no"
        return {
            "data": [
                entry | dict(more) | ({} if evaluated or "held_out_split" in entry else {"held_out": 0.0})
                for entry in tables
            ]
        }

    return [
        converted_with("dataset_name", None, ["data"], convert, "all rows are trained where TRL evaluates on none"),
        *(
            handled_by(key, default, ["data"], "with dataset_name")
            for key, default in (
                ("dataset_config", None),
                ("dataset_train_split", "train"),
                ("dataset_test_split", "test"),
            )
        ),
        handled_by("datasets", [], ["data"], "instead of dataset_name"),
    ]


def _every(value: Any, values: Values) -> int:
    if values.eval_strategy != "steps":
        return 0
    steps = float(value or values.logging_steps)
    if is_fraction(steps):
        raise UnsupportedValue("a share of all steps: ROLL counts steps")
    return max(1, round(steps / values.updates_per_step(values)))


def _warmup(value: float, values: Values) -> int:
    """Convert the warm-up to steps of ROLL; TRL counts optimizer steps, or takes a fraction of all."""
    if not value:
        return 0
    updates = values.updates_per_step(values)
    if not is_fraction(float(value)):
        return math.ceil(value / updates)
    total = values.total_steps(values)
    if total is None:
        raise UnsupportedValue("a share of all steps, whose number depends on the data: set training.warmup_steps")
    return math.ceil(float(value) * total)


def length_rules() -> list[Rule]:
    """Return the rules of warm-up and evaluation; the values need `updates_per_step` and `total_steps`."""
    return [
        moved("warmup_steps", 0, "training.warmup_steps", _warmup, "in steps of ROLL; a share is one of all steps"),
        moved("eval_steps", None, "evaluation.every_num_steps", _every),
        handled_by("eval_strategy", "no", ["evaluation.every_num_steps", "data"], "`no`: only at the end"),
        moved("eval_on_start", False, "evaluation.before_training", lambda value, _: bool(value)),
    ]
