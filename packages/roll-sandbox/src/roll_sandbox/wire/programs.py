"""Specs and programs as messages, and back. Every received field is checked; unknown ones are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.types import Command, Program, PythonCode, SandboxSpec

__all__ = ["built", "program_of", "program_said", "spec_of", "spec_said"]

_T = TypeVar("_T")
_MOST = 2**62
"""Bound on every number, so that calculations with it stay within 64 bits."""
_MOST_SPEC_BYTES = 2**16


def spec_said(spec: SandboxSpec) -> dict[str, Any]:
    """Convert a spec to JSON values."""
    said = dataclasses.asdict(spec)
    return said | {"mounts": [{"source": each.source, "target": each.target} for each in spec.mounts]}


def spec_of(said: object) -> SandboxSpec:
    """Check and convert a received spec.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type, or the spec is too long to store and compare.
    """
    spec = built(SandboxSpec, said, "spec")
    texts = (
        *spec.python_path,
        *spec.preload,
        *(text for mount in spec.mounts for text in (mount.source, mount.target)),
    )
    if sum(len(text) + 16 for text in (*texts, spec.pool, spec.image or "", spec.affinity)) > _MOST_SPEC_BYTES:
        raise SandboxRequestError(f"'spec' has more than {_MOST_SPEC_BYTES:,} bytes: shorten its texts and lists.")
    return spec


def program_said(request: dict[str, Any]) -> dict[str, Any]:
    """Convert the result of `requests.run_request` to a message; `fresh` is left out, since the worker sets it."""
    return {name: value for name, value in request.items() if name != "fresh"}


def program_of(said: dict[str, Any], stdin: bytes) -> tuple[Program, bool]:
    """Check and convert a received program; also return whether it is to run alone.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type.
    """
    fields = {name: value for name, value in said.items() if name not in ("alone", "source")}
    alone, source = said.get("alone", False), said.get("source")
    if type(alone) is not bool:
        raise SandboxRequestError(f"'alone' of a program is {str(alone)[:80]!r}: true or false is needed.")
    for name in ("wall_s", "cpu_s", "output_bytes"):
        value = fields.get(name)
        if value is not None and not (type(value) in (int, float) and 0 < value <= _MOST):
            raise SandboxRequestError(f"'{name}' of a program is {str(value)[:80]!r}: it must be positive.")
    if source is None:
        program: Program = built(Command, fields, "program")
        if not program.argv:
            raise SandboxRequestError("a program without source and without arguments is none.")
    else:
        program = built(PythonCode, {"source": source, **fields}, "program")
    return dataclasses.replace(program, stdin=stdin), alone


@cache
def _kinds(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def built(kind: type[_T], said: object, place: str) -> _T:
    """Build a dataclass from received fields, after checking them.

    Raises:
        SandboxRequestError: a field is unknown or has the wrong type.
    """
    if not isinstance(said, dict):
        raise SandboxRequestError(f"'{place}' is {str(said)[:80]!r}: an object is needed.")
    kinds = _kinds(kind)
    for name in said:
        if name not in kinds or name == "stdin":
            raise SandboxRequestError(f"'{place}' has no {str(name)[:40]!r}: known are {', '.join(kinds)}.")
    try:
        return kind(**{name: _value(kinds[name], value, f"{place}.{name}") for name, value in said.items()})
    except (TypeError, ValueError) as error:
        if isinstance(error, SandboxRequestError):
            raise
        raise SandboxRequestError(f"'{place}': {error}") from None


def _value(kind: Any, value: Any, place: str) -> Any:
    """Check and convert a value by its annotation, `kind`."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return built(cast(type[Any], kind), value, place)
    if origin is Literal:
        good = value in parts
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_value(parts[0], each, place) for each in value)
        good = False
    elif origin is Mapping:
        good = isinstance(value, dict) and all(
            type(name) is str and type(each) is parts[1] for name, each in value.items()
        )
    elif type(None) in parts:
        return None if value is None else _value(next(part for part in parts if part is not type(None)), value, place)
    elif kind is float:
        good = type(value) in (int, float) and -_MOST <= value <= _MOST
    else:
        good = type(value) is kind and (kind is not int or -_MOST <= value <= _MOST)
    if not good:
        raise SandboxRequestError(f"'{place}' is {str(value)[:80]!r}: {_words(kind)} is needed.")
    return value


def _words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
