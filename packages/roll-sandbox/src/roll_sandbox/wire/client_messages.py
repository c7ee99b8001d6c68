"""Validates messages from clients. An overview of the service's messages:

    client ──► server                 upload: a directory, identified by its digest
    client ──► server ──► worker      create run shell line input tty bound kill close look attach stop
    client ◄── server ◄── worker      created failed out used looked end gone
    client ◄── server                 extended; again: the worker reconnected, so the client resends
               server ◄── worker      join beat leave; answered by welcome beat

The client chooses the names of sandboxes, programs and sessions, so that it can resend a message: the same name means
the same object. `have` is the number of received pieces of output; `n` numbers the messages to a running program.
"""

from __future__ import annotations

import re
from typing import Any

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.wire.frames import Message

__all__ = ["check_name", "validate_client_message"]

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{8,64}")
_MAX_SECONDS = 1e9
_OPTIONAL_FIELDS = {"have", "lifetime_s", "near", "snapshot", "cwd"}
_REQUIREMENTS = {
    "name": "a name of 8 to 64 letters, digits, '_' or '-'",
    "count": "an integer of at least 0",
    "seconds": "a positive number of seconds",
    "bytes": "bytes",
    "object": "an object",
}
_MESSAGE_FIELDS: dict[str, dict[str, str]] = {
    "create": {"sandbox": "name", "spec": "object", "lifetime_s": "seconds", "near": "name"},
    "upload": {"sandbox": "name", "files": "object"},
    "attach": {"sandbox": "name"},
    "extend": {"sandbox": "name", "id": "name?", "lifetime_s": "seconds"},
    "stop": {"sandbox": "name"},
    "run": {"sandbox": "name", "id": "name", "request": "object", "stdin": "bytes", "have": "count"},
    "shell": {"sandbox": "name", "id": "name", "request": "object", "have": "count"},
    "line": {"sandbox": "name", "id": "name", "shell": "name", "request": "object", "have": "count"},
    "input": {"sandbox": "name", "id": "name", "n": "count", "data": "bytes"},
    "tty": {"sandbox": "name", "id": "name", "n": "count", "rows": "count", "columns": "count", "shown": "count"},
    "look": {"sandbox": "name", "id": "name", "output": "count"},
    "bound": {"sandbox": "name", "id": "name", "n": "count", "wall_s": "seconds", "cpu_s": "seconds?"},
    "kill": {"sandbox": "name", "id": "name", "n": "count"},
    "close": {"sandbox": "name", "id": "name", "n": "count"},
}


def check_name(value: object) -> str:
    """Check the name of a worker, sandbox, program or session, and return it.

    Raises:
        SandboxRequestError: the name is malformed.
    """
    if not isinstance(value, str) or not _NAME_PATTERN.fullmatch(value):
        raise SandboxRequestError(
            f"a name must consist of 8 to 64 letters, digits, '_' or '-', got {str(value)[:80]!r}."
        )
    return value


def validate_client_message(message: Message) -> Message:
    """Check that all fields of a client's message are known and have the right type; return the message.

    Raises:
        SandboxRequestError: the message is invalid; the error states the reason.
    """
    op = message.get("op")
    shape = _MESSAGE_FIELDS.get(op) if isinstance(op, str) else None
    if shape is None:
        raise SandboxRequestError(f"unknown message {str(op)[:40]!r}: expected one of {', '.join(_MESSAGE_FIELDS)}.")
    for name in message:
        if name != "op" and name not in shape:
            raise SandboxRequestError(f"unknown field {name[:40]!r} of the message '{op}'.")
    for name, kind in shape.items():
        value = message.get(name)
        if value is None and (name in _OPTIONAL_FIELDS or kind.endswith("?")):
            continue
        if not _has_type(kind.rstrip("?"), value):
            raise SandboxRequestError(
                f"'{name}' of the message '{op}' must be {_REQUIREMENTS[kind.rstrip('?')]}, got {str(value)[:80]!r}."
            )
    return message


def _has_type(type_name: str, value: Any) -> bool:
    if type_name == "name":
        return isinstance(value, str) and _NAME_PATTERN.fullmatch(value) is not None
    if type_name == "count":
        return type(value) is int and 0 <= value < 2**53
    if type_name == "seconds":
        return type(value) in (int, float) and 0 < value <= _MAX_SECONDS
    return isinstance(value, bytes if type_name == "bytes" else dict)
