"""Limits the size of the heads of HTTP requests.

Uvicorn's faster parser, httptools, reads lines of any length into memory, from any peer; the other parser, h11, bounds
them itself.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedHttpProtocol"]

MAX_BYTES = 2**18
"""Most bytes of a request without its body: head, frames of chunks, trailers."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A protocol that answers 400 to a request with a larger head, and closes the connection; see the module."""

    _head_bytes = 0
    """Bytes of this request outside its body."""

    def data_received(self, data: bytes) -> None:
        """Count the received bytes; called by the event loop."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Reset the count; called by the parser."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: Any) -> None:
        """Subtract the body from the count; called by the parser."""
        self._head_bytes -= len(body)
        super().on_body(body)
