"""The history of a run's configuration: the settings, and the steps from which they were in effect.

    config.yaml            the current configuration
    config_history.yaml    a list, oldest first:  from_step: 401
                                                  overrides: [training.num_steps=1000]
                                                  changed: {training.num_steps: {from: 400, to: 1000}}
    .origin.yaml           where the run started, and config.yaml as ROLL wrote it, to detect a user's edits

Invariant: undoing the changes of every entry whose `from_step` is after N gives the configuration of step N. A run
without changes has no history.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.config.document import dump, parse, read
from roll.config.former_names import rename_config, rename_setting
from roll.errors import ConfigError, DataError, RunDirectoryError
from roll.records import validate_record

__all__ = [
    "CONFIG_FILE",
    "HISTORY_FILE",
    "ORIGIN_FILE",
    "HistoryEntry",
    "Origin",
    "build_transition_history",
    "dump_entries",
    "extend_history",
    "find_differences",
    "find_first_recorded_config",
    "find_user_edits",
    "format_override",
    "get_value",
    "read_config",
    "read_history",
    "read_origin",
    "restore_config",
]

CONFIG_FILE = "config.yaml"
HISTORY_FILE = "config_history.yaml"
ORIGIN_FILE = ".origin.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """A change to a run's settings, in effect from step `from_step` on."""

    from_step: int
    overrides: Sequence[str] | None = None
    """Overrides as the user wrote them; `None` if the entry only undoes another entry."""
    changed: Mapping[str, Mapping[str, Any]]
    """Dotted keys with their values `from` and `to`; a missing value means that the key did not exist."""

    @property
    def fields(self) -> dict[str, Any]:
        """The entry as written to the file."""
        overrides = {} if self.overrides is None else {"overrides": self.overrides}
        return {"from_step": self.from_step, **overrides, "changed": self.changed}


_MISSING: Any = object()


def read_config(run: Path) -> dict[str, Any]:
    """Read the configuration in a run directory, with former names of keys replaced.

    Raises:
        ConfigError: `config.yaml` cannot be read.
    """
    return rename_config(read(run / CONFIG_FILE).tree)


def read_history(run: Path) -> list[HistoryEntry]:
    """Read the changes to the settings of the run in `run`, oldest first; empty if there is no history file.

    Raises:
        RunDirectoryError: the file is not a valid history file.
    """
    path = run / HISTORY_FILE
    if not path.is_file():
        return []
    try:
        entries, _ = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise RunDirectoryError(f"'{path}' cannot be read: {error}") from None
    try:
        found = [
            validate_record(HistoryEntry, entry, "a change")
            for entry in (entries if isinstance(entries, list) else [entries])
        ]
    except DataError as error:
        raise RunDirectoryError(
            f"'{path}' is not a valid history of settings ({str(error).rstrip('.')}): restore it, or remove it; "
            f"'{CONFIG_FILE}' then applies to all steps."
        ) from None
    return [
        replace(entry, changed=dict(_rename_change(*change) for change in entry.changed.items())) for entry in found
    ]


