"""Implementations by name; modules are imported only when chosen."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from roll.errors import ConfigError

__all__ = ["Registry", "import_object", "looked_from", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.65)
    return f" Did you mean '{close[0]}'?" if close else ""


def looked_from(path: str | Path) -> str:
    """Where a relative path was looked for, as ` (looked for from '/here')`; empty for an absolute one."""
    return "" if Path(path).expanduser().is_absolute() else f" (looked for from '{os.getcwd()}')"


def import_object(path: str) -> object:
    """Import `package.module:attribute`.

    Raises:
        ConfigError: the path is malformed, the module cannot be imported, or it lacks the attribute.
    """
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"import path '{path}' is malformed: write 'package.module:name'.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"import path '{path}': module '{module_name}' cannot be imported ({error}).") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise ConfigError(f"import path '{path}': '{module_name}' has no '{attribute}'.{hint}") from None


class Registry(Generic[T]):
    """Names to implementations of one seam, given as import paths.

    >>> codecs: Registry[type] = Registry("codec", {"json": "json:JSONDecoder"})
    >>> codecs.get("json").__name__
    'JSONDecoder'
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, path: str) -> None:
        """Add an implementation by its import path, `package.module:name`; a process that uses it imports it there.

        Raises:
            ConfigError: the name is taken by another.
        """
        if self._entries.setdefault(name, path) != path:
            raise ConfigError(f"{self.kind} '{name}' is '{self._entries[name]}': register '{path}' by another name.")

    def path(self, name: str) -> str:
        """The import path of the implementation called `name`, which another process can import.

        Raises:
            ConfigError: there is no such name.
        """
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} '{name}'.{nearest(name, list(self))} Known: {known}.") from None

    def get(self, name: str) -> T:
        """Import and return the implementation called `name`.

        Raises:
            ConfigError: there is no such name.
        """
        return import_object(self.path(name))  # type: ignore[return-value]
