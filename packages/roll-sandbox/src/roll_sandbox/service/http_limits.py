"""Limits the size of HTTP requests without their bodies.

Uvicorn's faster parser, httptools, reads lines of any length into memory, from any peer; its other parser, h11, has its
own limits.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHttpProtocol"]

MAX_BYTES = 2**18
"""Maximum bytes of a request without its body: head, chunk headers and trailers."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A protocol that answers 400 to a request whose head is too large, and closes the connection."""

    _head_bytes = 0
    """Bytes of the current request outside its body."""

    def data_received(self, data: bytes) -> None:
        """Parse and count received bytes; answer 400 if a request's head is too large. Called by the event loop."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Reset the count of bytes for a new request; called by the parser."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: Any) -> None:
        """Subtract the bytes of a piece of the body from the count; called by the parser."""
        self._head_bytes -= len(body)
        super().on_body(body)
