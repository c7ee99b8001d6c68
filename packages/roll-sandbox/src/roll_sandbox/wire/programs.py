"""Converts specs and programs to messages and back. All received fields are checked, and unknown fields are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.types import Command, Program, PythonCode, SandboxSpec

__all__ = ["parse_dataclass", "program_from_json", "program_to_json", "spec_from_json", "spec_to_json"]

_T = TypeVar("_T")
_MAX_NUMBER = 2**62
"""Maximum of every number, so that calculations with it stay within 64 bits."""
_MAX_SPEC_BYTES = 2**16


def spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    """Convert a spec to JSON values."""
    fields = dataclasses.asdict(spec)
    return fields | {"mounts": [{"source": each.source, "target": each.target} for each in spec.mounts]}


def spec_from_json(values: object) -> SandboxSpec:
    """Check received JSON values, and convert them to a spec.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type, or the spec is too large to store and compare.
    """
    spec = parse_dataclass(SandboxSpec, values, "spec")
    texts = (
        *spec.python_path,
        *spec.preload,
        *(text for mount in spec.mounts for text in (mount.source, mount.target)),
    )
    if sum(len(text) + 16 for text in (*texts, spec.pool, spec.image or "", spec.affinity)) > _MAX_SPEC_BYTES:
        raise SandboxRequestError(
            f"'spec' must not exceed {_MAX_SPEC_BYTES:,} bytes: shorten the paths and lists in it."
        )
    return spec


def program_to_json(request: dict[str, Any]) -> dict[str, Any]:
    """Convert a request of `requests.make_run_request` to a message. `fresh` is omitted, because the worker sets it."""
    return {name: value for name, value in request.items() if name != "fresh"}


def program_from_json(values: dict[str, Any], stdin: bytes) -> tuple[Program, bool]:
    """Check and convert a received program with its `stdin`; return the program, and True if it must run alone.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type.
    """
    fields = {name: value for name, value in values.items() if name not in ("alone", "source")}
    alone, source = values.get("alone", False), values.get("source")
    if type(alone) is not bool:
        raise SandboxRequestError(f"'alone' of a program must be true or false, got {str(alone)[:80]!r}.")
    for name in ("wall_s", "cpu_s", "output_bytes"):
        value = fields.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value <= _MAX_NUMBER):
            raise SandboxRequestError(f"'{name}' of a program must be positive, got {str(value)[:80]!r}.")
    if source is None:
        program: Program = parse_dataclass(Command, fields, "program")
        if not program.argv:
            raise SandboxRequestError("a program must have 'source' or 'argv'.")
    else:
        program = parse_dataclass(PythonCode, {"source": source, **fields}, "program")
    return dataclasses.replace(program, stdin=stdin), alone


@cache
def _get_field_types(dataclass_type: type[Any]) -> dict[str, Any]:
    return get_type_hints(dataclass_type)


def parse_dataclass(dataclass_type: type[_T], values: object, location: str) -> _T:
    """Check received fields, and build a dataclass from them; `location` names the fields in error messages.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type.
    """
    if not isinstance(values, dict):
        raise SandboxRequestError(f"'{location}' must be an object, got {str(values)[:80]!r}.")
    kinds = _get_field_types(dataclass_type)
    for name in values:
        if name not in kinds or name == "stdin":
            raise SandboxRequestError(
                f"unknown field {str(name)[:40]!r} of '{location}': expected one of {', '.join(kinds)}."
            )
    try:
        return dataclass_type(
            **{name: _parse_value(kinds[name], value, f"{location}.{name}") for name, value in values.items()}
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, SandboxRequestError):
            raise
        raise SandboxRequestError(f"'{location}': {error}") from None


def _parse_value(expected_type: Any, value: Any, location: str) -> Any:
    """Check that a value has the type `expected_type`, and convert it."""
    origin, parts = get_origin(expected_type), get_args(expected_type)
    if dataclasses.is_dataclass(expected_type):
        return parse_dataclass(cast(type[Any], expected_type), value, location)
    if origin is Literal:
        good = value in parts
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_parse_value(parts[0], each, location) for each in value)
        good = False
    elif origin is Mapping:
        good = isinstance(value, dict) and all(
            type(name) is str and type(each) is parts[1] for name, each in value.items()
        )
    elif type(None) in parts:
        return (
            None
            if value is None
            else _parse_value(next(part for part in parts if part is not type(None)), value, location)
        )
    elif expected_type is float:
        good = type(value) in (int, float) and -_MAX_NUMBER <= value <= _MAX_NUMBER
    else:
        good = type(value) is expected_type and (expected_type is not int or -_MAX_NUMBER <= value <= _MAX_NUMBER)
    if not good:
        raise SandboxRequestError(
            f"'{location}' must be of type {_format_type_name(expected_type)}, got {str(value)[:80]!r}."
        )
    return value


def _format_type_name(value_type: Any) -> str:
    return value_type.__name__ if isinstance(value_type, type) else str(value_type).replace("typing.", "")
