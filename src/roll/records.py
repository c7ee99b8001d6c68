"""Conversion of mappings, such as table rows and JSON objects, to records with named fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from roll.errors import DataError

__all__ = ["read_record", "validate_record"]

T = TypeVar("T")


def read_record(kind: type[T], found: Mapping[str, Any]) -> T:
    """Return a record with the fields of a mapping.

    Keys that are not fields are ignored, and `None` counts as absent: the field's default is used.

    Args:
        kind: A `NamedTuple` or dataclass whose field names are the keys.
        found: The mapping to read.

    Raises:
        TypeError: A field without a default is absent.
    """
    names = getattr(kind, "_fields", None) or [each.name for each in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: found[name] for name in names if found.get(name) is not None})


def validate_record(kind: type[T], found: object, what: str) -> T:
    """Validate untrusted data of a file and return the data as a record.

    Args:
        kind: A `NamedTuple`, dataclass or other type with annotated fields.
        found: Plain data, such as parsed JSON; keys that are not fields are ignored.
        what: Origin of the data, for messages.

    Raises:
        DataError: A field is missing, or has another type; the message names the first one.
    """
    try:
        return _build_adapter(kind).validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{what}{f', {place}' if place else ''}: {first['msg']}.") from None


@cache
def _build_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
