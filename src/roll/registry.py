"""Registries of implementations by name; a module is imported only when its implementation is used."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from roll.errors import ConfigError

__all__ = ["Registry", "count_edits", "did_you_mean", "find_similar_names", "format_search_directory", "import_object"]

T = TypeVar("T")


def did_you_mean(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = find_similar_names(name, known)
    return f" Did you mean '{close[0]}'?" if close else ""


def find_similar_names(name: str, known: Iterable[str], *, limit: int = 1, cutoff: float = 0.65) -> list[str]:
    """Return the known names that are similar to `name`, closest first.

    Args:
        name: The name as written.
        known: Names that exist.
        limit: Maximum number of names to return.
        cutoff: Minimum similarity of a name: the ratio of `difflib`, between 0 and 1.
    """
    alike = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=8, cutoff=cutoff)
    return sorted(alike, key=lambda other: count_edits(name, other))[:limit]


def count_edits(text: str, other: str) -> int:
    """Return the number of insertions, deletions, substitutions and swaps of adjacent characters between two strings.

    This is the optimal string alignment distance: `gpro` is one edit from `grpo` and two from `gspo`, which `difflib`
    does not distinguish, since it counts common letters.
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(text, start=1):
        before, last, row = row, before, [i]
        for j, target in enumerate(other, start=1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != target))
            if i > 1 and j > 1 and letter == other[j - 2] and text[i - 2] == target:
                edits = min(edits, last[j - 2] + 1)
            row.append(edits)
    return row[-1]


def format_search_directory(path: str | Path) -> str:
    """Return ` (looked for from '/here')` with the directory against which a relative path was resolved; an empty
    string for an absolute path.
    """
    return "" if Path(path).expanduser().is_absolute() else f" (looked for from '{os.getcwd()}')"


def import_object(path: str) -> object:
    """Import `package.module:attribute`.

    Raises:
        ConfigError: The path is malformed, the module cannot be imported, or it does not have the attribute.
    """
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"import path '{path}' is malformed: expected 'package.module:name'.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"import path '{path}': module '{module_name}' cannot be imported ({error}).") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        hint = did_you_mean(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise ConfigError(f"import path '{path}': '{module_name}' has no '{attribute}'.{hint}") from None


class Registry(Generic[T]):
    """Implementations of one interface by name, given as import paths.

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
        """Add an implementation by its import path, `package.module:name`; it is imported when it is first used.

        Raises:
            ConfigError: The name is already registered with a different path.
        """
        if self._entries.setdefault(name, path) != path:
            raise ConfigError(
                f"{self.kind} '{name}' is already registered as '{self._entries[name]}': register '{path}' under "
                "another name."
            )

    def path(self, name: str) -> str:
        """Return the import path of the implementation called `name`, so that other processes can import it.

        Raises:
            ConfigError: The name is unknown.
        """
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(
                f"unknown {self.kind} '{name}'.{did_you_mean(name, list(self))} Known: {known}."
            ) from None

    def get(self, name: str) -> T:
        """Import and return the implementation called `name`.

        Raises:
            ConfigError: The name is unknown.
        """
        return import_object(self.path(name))  # type: ignore[return-value]
