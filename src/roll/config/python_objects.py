"""Configurations with data and rewards that a script or a notebook passes as Python objects.

    config, data=rows, reward=function ──► a configuration whose `data` contain them (`PythonData`, `PythonReward`)

Objects are not written to files: the run directory contains the configuration without them, and they must be passed
again when a run is resumed. Rows are then compared with the checkpoint by their fingerprint, like those of any source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll.config.data import DataConfig
from roll.config.examples import ExampleDataConfig
from roll.config.load import ConfigSource, Overrides, load_config, load_plain_tree
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.rewards import PythonReward
from roll.config.run import RunConfig
from roll.config.sources import PythonTable
from roll.config.supervised import SupervisedConfig
from roll.errors import ConfigError

__all__ = ["Reward", "Rows", "load_with_python_objects", "with_python_objects"]

Rows = Iterable[Any]
"""Rows of prompts (dictionaries with a prompt and, if rewards need it, an answer; or strings) or of examples."""
Reward = Any
"""A function `(text, answer, metadata) -> float`, a reward's type or settings, or a list of these."""


def load_with_python_objects(
    config: ConfigSource, overrides: Overrides, rows: Rows | None, held_out: Rows | None, reward: Reward | None
) -> RunConfig:
    """Load a configuration whose data and rewards may be Python objects.

    Args:
        config: see `load_config`.
        overrides: see `load_config`.
        rows: training rows, which replace the configuration's sources, or the rows of its source `source: python`.
        held_out: rows for evaluation only.
        reward: replaces the reward of every source.

    Raises:
        ConfigError: the arguments are incompatible; the message describes how to pass them.
    """
    if rows is None and held_out is not None:
        raise ConfigError("held_out= requires data=: also pass the training rows as data=.")
    if rows is None and reward is None:
        return load_config(config, overrides)
    tree = load_plain_tree(config)
    if reward is not None and _is_supervised(tree):
        raise ConfigError(
            f"reward= is not supported with the pipeline {tree['pipeline']}, which does not score answers: remove "
            "reward=."
        )
    rows, held_out = _convert_to_records(rows), _convert_to_records(held_out)
    if rows is not None:
        tree["data"] = _build_entries(tree, rows, reward)
    if reward is not None:
        for entry in _get_data(tree):
            entry["reward"] = [_build_settings(part) for part in _split_reward(reward)]
    return with_python_objects(load_config(tree, overrides), rows, held_out, reward)


def with_python_objects(
    config: RunConfig, rows: Rows | None, held_out: Rows | None, reward: Reward | None
) -> RunConfig:
    """Return a copy of a loaded configuration with Python objects inserted.

    Raises:
        ConfigError: there are rows, but no entry of `data` accepts Python objects; or an entry of `data` does
            not have as many `python` rewards without a function as `reward` has functions.
    """
    rows, held_out = _convert_to_records(rows), _convert_to_records(held_out)
    functions = [function for part in _split_reward(reward) if (function := _get_function(part)) is not None]
    entries: list[DataConfig | ExampleDataConfig] = []
    used = False
    for entry in config.get_section("data", list):
        if hasattr(entry, "reward"):
            entry = entry.model_copy(update={"reward": _fill_rewards(entry, functions)})
        if rows is not None and isinstance(entry, PythonTable) and entry.function is None:
            entry, used = entry.with_rows(rows, held_out), True
        entries.append(entry)
    if rows is not None and not used:
        raise ConfigError("data= is set, but this run does not read Python objects: remove data=.")
    return config.model_copy(update={"data": entries})


def _fill_rewards(entry: DataConfig, functions: list[Callable[..., Any]]) -> list[Any]:
    places = [part for part in entry.reward if isinstance(part, PythonReward) and part.function is None]
    if functions and len(places) != len(functions):
        raise ConfigError(
            f"reward= must have {len(places)} functions for the rewards of '{entry.domain or entry.source}', got "
            f"{len(functions)}: pass the functions of the original run."
        )
    rest = iter(functions)
    return [
        part.with_object(next(rest)) if functions and isinstance(part, PythonReward) and part.function is None else part
        for part in entry.reward
    ]


def _build_entries(tree: dict[str, Any], rows: Rows, reward: Reward | None) -> list[Any]:
    """Return the configuration's sources if one of them is `source: python` (it gets the rows), else one new source."""
    written: Any = tree.get("data")
    places = [e for e in written if isinstance(e, dict) and e.get("source") == "python"] if _is_list(written) else []
    places = [entry for entry in places if entry.get("function") is None]
    if len(places) > 1:
        raise ConfigError("data= can replace only one source, but several sources are `source: python`: keep only one.")
    if places:
        return written
    if _is_supervised(tree):
        return [{"source": "python"}]
    if reward is None:
        raise ConfigError(
            "data= replaces the configuration's sources and their rewards, so reward= must be set as well: a function "
            "of (text, answer, metadata), or a reward's type such as 'math'."
        )
    return [{"source": "python", "answer_key": "answer" if _has_answers(rows) else None}]


def _is_supervised(tree: dict[str, Any]) -> bool:
    name = tree.get("pipeline", DEFAULT_PIPELINE)
    return name in PIPELINES and issubclass(PIPELINES.get(name), SupervisedConfig)


def _convert_to_records(rows: Any) -> Any:
    """Convert a data frame to dictionaries, one per row; other rows are returned unchanged."""
    return rows.to_dict("records") if hasattr(rows, "iloc") and hasattr(rows, "to_dict") else rows


def _has_answers(rows: Rows) -> bool:
    """Return whether the first row has an answer; true for an iterable that can be read only once."""
    if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")) or isinstance(rows, Mapping | str):
        return True
    if not len(rows):  # type: ignore[arg-type]
        return True  # the error is raised when they are read
    first = rows[0]  # type: ignore[index]
    return not isinstance(first, str) and (not isinstance(first, Mapping) or "answer" in first)


def _get_data(tree: dict[str, Any]) -> list[dict[str, Any]]:
    entries = tree.get("data") or []
    if not _is_list(entries) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("reward= requires data, but the configuration has none: also pass the rows as data=.")
    return entries


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _split_reward(reward: Reward | None) -> list[Any]:
    if reward is None:
        return []
    return list(reward) if isinstance(reward, list | tuple) else [reward]


def _get_function(part: Any) -> Callable[..., Any] | None:
    """Return the function of one part of a reward: the part itself or its setting `function`; `None` if it has none."""
    if isinstance(part, Mapping):
        part = part.get("function")
    return part if callable(part) else None


def _build_settings(part: Any) -> Any:
    """Build the settings of one part of a reward; for a function, they contain its name.

    Raises:
        ConfigError: The part is neither a function nor a reward's type or settings.
    """
    function = _get_function(part)
    if function is None:
        if isinstance(part, str | Mapping):
            return part
        raise ConfigError(
            "reward= must be a function of (text, answer, metadata), a reward's type such as 'math', its settings, or "
            f"a list of these, got {type(part).__name__}."
        )
    name = getattr(function, "__name__", type(function).__name__)
    own = {"name": name} if name.isidentifier() else {}
    return {**own, **(part if isinstance(part, Mapping) else {}), "type": "python", "function": None}
