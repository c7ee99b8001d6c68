"""Validates messages from workers, which run on other machines and may belong to another owner.

Fields that are forwarded to clients must have the types that clients expect; unknown fields are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.results import is_valid_end_report
from roll_sandbox.wire.client_messages import check_name
from roll_sandbox.wire.frames import Message

__all__ = ["validate_worker_message"]

_MAX_NUMBER = 2**62
_MAX_TEXT_CHARS = 2**16


def _is_string(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_CHARS


def _is_name(value: Any) -> bool:
    try:
        return bool(check_name(value))
    except SandboxRequestError:
        return False


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_NUMBER


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_NUMBER


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_properties(value: Any) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {"home": _is_string, "isolated": _is_bool, "mount_space": _is_bool}
    whole = isinstance(value, dict) and all(fits(value.get(name)) for name, fits in kinds.items())
    return whole and (value.get("image") is None or _is_string(value["image"]))


def _is_inventory(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict)
        and _is_properties(each.get("traits"))
        and isinstance(each.get("programs"), list)
        and all(map(_is_name, each["programs"]))
        for each in value.values()
    )


def _is_program_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and _is_name(each.get("id"))
        and _is_string(each.get("words"))
        and _is_bool(each.get("terminal"))
        and _is_number(each.get("began"))
        and each["began"] < 1e11
        and _is_count(each.get("seen"))
        and isinstance(each.get("output"), bytes)
        and (each.get("end") is None or _is_string(_get_error(each["end"])) or is_valid_end_report(each["end"]))
        for each in value
    )


def _get_error(end: Any) -> Any:
    return end.get("error") if isinstance(end, dict) else None


def _allow_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


_Fields = dict[str, Callable[[Any], bool]]
_ERROR_FIELDS: _Fields = {
    "error": _is_string,
    "message": _allow_none(_is_string),
    "errno": _allow_none(_is_count),
    "path": _allow_none(_is_string),
}
_PROGRAM_FIELDS: _Fields = {"sandbox": _is_string, "id": _is_name}
_MESSAGE_FIELDS: dict[str, _Fields] = {
    "created": {"sandbox": _is_string, "traits": _is_properties},
    "failed": {"sandbox": _is_string, **_ERROR_FIELDS},
    "gone": {"sandbox": _is_string, **_ERROR_FIELDS},
    "error": {**_PROGRAM_FIELDS, **_ERROR_FIELDS},
    "end": {**_PROGRAM_FIELDS, "end": is_valid_end_report, "pieces": _is_count},
    "out": {
        **_PROGRAM_FIELDS,
        "n": _is_count,
        "stream": lambda value: value in ("stdout", "stderr", "result"),
        "data": lambda value: isinstance(value, bytes),
    },
    "used": {**_PROGRAM_FIELDS, "n": _is_count, "used_s": _allow_none(_is_number)},
    "looked": {**_PROGRAM_FIELDS, "cpu_s": _is_number, "memory_bytes": _is_count, "programs": _is_program_list},
    "join": {
        "name": _is_name,
        "process": _is_string,
        "capacity": lambda value: _is_count(value) and value > 0,
        "memory_bytes": _allow_none(_is_count),
        "holds": _is_inventory,
        "leaving": _is_bool,
        "report": _is_object,
    },
    "beat": {"leaving": _is_bool, "report": _is_object},
    "leave": {},
}


def validate_worker_message(message: Message) -> Message:
    """Check a message from a worker, and return it without unknown fields.

    Raises:
        SandboxRequestError: the message is invalid; the error says why.
    """
    op = message.get("op")
    shape = _MESSAGE_FIELDS.get(op) if isinstance(op, str) else None
    if shape is None:
        raise SandboxRequestError(
            f"unknown worker message {str(op)[:40]!r}: expected one of {', '.join(_MESSAGE_FIELDS)}."
        )
    for name, fits in shape.items():
        if not fits(message.get(name)):
            raise SandboxRequestError(
                f"'{name}' of a worker's message '{op}' is invalid, got {str(message.get(name))[:80]!r}."
            )
    return {"op": op} | {name: message[name] for name in shape if name in message}
