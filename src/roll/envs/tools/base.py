"""What a tool is, and one use of it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from roll.errors import RollError
from roll.types import Content, texts_of

__all__ = ["Tool", "ToolCall", "ToolError", "ToolResult", "ToolSource", "signature"]


class ToolError(RollError):
    """A call that the model got wrong, or that came to nothing: the message is what the model reads."""


@runtime_checkable
class Tool(Protocol):
    """Something that a model can call. What `call` raises, `ToolError` aside, is a failure of ours."""

    @property
    def name(self) -> str:
        """A word: letters, digits and `_`."""
        ...

    @property
    def description(self) -> str:
        """For the model: what it does."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object with `properties`."""
        ...

    def call(self, arguments: Mapping[str, Any], /) -> Content | Awaitable[Content]:
        """Use it; may be `async def`. The arguments obey the schema.

        Raises:
            ToolError: it came to nothing, which is the model's own doing.
        """
        ...


@runtime_checkable
class ToolSource(Protocol):
    """Where tools come from that need something opened: a sandbox, a server."""

    async def open(self) -> Sequence[Tool]:
        """Return the tools of a new episode; called again for every episode."""
        ...

    async def close(self) -> None:
        """Let go of everything; may be called twice."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """By which the result names its call, in forms that have ids."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What became of a call."""

    call: ToolCall
    content: Content
    """For the model."""
    ok: bool

    @property
    def text(self) -> str:
        """The texts of the content, which forms of calls write; its media stand behind what they make of it."""
        return "".join(texts_of(self.content))


def signature(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form of chat templates and servers: OpenAI's function description."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
