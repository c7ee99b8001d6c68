"""Data and rewards that a script or a notebook passes as Python objects, and where they go.

    config, data=rows, reward=function ──► a configuration whose `data` carry them (`PythonData`, `PythonReward`)

No file keeps an object: the run directory holds the configuration without them, and they must be passed again when a
run is resumed. Rows are then compared with the checkpoint by their fingerprint, like those of any source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll.config.data import DataConfig
from roll.config.examples import ExampleDataConfig
from roll.config.load import ConfigSource, Overrides, load_config, plain_tree
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.rewards import PythonReward
from roll.config.run import RunConfig
from roll.config.sources import PythonTable
from roll.config.supervised import SupervisedConfig
from roll.errors import ConfigError

__all__ = ["Reward", "Rows", "load_with_python_objects", "with_python_objects"]

Rows = Iterable[Any]
"""Dictionaries with a prompt and, if rewards need it, an answer; or texts. Examples are rows as in files."""
Reward = Any
"""A function `(text, answer, metadata) -> float`, a reward's type or settings, or a list of these."""


def load_with_python_objects(
    config: ConfigSource, overrides: Overrides, rows: Rows | None, held_out: Rows | None, reward: Reward | None
) -> RunConfig:
    """Load a configuration whose data and rewards may be objects.

    Args:
        config: as for `load_config`.
        overrides: as for `load_config`.
        rows: training rows, which replace the configuration's sources, or the rows of its source `source: python`.
        held_out: rows for evaluation only.
        reward: replaces the reward of every source.

    Raises:
        ConfigError: the arguments do not fit together; the message tells how to pass them.
    """
    if rows is None and held_out is not None:
        raise ConfigError("held_out= needs data=: pass the training rows as data= as well.")
    if rows is None and reward is None:
        return load_config(config, overrides)
    tree = plain_tree(config)
    if reward is not None and _learns_from_examples(tree):
        raise ConfigError(
            f"reward= says how answers are scored, but the pipeline {tree['pipeline']} learns from examples and scores "
            "nothing: leave it out."
        )
    rows, held_out = _records(rows), _records(held_out)
    if rows is not None:
        tree["data"] = _entries(tree, rows, reward)
    if reward is not None:
        for entry in _data_of(tree):
            entry["reward"] = [_settings(part) for part in _parts(reward)]
    return with_python_objects(load_config(tree, overrides), rows, held_out, reward)


def with_python_objects(
    config: RunConfig, rows: Rows | None, held_out: Rows | None, reward: Reward | None
) -> RunConfig:
    """Return a loaded configuration with these Python objects in their places.

    Raises:
        ConfigError: the configuration has no place for them, or another number of places.
    """
    rows, held_out = _records(rows), _records(held_out)
    functions = [function for part in _parts(reward) if (function := _function(part)) is not None]
    entries: list[DataConfig | ExampleDataConfig] = []
    used = False
    for entry in config.section("data", list):
        if hasattr(entry, "reward"):
            entry = entry.model_copy(update={"reward": _filled(entry, functions)})
        if rows is not None and isinstance(entry, PythonTable) and entry.function is None:
            entry, used = entry.with_rows(rows, held_out), True
        entries.append(entry)
    if rows is not None and not used:
        raise ConfigError("data= was given, but this run's data are not Python objects: leave it out.")
    return config.model_copy(update={"data": entries})


def _filled(entry: DataConfig, functions: list[Callable[..., Any]]) -> list[Any]:
    places = [part for part in entry.reward if isinstance(part, PythonReward) and part.function is None]
    if functions and len(places) != len(functions):
        raise ConfigError(
            f"reward= has {len(functions)} functions, but the rewards of '{entry.domain or entry.source}' have "
            f"{len(places)} places for one: give as many as the run began with."
        )
    rest = iter(functions)
    return [
        part.with_object(next(rest)) if functions and isinstance(part, PythonReward) and part.function is None else part
        for part in entry.reward
    ]


def _entries(tree: dict[str, Any], rows: Rows, reward: Reward | None) -> list[Any]:
    """Return the prompt sources, one of which takes the rows."""
    written: Any = tree.get("data")
    places = [e for e in written if isinstance(e, dict) and e.get("source") == "python"] if _is_list(written) else []
    places = [entry for entry in places if entry.get("function") is None]
    if len(places) > 1:
        raise ConfigError("data= are the rows of one source, but several have `source: python`: leave one of them.")
    if places:
        return written
    if _learns_from_examples(tree):
        return [{"source": "python"}]
    if reward is None:
        raise ConfigError(
            "data= takes the place of the configuration's sources, so reward= has to say how their answers are scored: "
            "a function of (text, answer, metadata), or a reward's type such as 'math'."
        )
    return [{"source": "python", "answer_key": "answer" if _have_answers(rows) else None}]


def _learns_from_examples(tree: dict[str, Any]) -> bool:
    name = tree.get("pipeline", DEFAULT_PIPELINE)
    return name in PIPELINES and issubclass(PIPELINES.get(name), SupervisedConfig)


def _records(rows: Any) -> Any:
    """Return the rows, with those of a data frame as dictionaries."""
    return rows.to_dict("records") if hasattr(rows, "iloc") and hasattr(rows, "to_dict") else rows


def _have_answers(rows: Rows) -> bool:
    """Return whether the first row has an answer; an iterable that can be read only once is assumed to have them."""
    if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")) or isinstance(rows, Mapping | str):
        return True
    if not len(rows):  # type: ignore[arg-type]
        return True  # the error is raised when they are read
    first = rows[0]  # type: ignore[index]
    return not isinstance(first, str) and (not isinstance(first, Mapping) or "answer" in first)


def _data_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    entries = tree.get("data") or []
    if not _is_list(entries) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("reward= needs data, but the configuration has no data: pass the rows as data= as well.")
    return entries


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _parts(reward: Reward | None) -> list[Any]:
    if reward is None:
        return []
    return list(reward) if isinstance(reward, list | tuple) else [reward]


def _function(part: Any) -> Callable[..., Any] | None:
    """Return the reward function, or the one under `function` in settings; `None` if the part has no function."""
    if isinstance(part, Mapping):
        part = part.get("function")
    return part if callable(part) else None


def _settings(part: Any) -> Any:
    """Return the settings of one part of the reward; those of a function hold its name."""
    function = _function(part)
    if function is None:
        if isinstance(part, str | Mapping):
            return part
        raise ConfigError(
            f"reward= is a function of (text, answer, metadata), a reward's type such as 'math', its settings, or a "
            f"list of these; got {type(part).__name__}."
        )
    name = getattr(function, "__name__", type(function).__name__)
    own = {"name": name} if name.isidentifier() else {}
    return {**own, **(part if isinstance(part, Mapping) else {}), "type": "python", "function": None}
