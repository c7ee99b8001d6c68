"""Frames: length (4 bytes, little-endian) and body. Most bodies are JSON, which is measured before it is parsed.

A reader of untrusted frames bounds their size. Parsing then costs at most about 24 bytes of memory per byte
(`[[],[],…]`), and the number and depth of nested values are bounded as well.
"""

from __future__ import annotations

import itertools
import json
import os

from .wire import MAX_DEPTH, WireError

MAX_FRAME_BYTES = 1 << 26
MAX_NODES = 1 << 21
"""Most values in a frame: commas and opening brackets, also those in strings."""
MAX_NESTING = MAX_DEPTH + 64
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEP = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]


def frame(body):
    """Return a body with its length in front."""
    return len(body).to_bytes(4, "little") + body


def pack(message):
    """Return a message as a frame."""
    return frame(json.dumps(message, separators=(",", ":")).encode("ascii"))


def unpack(body, most_bytes=MAX_FRAME_BYTES):
    """Parse a body, after checking that it is small, flat and has few parts.

    Raises:
        WireError: The body is too large, or is not JSON.
    """
    if len(body) > most_bytes:
        raise WireError("a message of %d bytes" % len(body))  # noqa: UP031
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets + body.count(b",") > MAX_NODES or body.count(b'"') > 2 * MAX_NODES:
        raise WireError("a message of too many parts")
    if num_brackets > MAX_NESTING and nesting(body) > MAX_NESTING:
        raise WireError("a message nested deeper than %d" % MAX_NESTING)  # noqa: UP031
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(str(error)) from None


def nesting(body):
    """Return how deep the brackets of a JSON text are nested, without those in strings; linear in its length."""
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return max(itertools.accumulate(_STEP[byte] for byte in b"".join(outside).translate(None, _OTHERS)), default=0)


class Router:
    """Splits a stream of bytes into frames, without parsing them."""

    def __init__(self):
        self._buffer = bytearray()
        self.broken = False
        """Whether a frame is longer than any valid one: the rest of the stream cannot be used."""

    def feed(self, data):
        """Yield the body of each frame that is now complete."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= 4 and not self.broken:
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "little")
            self.broken = end - start > MAX_FRAME_BYTES + 5
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + 4 : end])
            start = end
        del self._buffer[:start]


def split(data):
    """Return the bodies of all complete frames."""
    return list(Router().feed(data))


class Frames:
    """Reads and writes whole messages over two file descriptors; blocking."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing

    def read(self):
        """Read the next message; return None at the end of the input, also in the middle of a message.

        Raises:
            WireError: The input is not a message.
        """
        header = self._exactly(4)
        if header is None:
            return None
        size = int.from_bytes(header, "little")
        if size > MAX_FRAME_BYTES:
            raise WireError("a message of %d bytes" % size)  # noqa: UP031
        body = self._exactly(size)
        return None if body is None else unpack(body)

    def _exactly(self, size):
        data = bytearray()
        while len(data) < size:
            more = os.read(self.incoming, min(size - len(data), 1 << 20))
            if not more:
                return None
            data += more
        return bytes(data)

    def write(self, message, mark=b""):
        """Write one message. `mark` goes in front, for a process that forwards the message without parsing it."""
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        self.write_bytes(mark + body)

    def write_bytes(self, body):
        """Write one frame."""
        view = memoryview(frame(body))
        while view:
            view = view[os.write(self.outgoing, view) :]
