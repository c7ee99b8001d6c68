"""Frames: length (4 bytes, little-endian) and body. Most bodies are JSON, whose size and nesting are checked before it
is parsed.

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
"""Maximum number of values in a frame: commas and opening brackets, including those in strings."""
MAX_NESTING = MAX_DEPTH + 64
_BRACKETS = b"[]{}"
_NON_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_DEPTH_CHANGE = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]


def add_length(body):
    """Return a frame: the body, preceded by its length."""
    return len(body).to_bytes(4, "little") + body


def pack(message):
    """Return a message as a frame."""
    return add_length(json.dumps(message, separators=(",", ":")).encode("ascii"))


def unpack(body, max_bytes=MAX_FRAME_BYTES):
    """Parse a body, after checking its size, its nesting and its number of values.

    Raises:
        WireError: The body is too large or nested too deeply, or is not JSON.
    """
    if len(body) > max_bytes:
        raise WireError("the message is too long: %d bytes" % len(body))  # noqa: UP031
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets + body.count(b",") > MAX_NODES or body.count(b'"') > 2 * MAX_NODES:
        raise WireError("the message has too many parts")
    if num_brackets > MAX_NESTING and measure_nesting(body) > MAX_NESTING:
        raise WireError("the message is nested deeper than %d levels" % MAX_NESTING)  # noqa: UP031
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(str(error)) from None


def measure_nesting(body):
    """Return the nesting depth of a JSON text, in linear time; brackets in strings do not count."""
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return max(
        itertools.accumulate(_DEPTH_CHANGE[byte] for byte in b"".join(outside).translate(None, _NON_BRACKETS)),
        default=0,
    )


class FrameSplitter:
    """Splits a stream of bytes into frames, without parsing the frames."""

    def __init__(self):
        self._buffer = bytearray()
        self.broken = False
        """True if a frame was longer than any valid frame; the rest of the stream is then ignored."""

    def feed(self, data):
        """Add data to the stream; yield the body of each frame that it completes."""
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


def split_frames(data):
    """Return the bodies of all complete frames."""
    return list(FrameSplitter().feed(data))


class FrameChannel:
    """Reads and writes whole messages over two file descriptors; reading and writing block."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing

    def read(self):
        """Read the next message; return None at the end of the input, even in the middle of a message.

        Raises:
            WireError: The input is not a valid message.
        """
        header = self._read_exactly(4)
        if header is None:
            return None
        size = int.from_bytes(header, "little")
        if size > MAX_FRAME_BYTES:
            raise WireError("the message is too long: %d bytes" % size)  # noqa: UP031
        body = self._read_exactly(size)
        return None if body is None else unpack(body)

    def _read_exactly(self, size):
        data = bytearray()
        while len(data) < size:
            more = os.read(self.incoming, min(size - len(data), 1 << 20))
            if not more:
                return None
            data += more
        return bytes(data)

    def write(self, message, mark=b""):
        """Write one message as a frame.

        `mark` is a byte before the message. It tells a process that does not parse messages where to forward this one.
        """
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
        self.write_bytes(mark + body)

    def write_bytes(self, body):
        """Write one frame."""
        view = memoryview(add_length(body))
        while view:
            view = view[os.write(self.outgoing, view) :]