def _rename_change(key: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key of a changed setting and both of its values, with former names replaced."""
    return rename_setting(key, None)[0], {name: rename_setting(key, value)[1] for name, value in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A run's configuration as ROLL last wrote it, and the directory in which the run started."""

    directory: str
    """The working directory in which the run started."""
    config: dict[str, Any]
    """The content of `config.yaml` when ROLL last wrote it."""


def read_origin(run: Path) -> Origin | None:
    """Read the origin of a run; return `None` for a run of an older version.

    Raises:
        RunDirectoryError: the file is malformed.
    """
    path = run / ORIGIN_FILE
    if not path.is_file():
        return None
    try:
        tree, _ = parse(path.read_text(encoding="utf-8"), str(path))
        match tree:
            case {"directory": str(directory), "config": dict(config)}:
                return Origin(directory=directory, config=rename_config(config))
        problem = "the key 'directory' or 'config' is missing"
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        problem = str(error)
    raise RunDirectoryError(f"'{path}' cannot be read ({problem}): restore it, or remove it.")


def find_user_edits(run: Path) -> list[tuple[str, Any, Any]]:
    """Return the differences between a run's `config.yaml` and the content that ROLL wrote there.

    Returns:
        Dotted keys with both values (`None` for a missing value); empty for a run of an older version.

    Raises:
        ConfigError: `config.yaml` cannot be read.
        RunDirectoryError: the record of the content that ROLL wrote cannot be read.
    """
    origin = read_origin(run)
    return [] if origin is None else list(find_differences(origin.config, read_config(run), ""))


def format_override(key: str, value: Any) -> str:
    """Format the override that sets a key to a value, `key=value`."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def dump_entries(history: Sequence[HistoryEntry]) -> str:
    """Dump a history as the text of a history file."""
    return "".join("- " + dump(entry.fields).replace("\n", "\n  ").rstrip(" ") for entry in history) or "[]\n"


def restore_config(current: Mapping[str, Any], history: Sequence[HistoryEntry], step: int) -> dict[str, Any]:
    """Restore the resolved configuration that was in effect in a step."""
    tree = copy.deepcopy(dict(current))
    for entry in reversed(history):
        if entry.from_step > step:
            for key, values in entry.changed.items():
                _set_value(tree, key, values.get("from", _MISSING))
    return tree


def extend_history(
    current: Mapping[str, Any],
    history: Sequence[HistoryEntry],
    step: int,
    new_config: Mapping[str, Any],
    overrides: Sequence[str],
) -> list[HistoryEntry]:
    """Extend the history of a run that continues after step `step` with the configuration `new_config`.

    Entries that took effect after the checkpoint are removed, because the steps after the checkpoint run again. The
    overrides of the removed entries become part of the new entry, which is in effect from the next step on.

    Args:
        current: the configuration in the run directory.
        history: the history in the run directory.
        step: the step of the checkpoint from which the run continues.
        new_config: the configuration with which the run continues.
        overrides: the user's overrides, which turned `current` into `new_config`.
    """
    kept = [entry for entry in history if entry.from_step <= step]
    dropped = [text for entry in history if entry.from_step > step for text in entry.overrides or ()]
    before = restore_config(current, history, step)
    changed = {
        key: {name: value for name, value in (("from", old), ("to", new)) if value is not _MISSING}
        for key, old, new in find_differences(before, new_config, "", missing=_MISSING)
    }
    if not changed:
        return kept
    return [*kept, HistoryEntry(from_step=step + 1, overrides=[*dropped, *overrides], changed=changed)]


def build_transition_history(
    old_history: Sequence[HistoryEntry], new_history: Sequence[HistoryEntry], step: int
) -> list[HistoryEntry]:
    """Build a history that is valid both with the old and with the new configuration of a run.

    The run continues after step `step`; its configuration had the history `old_history` and gets the history
    `new_history`. The transition history is written before the configuration is replaced, so that the run directory is
    consistent even if the process crashes in between.
    """
    return [*new_history, *(replace(entry, overrides=None) for entry in old_history if entry.from_step > step)]


def find_first_recorded_config(run: Path) -> dict[str, Any]:
    """Return the configuration with which the run first recorded rollouts; without one, the current configuration."""
    current, history = read_config(run), read_history(run)
    for step in (0, *(entry.from_step for entry in history)):
        tree = restore_config(current, history, step)
        if get_value(tree, "tracking.record_rollouts"):
            return tree
    return current


def find_differences(before: Any, after: Any, key: str, *, missing: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Yield each dotted key below `key` whose values differ, with both values; `missing` stands for an absent key.

    Lists, and mappings with keys that contain a dot, are compared as a whole.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping) and not any("." in k for k in {*before, *after}):
        for name in sorted({*before, *after}):
            inner = f"{key}.{name}" if key else name
            yield from find_differences(before.get(name, missing), after.get(name, missing), inner, missing=missing)
    elif before != after:
        yield key, before, after


def get_value(tree: Any, key: str) -> Any:
    """Return the value of a dotted key; `None` if the tree has no such key."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    inner = tree
    for part in path:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    if value is _MISSING:
        inner.pop(last, None)
    else:
        inner[last] = copy.deepcopy(value)
