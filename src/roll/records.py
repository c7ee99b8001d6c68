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


def read_record(record_class: type[T], data: Mapping[str, Any]) -> T:
    """Return a record with the fields of a mapping.

    Keys that are not fields are ignored, and `None` is treated as absent: the field's default is used.

    Args:
        record_class: A `NamedTuple` or dataclass whose field names are the keys.
        data: The mapping to read.

    Raises:
        TypeError: A field without a default is absent.
    """
    names = getattr(record_class, "_fields", None) or [each.name for each in fields(record_class)]  # type: ignore[arg-type]
    return record_class(**{name: data[name] for name in names if data.get(name) is not None})


def validate_record(record_class: type[T], data: object, label: str) -> T:
    """Validate untrusted data from a file and return the data as a record.

    Args:
        record_class: A `NamedTuple`, dataclass or other type with annotated fields.
        data: Untrusted data, such as parsed JSON; keys that are not fields are ignored.
        label: Name of the data in error messages.

    Raises:
        DataError: A field is missing, or has the wrong type; the message names the first one.
    """
    try:
        return _build_adapter(record_class).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{label}{f', {place}' if place else ''}: {first['msg']}.") from None


@cache
def _build_adapter(record_class: Any) -> TypeAdapter[Any]:
    return TypeAdapter(record_class)
