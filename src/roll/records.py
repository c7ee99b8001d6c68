"""From mappings, such as rows of tables and JSON objects, to records with named fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

__all__ = ["read_record"]

T = TypeVar("T")


def read_record(kind: type[T], found: Mapping[str, Any]) -> T:
    """Return a record of the fields that a mapping has.

    Keys that are no fields are ignored, and `None` counts as absent: the field's default stands in.

    Args:
        kind: a `NamedTuple` or dataclass, whose fields have the names of the keys.
        found: what is read.

    Raises:
        TypeError: a field without a default is absent.
    """
    names = getattr(kind, "_fields", None) or [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: found[name] for name in names if found.get(name) is not None})
