"""Implementations that users add to a registry, without a change of this package.

    hf                         a name of the registry itself
    fast                       a name that an installed package registers as an entry point of the registry's group
    engines/mine.py:MyEngine   a file of the user, or `package.module:MyEngine`

A process on another machine finds the same implementation: a name's import path is resolved where the run begins
(`ExtensibleRegistry.path`), and `roll.user_code` documents where files are searched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TypeVar, cast

from roll.errors import ConfigError
from roll.registry import Registry, import_object, nearest
from roll.user_code import load_function

__all__ = ["ExtensibleRegistry"]

T = TypeVar("T")


class ExtensibleRegistry(Registry[T]):
    """A registry that installed packages and user files can extend.

    Args:
        kind: Kind of the implementations, for messages: `inference engine`.
        entries: Import paths by name.
        group: Group of entry points that extend it, such as `roll.engines`. Built-in names are never replaced.
    """

    def __init__(self, kind: str, entries: dict[str, str], group: str) -> None:
        super().__init__(kind, entries)
        self.group = group

    def __contains__(self, name: str) -> bool:
        return ":" in name or name in self._entries or name in _installed(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from (name for name in _installed(self.group) if name not in self._entries)

    @property
    def built_in(self) -> tuple[str, ...]:
        """Built-in names, in order, without those of entry points."""
        return tuple(self._entries)

    def path(self, name: str) -> str:
        """Return the import path of the implementation called `name`, which another process can import.

        Raises:
            ConfigError: The name is unknown, or several packages register it.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return name
        found = _installed(self.group).get(name, ())
        if len(found) > 1:
            raise ConfigError(
                f"{self.kind} '{name}' is of several installed packages ({', '.join(found)}): write its import path, "
                "package.module:name."
            )
        if found:
            return found[0]
        known = "".join(f"{each}, " for each in sorted(self))
        raise ConfigError(
            f"unknown {self.kind} '{name}'.{nearest(name, list(self))} Known: {known}path/to/file.py:Name, "
            "package.module:Name."
        )

    def checked(self, name: str) -> str:
        """Check a name during the validation of a configuration, and return it unchanged.

        Raises:
            ValueError: The name is unknown.
        """
        try:
            self.path(name)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return name

    def get(self, name: str) -> T:
        """Import and return the implementation called `name`.

        Raises:
            ConfigError: The name is unknown, or the implementation cannot be imported.
        """
        path = self.path(name)
        if name in self._entries:
            return cast(T, import_object(path))
        return cast(T, load_function(path, self.kind))


@functools.cache
def _installed(group: str) -> Mapping[str, tuple[str, ...]]:
    """Return the import paths that installed packages register in a group of entry points, by name."""
    found: dict[str, dict[str, None]] = {}
    for point in metadata.entry_points(group=group):
        found.setdefault(point.name, {})[f"{point.module}:{point.attr}"] = None
    return {name: tuple(paths) for name, paths in found.items()}
