"""`POST /v1/messages` of Anthropic's interface."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from roll.agents import wire
from roll.agents.answering import Part, Reply, blocks, converse, streamed, usage
from roll.agents.contexts import Conversation
from roll.agents.notes import Notes
from roll.agents.offers import Offer, served
from roll.agents.parts import Content, Foreign, TextPart, text_of, type_of
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.types import Message

__all__ = ["CountRequest", "MessagesRequest", "answer_messages", "count_tokens"]

_BILLING = "x-anthropic-billing-header:"


class ToolUse(wire.Body):
    """A tool call."""

    type: Literal["tool_use"]
    id: str = ""
    name: wire.Name
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResult(wire.Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: Content = None


def _block_kind(value: Any) -> str:
    kinds = {"text": "Text", "tool_use": "Use", "tool_result": "Result"}
    return kinds.get(type_of(value), "Foreign")


Block = Annotated[
    Annotated[TextPart, Tag("Text")]
    | Annotated[ToolUse, Tag("Use")]
    | Annotated[ToolResult, Tag("Result")]
    | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_block_kind),
]


class Said(wire.Body):
    """One message of the conversation; system messages may be anywhere in it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    output_config: Any = None


class AgentsTool(wire.Body):
    """A tool that the agent runs."""

    type: str | None = None
    name: wire.Name
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: bool | None = None


def _tool_kind(value: Any) -> str:
    """Return the kind of a tool: one without a schema is the vendor's own, which only the vendor's models can call."""
    has_schema = isinstance(value, dict) and isinstance(value.get("input_schema"), dict)
    return "Custom" if has_schema or type_of(value) in ("", "custom") else "Foreign"


AnthropicTool = Annotated[
    Annotated[AgentsTool, Tag("Custom")] | Annotated[Foreign, Tag("Foreign")], Discriminator(_tool_kind)
]


class ToolChoice(wire.Body):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountRequest(wire.Asking):
    """A conversation whose tokens are counted."""

    messages: Annotated[list[Said], Field(min_length=1, max_length=4096)]
    system: Content = None
    tools: Annotated[list[AnthropicTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: wire.Form | None = None


class MessagesRequest(CountRequest):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    max_tokens: wire.Count
    stop_sequences: wire.Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


async def answer_messages(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(MessagesRequest, raw, session.notes)
    if request.messages[-1].role == "assistant":
        message = "the last message is the assistant's: an answer cannot be continued here, so end with a user's."
        raise Refusal(400, "invalid_value", message, field="messages")
    conversation = _conversation(request, session.notes)
    [answer] = answers = await converse(
        session, conversation, max_tokens=request.max_tokens, stop=request.stop_sequences or ()
    )
    given, written = usage(answers)
    body = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [_block(block) for block in blocks(answer)],
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": given, "output_tokens": written},
    }
    if request.stream:
        return Reply(stream=streamed(answer, partial(_events, body, bool(answer.reasoning))), answers=answers)
    return Reply(body, answers=answers)


async def count_tokens(session: Session, raw: bytes) -> Reply:
    """Count the tokens of the model's input, without generating."""
    conversation = _conversation(wire.checked(CountRequest, raw), session.notes)
    return Reply({"input_tokens": session.contexts.count(conversation)})


def _conversation(request: CountRequest, notes: Notes) -> Conversation:
    choice = request.tool_choice or ToolChoice(type="auto")
    offers = _offers(request.tools or (), notes)
    known = {offer.name: f"<function>{to_json(offer.function['function']).decode()}</function>" for offer in offers}
    system = text_of(_without_billing(request.system), notes)
    functions = [] if choice.type == "none" else offers
    return Conversation(
        messages=[
            *([wire.chat_message("system", system)] if system else []),
            *(message for said in request.messages for message in _messages(said, notes, known)),
        ],
        tools=[offer.function for offer in functions if not offer.deferred],
        deferred_tools=[offer.function for offer in functions if offer.deferred],
        demands=[
            *wire.demanded_call(choice.model_dump() if choice.type == "tool" else choice.type, notes),
            *wire.demanded_format("output_config", request.output_config),
        ],
    )


def _offers(tools: Sequence[AgentsTool | Foreign], notes: Notes) -> list[Offer]:
    """Return the tools; a deferred tool is shown once the agent's own tool search refers to it."""
    left_out = [_foreign_name(tool) for tool in tools if isinstance(tool, Foreign)]
    vendor_searches = any(name.startswith("tool_search_tool") for name in left_out)
    offers = [
        Offer(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            deferred=bool(tool.defer_loading) and not vendor_searches,
        )
        for tool in tools
        if isinstance(tool, AgentsTool)
    ]
    return served(offers, left_out, notes)


def _foreign_name(tool: Foreign) -> str:
    name = tool.fields.get("name")
    return name if isinstance(name, str) and name else tool.type


def _without_billing(system: Content) -> Content:
    """Return the system text without Claude Code's billing line, which may change with each request."""
    if system is None or isinstance(system, str):
        return system
    return [part for part in system if not (isinstance(part, TextPart) and part.text.startswith(_BILLING))]


def _messages(said: Said, notes: Notes, tools: Mapping[str, str]) -> list[Message]:
    """Convert a message to the form of chat templates; tool results come first, each as a message of its own."""
    if isinstance(said.content, str):
        return [wire.chat_message(said.role, said.content)]
    text = text_of([block for block in said.content if isinstance(block, TextPart | Foreign)], notes, tools)
    if said.role == "assistant":
        calls = [
            wire.function_call(each.id, each.name, each.input) for each in said.content if isinstance(each, ToolUse)
        ]
        return [wire.chat_message("assistant", text, tool_calls=calls)]
    results = [
        wire.chat_message("tool", text_of(block.content, notes, tools), tool_call_id=block.tool_use_id)
        for block in said.content
        if isinstance(block, ToolResult)
    ]
    return [*results, *([wire.chat_message(said.role, text)] if text or not results else [])]


def _block(block: ToolCall | str) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": dict(block.arguments)}


def _stop_reason(answer: Answer) -> str:
    if answer.call.finish_reason != "stop":
        return "max_tokens"
    if answer.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answer.tool_calls else "end_turn"


def _events(body: dict[str, Any], reasoned: bool, part: Part) -> list[bytes]:
    """Return the events of an answer with the object `body`; the reasoning is not a block of that object."""
    index = part.block - reasoned
    match part.kind:
        case "begin":
            none = {"content": [], "stop_reason": None, "stop_sequence": None}
            given = {**body["usage"], "output_tokens": 0}
            return [_said("message_start", message={**body, **none, "usage": given})]
        case "text begins":
            return [_said("content_block_start", index=index, content_block=_block(""))]
        case "text":
            return [_said("content_block_delta", index=index, delta={"type": "text_delta", "text": part.text})]
        case "text ends":
            return [_said("content_block_stop", index=index)]
        case "end":
            delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
            written = {"output_tokens": body["usage"]["output_tokens"]}
            return [_said("message_delta", delta=delta, usage=written), _said("message_stop")]
    if part.call is None:
        return []
    return [
        _said("content_block_start", index=index, content_block={**_block(part.call), "input": {}}),
        _said(
            "content_block_delta",
            index=index,
            delta={"type": "input_json_delta", "partial_json": part.call.arguments_json},
        ),
        _said("content_block_stop", index=index),
    ]


def _said(kind: str, /, **data: Any) -> bytes:
    return wire.event({"type": kind, **data}, kind)
