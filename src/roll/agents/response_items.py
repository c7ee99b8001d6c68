"""Items of a conversation in OpenAI's Responses interface, and the tools in items and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from roll.agents import wire
from roll.agents.notes import Notes
from roll.agents.offers import INPUT, Offer, served, text_tool
from roll.agents.parts import Content, Foreign, text_of, type_of
from roll.agents.refusals import Refusal
from roll.types import Message

__all__ = ["Item", "Tools", "messages_of", "offers_of"]


class FunctionTool(wire.Function):
    """A function that the model may call."""

    type: Literal["function"]


class TextTool(wire.Body):
    """A tool that takes one text."""

    type: Literal["custom"]
    name: wire.Name
    description: str | None = None
    format: dict[str, Any] | None = None


def _plain_kind(value: Any) -> str:
    return {"function": "Function", "custom": "Custom"}.get(type_of(value), "Foreign")


PlainTool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[TextTool, Tag("Custom")] | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_plain_kind),
]


class ToolGroup(wire.Body):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: wire.Name
    description: str | None = None
    tools: Annotated[list[PlainTool], Field(max_length=256)] = Field(default_factory=list)


def _tool_kind(value: Any) -> str:
    return "Group" if type_of(value) == "namespace" else _plain_kind(value)


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[TextTool, Tag("Custom")]
    | Annotated[ToolGroup, Tag("Group")]
    | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_tool_kind),
]
Tools = Annotated[list[ResponseTool], Field(max_length=256)]


class MessageItem(wire.Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content = None


class CallItem(wire.Body):
    """A tool call."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str = ""
    name: wire.Name
    arguments: str = "{}"
    input: str = ""
    namespace: Any = None


class OutputItem(wire.Body):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = ""
    output: Content = None


class ToolsItem(wire.Body):
    """Further tools."""

    type: Literal["additional_tools"]
    role: Any = None
    tools: Tools = Field(default_factory=list)


_KINDS = {
    "message": "Message",
    "function_call": "Call",
    "custom_tool_call": "Call",
    "function_call_output": "Output",
    "custom_tool_call_output": "Output",
    "additional_tools": "Tools",
}


def _item_kind(value: Any) -> str:
    return _KINDS.get(type_of(value, "message"), "Foreign")


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[OutputItem, Tag("Output")]
    | Annotated[ToolsItem, Tag("Tools")]
    | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_item_kind),
]


def messages_of(given: str | Sequence[Any], notes: Notes) -> list[Message]:
    """Return items as messages; the calls of one answer become one message again."""
    if isinstance(given, str):
        return [wire.chat_message("user", given)]
    said: list[Message] = []
    for item in given:
        if isinstance(item, MessageItem):
            said.append(wire.chat_message(item.role, text_of(item.content, notes)))
        elif isinstance(item, OutputItem):
            said.append(wire.chat_message("tool", text_of(item.output, notes), tool_call_id=item.call_id))
        elif isinstance(item, CallItem):
            arguments: str | Mapping[str, Any] = item.arguments
            if item.type == "custom_tool_call":
                arguments = {INPUT: item.input}
            call = wire.function_call(item.call_id, item.name, arguments)
            last = said.pop() if said and said[-1].role == "assistant" else Message(role="assistant", content="")
            said.append(replace(last, tool_calls=(*last.tool_calls, call)))
        elif isinstance(item, Foreign):
            if item.type == "item_reference":
                message = "input has an item_reference, but items are not kept here: have the agent send them again."
                raise Refusal(400, "unsupported_parameter", message, field="input")
            if item.type != "reasoning":  # the context already has it, in the model's own tokens
                kind = item.type[:64]
                notes.add(f"item {kind}", f"agents send items of the type '{kind}': they are left out.")
    return said


def offers_of(tools: Sequence[Any], given: str | Sequence[Any], notes: Notes) -> list[Offer]:
    """Return the tools that a request offers, in its own field and in its items.

    Raises:
        Refusal: No tool is supported.
    """
    offers: list[Offer] = []
    left_out: list[str] = []
    later = (
        () if isinstance(given, str) else (tool for item in given if isinstance(item, ToolsItem) for tool in item.tools)
    )
    for tool in (*tools, *later):
        group = tool.name if isinstance(tool, ToolGroup) else ""
        for each in tool.tools if isinstance(tool, ToolGroup) else [tool]:
            if isinstance(each, FunctionTool):
                offer = Offer(name=each.name, description=each.description, parameters=each.parameters)
            elif isinstance(each, TextTool):
                offer = text_tool(each.name, each.description, each.format)
            else:
                left_out.append(each.type)
                continue
            offers.append(replace(offer, namespace=group))
    return served(offers, left_out, notes)
