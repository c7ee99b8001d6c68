"""Encodes messages as JSON, followed by pieces of binary data.

    length of the JSON (4, little-endian) · JSON · for each piece: length (4) · data

The JSON refers to each piece once, as `{"$b": number}`. Decoding evaluates no code, and a decoded message is not larger
than its bytes, even when it is forwarded.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.wire.json_documents import parse_json

__all__ = ["MAX_MESSAGE_BYTES", "Message", "decode", "encode"]

Message: TypeAlias = dict[str, Any]
MAX_MESSAGE_BYTES = 2**26
"""Default maximum bytes of one message; a server may set another one."""
_BYTES_KEY = "$b"
_MAX_PIECES = 2**17


def encode(message: Message) -> bytes:
    """Encode a message, whose values may be JSON values and bytes."""
    pieces: list[bytes] = []

    def replace_bytes(value: object) -> dict[str, int]:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"a {type(value).__name__} cannot be encoded in a message")
        pieces.append(bytes(value))
        return {_BYTES_KEY: len(pieces) - 1}

    text = json.dumps(message, default=replace_bytes, separators=(",", ":")).encode()
    parts = [len(text).to_bytes(4, "little"), text]
    for piece in pieces:
        parts += (len(piece).to_bytes(4, "little"), piece)
    return b"".join(parts)


def decode(data: bytes) -> Message:
    """Decode a message that `encode` has encoded.

    Raises:
        SandboxRequestError: the bytes are not a message.
    """
    text, end = _read_piece(data, 0)
    pieces: list[bytes | None] = []
    while end < len(data):
        if len(pieces) == _MAX_PIECES:
            raise SandboxRequestError(f"a message has more than {_MAX_PIECES:,} pieces of data.")
        piece, end = _read_piece(data, end)
        pieces.append(piece)

    def restore_bytes(value: dict[str, Any]) -> Any:
        number = value.get(_BYTES_KEY)
        if len(value) != 1 or type(number) is not int:
            return value
        if not 0 <= number < len(pieces) or pieces[number] is None:
            raise SandboxRequestError(
                "a message references a piece of data that it does not contain, or references it twice."
            )
        # If a piece could be used several times, a small message could become large in memory.
        piece, pieces[number] = pieces[number], None
        return piece

    message = parse_json(text, restore_bytes)
    if not isinstance(message, dict):
        raise SandboxRequestError("a message is not a JSON object.")
    return message


def _read_piece(data: bytes, start: int) -> tuple[bytes, int]:
    end = start + 4 + int.from_bytes(data[start : start + 4], "little")
    if start + 4 > len(data) or end > len(data):
        raise SandboxRequestError("a message is truncated.")
    return data[start + 4 : end], end
