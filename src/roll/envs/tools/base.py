"""The interfaces of tools and tool calls."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from roll.errors import RollError
from roll.types import Content, iter_texts

__all__ = ["Tool", "ToolCall", "ToolError", "ToolResult", "ToolSource", "describe_tool"]


class ToolError(RollError):
    """A tool call is invalid or has no result. The message is shown to the model."""


@runtime_checkable
class Tool(Protocol):
    """A function that a model can call. Any exception of `call` except `ToolError` is an infrastructure failure."""

    @property
    def name(self) -> str:
        """The tool's name: letters, digits and `_`."""
        ...

    @property
    def description(self) -> str:
        """The tool's description for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object with `properties`."""
        ...

    def call(self, arguments: Mapping[str, Any], /) -> Content | Awaitable[Content]:
        """Call the tool with arguments that conform to the schema; may be `async def`.

        Raises:
            ToolError: The call failed because of a mistake of the model.
        """
        ...


@runtime_checkable
class ToolSource(Protocol):
    """Opens and closes tools that need a resource, such as a sandbox or a server."""

    async def open(self) -> Sequence[Tool]:
        """Return the tools of a new episode; called again for every episode."""
        ...

    async def close(self) -> None:
        """Release all resources. Calling it twice is safe."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The ID by which the result refers to its call, in formats that have IDs."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of a call."""

    call: ToolCall
    content: Content
    """The result for the model."""
    ok: bool

    @property
    def text(self) -> str:
        """The text of the content. Images, audio and video are appended to the formatted text unchanged."""
        return "".join(iter_texts(self.content))


def describe_tool(tool: Tool) -> dict[str, Any]:
    """Return the description of a tool in OpenAI's function format, which chat templates and servers expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
