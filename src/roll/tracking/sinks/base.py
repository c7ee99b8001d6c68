"""The interface of every tracker, and its inputs."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from roll.errors import ConfigError
from roll.tracking import atomic
from roll.version import build_install_command

if TYPE_CHECKING:
    from roll.tracking.run_directory import RunDirectory

__all__ = ["PathWatcher", "RolloutTable", "Sink", "SinkArguments", "flatten", "get_run_id", "load_client"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkArguments:
    """Arguments of a sink's constructor: the run, the tracker's project, and the configuration."""

    run: RunDirectory
    project: str
    """The tracker's project for the run: the value of the tracker's key in `tracking`."""
    settings: Mapping[str, Any]
    """The resolved configuration."""
    resumed_at: int
    """Step after which the run continues; -1 for a new run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTable:
    """A table of some rollouts of a step or an evaluation, with plain cells without control characters."""

    name: str
    """`rollouts/train` or `rollouts/evaluation`."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


class Sink(Protocol):
    """Sends data to one run of a tracker. `SINKS` lists the classes, which are built from `SinkArguments`; a single
    thread calls all methods.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite metrics of a step or of an evaluation."""
        ...

    def log_table(self, step: int, table: RolloutTable) -> None:
        """Send some rollouts of a step or of an evaluation."""
        ...

    def close(self) -> None:
        """Send queued data, and close the client."""
        ...


class PathWatcher:
    """Detects the removal of the file or directory to which a tracker's client writes.

    Most clients keep writing to a removed file without an error.

    Args:
        path: A file or directory, which the client may create later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._read_inode()

    def check(self) -> None:
        """Check that the path still exists.

        Raises:
            FileNotFoundError: The path was removed or replaced.
        """
        now = self._read_inode()
        if self._inode is None:
            self._inode = now
        elif now != self._inode:
            raise FileNotFoundError(f"'{self._path}', to which the tracker writes this run, was removed or replaced")

    def _read_inode(self) -> int | None:
        try:
            return self._path.stat().st_ino
        except OSError:
            return None


def load_client(name: str) -> ModuleType:
    """Import and return the package `name` of a tracker.

    Raises:
        ConfigError: The package is not installed; the message has the install command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracking.{name} is set, but the package '{name}' cannot be imported ({error}). "
            f"Install it with `{build_install_command(name)}`, or disable the tracker: `tracking.{name}=null`."
        ) from error


def get_run_id(run: RunDirectory) -> str:
    """Return the run's id for trackers: 21 hexadecimal digits that stay the same after a resume."""
    path = run.path / ".tracking-id"
    if not path.is_file():
        atomic.write_text(path, secrets.token_hex(11)[:21])
    return path.read_text(encoding="utf-8").strip()


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key, such as `data.0.source`."""
    leaves: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        inner = [(f"{prefix}.{key}" if prefix else str(key), entry) for key, entry in entries]
        for key, entry in inner:
            walk(key, entry)
        if not inner and prefix:
            leaves[prefix] = value

    walk("", settings)
    return leaves
