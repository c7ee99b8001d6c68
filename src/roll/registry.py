"""Implementations by name, and functions by import path or file; modules are imported only when chosen."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.errors import ConfigError, raised_at

__all__ = ["Registry", "import_object", "load_function", "looked_from", "nearest"]

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


@functools.cache
def load_function(path: str, kind: str) -> Callable[..., Any]:
    """Import a user's function: `package.module:name`, or `path/to/file.py:name`.

    Files and modules are looked for from the current directory on.

    Args:
        path: where it is.
        kind: what it is, for messages: `reward function`.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    place, _, name = path.rpartition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        is_file = place.endswith(".py")
        function = _from_file(Path(place).expanduser(), name, kind) if is_file else import_object(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may fail with anything while it is imported
        place, what = raised_at(error), f"{type(error).__name__}: {error}"
        raise ConfigError(f"{kind} '{path}' cannot be imported ({place}): {what}") from error
    if not callable(function):
        raise ConfigError(f"{kind} '{path}' is of type {type(function).__name__}, not a function.")
    return function


def _from_file(file: Path, name: str, kind: str) -> object:
    if not file.is_file():
        raise ConfigError(f"{kind}: there is no file '{file}'{looked_from(file)}.")
    spec = importlib.util.spec_from_file_location(f"roll_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles in it look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [entry for entry, value in vars(module).items() if not entry.startswith("_") and callable(value)]
        raise ConfigError(f"{kind}: '{file}' has no '{name}'.{nearest(name, known)}")
    return getattr(module, name)


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
