"""Implementations that users add to a registry without changing this package.

    hf                         a built-in name of the registry
    fast                       a name that an installed package registers as an entry point of the registry's group
    engines/mine.py:MyEngine   a file of the user, or `package.module:MyEngine`

A process on another machine finds the same implementation: a name's import path is resolved where the run begins
(`ExtensibleRegistry.path`), and `roll.user_code` documents where files are searched.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TypeVar, cast

from roll.errors import ConfigError, one_line_error
from roll.registry import Registry, did_you_mean, import_object
from roll.user_code import load_function

__all__ = ["ExtensibleRegistry", "has_user_code"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ExtensibleRegistry(Registry[T]):
    """A registry that installed packages and user files can extend.

    Args:
        kind: Type of the implementations, for messages: `inference engine`.
        entries: Import paths by name.
        group: Group of entry points that extend the registry, such as `roll.engines`. Built-in names are never
            replaced.
    """

    def __init__(self, kind: str, entries: dict[str, str], group: str) -> None:
        super().__init__(kind, entries)
        self.group = group

    def __contains__(self, name: str) -> bool:
        return ":" in name or name in self._entries or name in _find_installed_extensions(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from (name for name in _find_installed_extensions(self.group) if name not in self._entries)

    @property
    def built_in_names(self) -> tuple[str, ...]:
        """Built-in names, in order, without the names of entry points."""
        return tuple(self._entries)

    def path(self, name: str) -> str:
        """Return the import path of the implementation called `name`, so that other processes can import it.

        Raises:
            ConfigError: The name is unknown, or several packages register it.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return name
        found = _find_installed_extensions(self.group).get(name, ())
        if len(found) > 1:
            raise ConfigError(
                f"{self.kind} '{name}' is registered by several installed packages ({', '.join(found)}): use its "
                "import path, package.module:name."
            )
        if found:
            return found[0]
        known = "".join(f"{each}, " for each in sorted(self))
        raise ConfigError(
            f"unknown {self.kind} '{name}'.{did_you_mean(name, list(self))} Known: {known}path/to/file.py:Name, "
            "package.module:Name."
        )

    def validate_name(self, name: str) -> str:
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
def _find_installed_extensions(group: str) -> Mapping[str, tuple[str, ...]]:
    """Return the import paths that installed packages register in a group of entry points, by name."""
    found: dict[str, dict[str, None]] = {}
    for point in _load_entry_points():
        if point.group == group:
            found.setdefault(point.name, {})[_get_import_path(point)] = None
    return {name: tuple(paths) for name, paths in found.items()}


def _get_import_path(point: metadata.EntryPoint) -> str:
    """Return the import path of an entry point. An invalid path is not rejected here, but when it is imported."""
    found = point.pattern.match(point.value)
    return f"{found['module']}:{found['attr']}" if found and found["attr"] else point.value


@functools.cache
def _load_entry_points() -> Sequence[metadata.EntryPoint]:
    """Return the entry points of ROLL's groups; packages with unreadable entry points are skipped with a warning."""
    try:
        points = metadata.entry_points()
        return [point for group in points.groups if group.startswith("roll.") for point in points.select(group=group)]
    except Exception:  # any installed package, even an unrelated one, may have malformed entry points
        found: list[metadata.EntryPoint] = []
        for package in metadata.distributions():
            try:
                found += [point for point in package.entry_points if point.group.startswith("roll.")]
            except Exception as error:
                place = package.locate_file("")
                logger.warning("entry points of a package in '%s' cannot be read: %s", place, one_line_error(error))
        return found


def has_user_code(value: object) -> bool:
    """Return whether any string in `value` may refer to user code or to an implementation from an installed package.

    Args:
        value: A string, or nested mappings, lists and tuples; values of other types are ignored.
    """
    if isinstance(value, Mapping):
        return any(map(has_user_code, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_user_code, value))
    return isinstance(value, str) and (_FUNCTION_PATH_PATTERN.fullmatch(value) is not None or value in _list_names())


_FUNCTION_PATH_PATTERN = re.compile(r"(?:[\w.]+|[^:]+\.py):\w+")


@functools.cache
def _list_names() -> frozenset[str]:
    return frozenset(point.name for point in _load_entry_points())
