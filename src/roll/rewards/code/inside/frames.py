"""Frames over two file descriptors; see `wire.pack`."""

from __future__ import annotations

import os

from . import wire


class Frames:
    """Reads and writes whole messages; blocks."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing = incoming, outgoing

    def read(self):
        """The next message; None at the end, also in the middle of one.

        Raises:
            wire.WireError: what came is no message.
        """
        header = self._exactly(4)
        if header is None:
            return None
        size = int.from_bytes(header, "little")
        if size > wire.MAX_FRAME_BYTES:
            raise wire.WireError("a message of %d bytes" % size)  # noqa: UP031
        body = self._exactly(size)
        return None if body is None else wire.unpack(body)

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            more = os.read(self.incoming, min(size - len(data), 1 << 20))
            if not more:
                return None
            data += more
        return data

    def write(self, message):
        """One message."""
        view = memoryview(wire.pack(message))
        while view:
            view = view[os.write(self.outgoing, view) :]
