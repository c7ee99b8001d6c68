"""Items of a conversation in OpenAI's Responses API, and the tools in items and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from roll.agents import wire
from roll.agents.message_parts import Content, UnknownObject, get_type, read_content, read_text
from roll.agents.request_errors import RequestError
from roll.agents.tool_specs import TEXT_PARAMETER, ToolSpec, build_text_tool, warn_of_unsupported_tools
from roll.agents.warning_log import WarningLog
from roll.types import Message

__all__ = ["Item", "Tools", "convert_items", "read_tools"]


class FunctionTool(wire.FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class CustomTool(wire.ApiObject):
    """A custom tool, which takes one string."""

    type: Literal["custom"]
    name: wire.Name
    description: str | None = None
    format: dict[str, Any] | None = None


def _get_plain_tool_type(value: Any) -> str:
    return {"function": "Function", "custom": "Custom"}.get(get_type(value), "Unknown")


PlainTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_plain_tool_type),
]


class ToolNamespace(wire.ApiObject):
    """A namespace: several tools with a common prefix."""

    type: Literal["namespace"]
    name: wire.Name
    description: str | None = None
    tools: Annotated[list[PlainTool], Field(max_length=256)] = Field(default_factory=list)


def _get_tool_type(value: Any) -> str:
    return "Group" if get_type(value) == "namespace" else _get_plain_tool_type(value)


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[ToolNamespace, Tag("Group")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_tool_type),
]
Tools = Annotated[list[ResponseTool], Field(max_length=256)]


class MessageItem(wire.ApiObject):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content = None


class CallItem(wire.ApiObject):
    """A tool call."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str = ""
    name: wire.Name
    arguments: str = "{}"
    input: str = ""
    namespace: Any = None


class OutputItem(wire.ApiObject):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = ""
    output: Content = None


class ToolsItem(wire.ApiObject):
    """Additional tools that the model may call after this item."""

    type: Literal["additional_tools"]
    role: Any = None
    tools: Tools = Field(default_factory=list)


_ITEM_TAGS = {
    "message": "Message",
    "function_call": "Call",
    "custom_tool_call": "Call",
    "function_call_output": "Output",
    "custom_tool_call_output": "Output",
    "additional_tools": "Tools",
}


def _get_item_type(value: Any) -> str:
    return _ITEM_TAGS.get(get_type(value, "message"), "Unknown")


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[OutputItem, Tag("Output")]
    | Annotated[ToolsItem, Tag("Tools")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_item_type),
]


def convert_items(items: str | Sequence[Any], warnings: WarningLog) -> list[Message]:
    """Convert the items of a conversation to messages; consecutive items of one answer become one message."""
    if isinstance(items, str):
        return [wire.build_chat_message("user", items)]
    said: list[Message] = []
    for item in items:
        if isinstance(item, MessageItem):
            read = read_text if item.role == "assistant" else read_content
            said.append(wire.build_chat_message(item.role, read(item.content, warnings)))
        elif isinstance(item, OutputItem):
            said.append(wire.build_chat_message("tool", read_content(item.output, warnings), tool_call_id=item.call_id))
        elif isinstance(item, CallItem):
            arguments: str | Mapping[str, Any] = item.arguments
            if item.type == "custom_tool_call":
                arguments = {TEXT_PARAMETER: item.input}
            call = wire.build_function_call(item.call_id, item.name, arguments)
            last = said.pop() if said and said[-1].role == "assistant" else Message(role="assistant", content="")
            said.append(replace(last, tool_calls=(*last.tool_calls, call)))
        elif isinstance(item, UnknownObject):
            if item.type == "item_reference":
                message = "an item_reference in input is not supported: configure the agent to send the items again."
                raise RequestError(400, "unsupported_parameter", message, field="input")
            if item.type != "reasoning":  # the context already has the reasoning, in the model's own tokens
                kind = item.type[:64]
                warnings.warn_once(f"item {kind}", f"agents send items of the type '{kind}', which are ignored.")
    return said


def read_tools(tools: Sequence[Any], items: str | Sequence[Any], warnings: WarningLog) -> list[ToolSpec]:
    """Return the tools of a request, from its field `tools` and from its items.

    Raises:
        RequestError: The request has tools, but none of them is supported.
    """
    specs: list[ToolSpec] = []
    unsupported: list[str] = []
    later = (
        () if isinstance(items, str) else (tool for item in items if isinstance(item, ToolsItem) for tool in item.tools)
    )
    for tool in (*tools, *later):
        group = tool.name if isinstance(tool, ToolNamespace) else ""
        for each in tool.tools if isinstance(tool, ToolNamespace) else [tool]:
            if isinstance(each, FunctionTool):
                spec = ToolSpec(name=each.name, description=each.description, parameters=each.parameters)
            elif isinstance(each, CustomTool):
                spec = build_text_tool(each.name, each.description, each.format)
            else:
                unsupported.append(each.type)
                continue
            specs.append(replace(spec, namespace=group))
    return warn_of_unsupported_tools(specs, unsupported, warnings)
