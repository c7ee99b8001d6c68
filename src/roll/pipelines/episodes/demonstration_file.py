"""Reads the user's demonstrations (seeds and actions) without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.data import EnvironmentData
from roll.config.pipelines.agentic import AgenticConfig
from roll.data.files import open_table
from roll.errors import DataError

__all__ = ["Demonstration", "read_demonstrations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A successful episode that the user describes by its seed and actions."""

    domain: str
    seed: int
    actions: tuple[str, ...]
    location: str
    """Position in the user's file, for messages."""


def read_demonstrations(config: AgenticConfig) -> list[Demonstration]:
    """Read the demonstrations from the configured file; empty if none is configured.

    Raises:
        DataError: The file cannot be read, or a line is not a demonstration in one of the environments.
    """
    if config.anchors is None or config.anchors.demonstrations is None:
        return []
    entries = {entry.domain or entry.environment: entry for entry in config.environments}
    table, found = open_table(Path(config.anchors.demonstrations)), {}
    for index, row in enumerate(table.scan(None)):
        if isinstance(row, DataError):
            raise row
        one = _read_demonstration(row, entries, table.describe_location(index))
        before = found.setdefault((one.domain, one.seed), one)
        if before is not one:
            raise DataError(
                f"{one.location}: the demonstration of '{one.domain}' with seed {one.seed} is already in "
                f"{before.location}: remove one of the two."
            )
    if not found:
        raise DataError(
            f"{table.name} contains no demonstrations: remove anchors.demonstrations, or add one demonstration per "
            "line."
        )
    return list(found.values())


def _read_demonstration(row: Mapping[str, Any], entries: dict[str, EnvironmentData], location: str) -> Demonstration:
    if unknown := set(row) - {"environment", "seed", "actions"}:
        raise DataError(
            f"{location}: unknown keys {sorted(unknown)}: a demonstration has environment, seed and actions."
        )
    name, seed, actions = row.get("environment"), row.get("seed"), row.get("actions")
    if name is None and len(entries) == 1:
        (name,) = entries
    if not isinstance(name, str) or name not in entries:
        raise DataError(f"{location}: environment must be one of {', '.join(map(repr, entries))}, got {name!r}.")
    most, turns = entries[name].num_episodes, entries[name].num_turns
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < most:
        raise DataError(
            f"{location}: seed must be from 0 to {most - 1} (the training episodes of '{name}'), got {seed!r}: change "
            "the seed, or raise num_episodes."
        )
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise DataError(f"{location}: actions must be a list of strings.")
    if not 2 <= len(actions) <= turns:
        raise DataError(f"{location}: a demonstration must have 2 to num_turns ({turns}) actions, got {len(actions)}.")
    return Demonstration(domain=name, seed=seed, actions=tuple(actions), location=location)
