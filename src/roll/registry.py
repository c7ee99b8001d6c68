"""A registry of named implementations whose modules are imported only when chosen."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import Generic, TypeVar

from roll.errors import ConfigError

__all__ = ["Registry", "import_object", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


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

    def get(self, name: str) -> T:
        """Import and return the implementation called `name`.

        Raises:
            ConfigError: there is no such name.
        """
        try:
            path = self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"unknown {self.kind} '{name}'.{nearest(name, list(self))} Known: {known}.") from None
        return import_object(path)  # type: ignore[return-value]
