"""Chat messages."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

__all__ = ["Message"]


class Message(TypedDict):
    """One chat message, as chat templates take it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: NotRequired[str]
    """Of an assistant's message: what it thought before. Templates have several names for it, which the renderer knows.
    """
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Of an assistant's message, each `{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}}`."""
    tool_call_id: NotRequired[str]
    """Of a tool's message: the call that it answers."""
    name: NotRequired[str]
    """Of a tool's message: the tool; of another one: who of several speaks."""
