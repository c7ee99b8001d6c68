"""Checks of messages from workers, which are other machines, perhaps of another owner.

Fields that are forwarded to clients have the types that clients expect; unknown fields are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.results import is_end
from roll_sandbox.wire.frames import Message
from roll_sandbox.wire.messages import check_name

__all__ = ["heard"]

_MOST = 2**62
_MOST_TEXT = 2**16


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _name(value: Any) -> bool:
    try:
        return bool(check_name(value))
    except SandboxRequestError:
        return False


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST


def _flag(value: Any) -> bool:
    return type(value) is bool


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _traits(value: Any) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {"home": _text, "isolated": _flag, "mount_space": _flag}
    whole = isinstance(value, dict) and all(fits(value.get(name)) for name, fits in kinds.items())
    return whole and (value.get("image") is None or _text(value["image"]))


def _holds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, dict)
        and _traits(each.get("traits"))
        and isinstance(each.get("programs"), list)
        and all(map(_name, each["programs"]))
        for each in value.values()
    )


def _programs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and _name(each.get("id"))
        and _text(each.get("words"))
        and _flag(each.get("terminal"))
        and _number(each.get("began"))
        and each["began"] < 1e11
        and _count(each.get("seen"))
        and isinstance(each.get("output"), bytes)
        and (each.get("end") is None or _text(_error_of(each["end"])) or is_end(each["end"]))
        for each in value
    )


def _error_of(end: Any) -> Any:
    return end.get("error") if isinstance(end, dict) else None


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_Shape = dict[str, Callable[[Any], bool]]
_WHY: _Shape = {"error": _text, "message": _optional(_text), "errno": _optional(_count), "path": _optional(_text)}
_OF: _Shape = {"sandbox": _text, "id": _name}
_SHAPES: dict[str, _Shape] = {
    "created": {"sandbox": _text, "traits": _traits},
    "failed": {"sandbox": _text, **_WHY},
    "gone": {"sandbox": _text, **_WHY},
    "error": {**_OF, **_WHY},
    "end": {**_OF, "end": is_end, "pieces": _count},
    "out": {
        **_OF,
        "n": _count,
        "stream": lambda value: value in ("stdout", "stderr", "result"),
        "data": lambda value: isinstance(value, bytes),
    },
    "used": {**_OF, "n": _count, "used_s": _optional(_number)},
    "looked": {**_OF, "cpu_s": _number, "memory_bytes": _count, "programs": _programs},
    "join": {
        "name": _name,
        "process": _text,
        "capacity": lambda value: _count(value) and value > 0,
        "memory_bytes": _optional(_count),
        "holds": _holds,
        "leaving": _flag,
        "report": _object,
    },
    "beat": {"leaving": _flag, "report": _object},
    "leave": {},
}


def heard(message: Message) -> Message:
    """Check a message of a worker, and return it without unknown fields.

    Raises:
        SandboxRequestError: the message is invalid; the error says why.
    """
    op = message.get("op")
    shape = _SHAPES.get(op) if isinstance(op, str) else None
    if shape is None:
        raise SandboxRequestError(f"a worker says {str(op)[:40]!r}: known are {', '.join(_SHAPES)}.")
    for name, fits in shape.items():
        if not fits(message.get(name)):
            raise SandboxRequestError(f"'{name}' of a worker's '{op}' is {str(message.get(name))[:80]!r}.")
    return {"op": op} | {name: message[name] for name in shape if name in message}
