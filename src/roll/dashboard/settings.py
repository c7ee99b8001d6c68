"""A run's resolved configuration by dotted key, and the differences between the configurations of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.document import format_path, parse
from roll.config.former_names import rename_config, rename_setting
from roll.config.history import CONFIG_FILE, HISTORY_FILE
from roll.errors import ConfigError, RunDirectoryError
from roll.tracking.reading.files import FileStamp, SafeDirectory

__all__ = ["Settings", "find_differences", "to_finite_number"]

_MAX_FILE_BYTES = 2**20
_MAX_KEYS = 20_000


class Settings:
    """The settings in `config.yaml` and `config_history.yaml` of one run; `refresh` reads changed files again."""

    def __init__(self, run_dir: SafeDirectory) -> None:
        self._run_dir = run_dir
        self._stamps: tuple[FileStamp | None, FileStamp | None] | None = None
        self.problem = ""
        self.text = ""
        self.values: dict[str, Any] = {}
        """Values by dotted key; an empty list or mapping is treated as a value."""
        self.history: list[Any] = []

    def refresh(self) -> None:
        """Read changed files. If a file cannot be read, `problem` contains the reason."""
        stamps = self._run_dir.get_stamp(CONFIG_FILE), self._run_dir.get_stamp(HISTORY_FILE)
        if stamps == self._stamps:
            return
        self._stamps, self.problem, self.text, self.values, self.history = stamps, "", "", {}, []
        try:
            self.text = self._run_dir.read(CONFIG_FILE, limit=_MAX_FILE_BYTES).decode("utf-8", "replace")
            tree = _parse_yaml(self.text, CONFIG_FILE)
            if not isinstance(tree, dict):
                raise RunDirectoryError(f"'{CONFIG_FILE}' must be a mapping of keys to values.")
            tree = rename_config(tree)
            _flatten(tree, (), self.values)
            if stamps[1] is not None:
                history = _parse_yaml(
                    self._run_dir.read(HISTORY_FILE, limit=_MAX_FILE_BYTES).decode("utf-8", "replace"), HISTORY_FILE
                )
                self.history = [_apply_renames(entry) for entry in history] if isinstance(history, list) else []
        except RunDirectoryError as error:
            self.problem = str(error)

    def get_text(self, key: str) -> str:
        """Return the value of `key` as readable text; empty if it is not set."""
        value = self.values.get(key)
        return "" if value is None else str(value)[:500]

    def get_number(self, key: str) -> float | None:
        """Return the value of `key`; `None` if it is not a finite number."""
        return to_finite_number(self.values.get(key))


def _apply_renames(entry: Any) -> Any:
    """Replace former names of settings in an entry of the configuration history by current names."""
    changed = entry.get("changed") if isinstance(entry, dict) else None
    if not isinstance(changed, dict):
        return entry
    return {**entry, "changed": {rename_setting(str(key), None)[0]: values for key, values in changed.items()}}


def to_finite_number(value: Any) -> float | None:
    """Return a value if it is a finite number that fits a float, otherwise `None`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and abs(value) <= sys.float_info.max else None


def find_differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, each with the value in every run; `None` if it is missing."""
    keys = dict.fromkeys(key for values in runs for key in values)
    found = ({"key": key, "values": [values.get(key) for values in runs]} for key in keys)
    return [entry for entry in found if len({json.dumps(value) for value in entry["values"]}) > 1]


def _parse_yaml(text: str, name: str) -> Any:
    try:
        return parse(text, name)[0]
    except (ConfigError, ValueError, RecursionError, OverflowError) as error:
        raise RunDirectoryError(f"{str(error)[:500] or type(error).__name__}") from None


def _flatten(value: Any, path: tuple[str | int, ...], values: dict[str, Any]) -> None:
    if len(values) > _MAX_KEYS:
        raise RunDirectoryError(f"'{CONFIG_FILE}' has more than {_MAX_KEYS:,} values, too many to show.")
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(inner, (*path, key), values)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            _flatten(inner, (*path, index), values)
    else:
        values[format_path(path)] = value
