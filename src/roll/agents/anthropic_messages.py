"""`POST /v1/messages` of Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import to_json

from roll.agents import wire
from roll.agents.contexts import Conversation
from roll.agents.message_parts import Content, TextPart, UnknownObject, get_type, read_content, read_text
from roll.agents.replies import AnswerEvent, Reply, answer_conversation, count_usage, list_blocks, stream_answer
from roll.agents.request_errors import RequestError
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.agents.tool_specs import ToolSpec, warn_of_unsupported_tools
from roll.agents.warning_log import WarningLog
from roll.types import Content as MessageContent
from roll.types import Message

__all__ = ["CountTokensRequest", "MessagesRequest", "count_tokens", "create_message"]

_BILLING_HEADER = "x-anthropic-billing-header:"


class ToolUse(wire.ApiObject):
    """A tool call."""

    type: Literal["tool_use"]
    id: str = ""
    name: wire.Name
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResult(wire.ApiObject):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = ""
    content: Content = None


def _get_block_type(value: Any) -> str:
    kinds = {"text": "Text", "tool_use": "Use", "tool_result": "Result"}
    return kinds.get(get_type(value), "Unknown")


ContentBlock = Annotated[
    Annotated[TextPart, Tag("Text")]
    | Annotated[ToolUse, Tag("Use")]
    | Annotated[ToolResult, Tag("Result")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_block_type),
]


class AnthropicMessage(wire.ApiObject):
    """One message of the conversation; system messages may be anywhere in it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]
    output_config: Any = None


class ClientTool(wire.ApiObject):
    """The definition of a tool that the agent itself runs."""

    type: str | None = None
    name: wire.Name
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: bool | None = None


def _get_tool_type(value: Any) -> str:
    """Return the tag of the class that parses a tool: `Custom` for a `ClientTool`, `Unknown` for a vendor's tool."""
    has_schema = isinstance(value, dict) and isinstance(value.get("input_schema"), dict)
    return "Custom" if has_schema or get_type(value) in ("", "custom") else "Unknown"


AnthropicTool = Annotated[
    Annotated[ClientTool, Tag("Custom")] | Annotated[UnknownObject, Tag("Unknown")], Discriminator(_get_tool_type)
]


class ToolChoice(wire.ApiObject):
    """Controls whether the model must call a tool, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountTokensRequest(wire.CommonRequest):
    """A request to count the tokens of a conversation."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096)]
    system: Content = None
    tools: Annotated[list[AnthropicTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: wire.AnswerFormat | None = None


class MessagesRequest(CountTokensRequest):
    """A request to continue a conversation. The run's sampling settings apply; `temperature` is ignored."""

    max_tokens: wire.PositiveCount
    stop_sequences: wire.StopStrings | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


async def create_message(session: Session, raw_body: bytes) -> Reply:
    """Generate an answer to a request, given its body, and return it in Anthropic's format."""
    request = wire.parse_body(MessagesRequest, raw_body, session.warnings)
    if request.messages[-1].role == "assistant":
        message = (
            "assistant prefill is not supported: the last message must be a user message, not an assistant message."
        )
        raise RequestError(400, "invalid_value", message, field="messages")
    conversation = _build_conversation(request, session.warnings)
    [answer] = answers = await answer_conversation(
        session, conversation, max_tokens=request.max_tokens, stop=request.stop_sequences or ()
    )
    given, written = count_usage(answers)
    body = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [_encode_block(block) for block in list_blocks(answer)],
        "stop_reason": _get_stop_reason(answer),
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": given, "output_tokens": written},
    }
    if request.stream:
        return Reply(
            stream=stream_answer(answer, partial(_build_events, body, bool(answer.reasoning))), answers=answers
        )
    return Reply(body, answers=answers)


async def count_tokens(session: Session, raw_body: bytes) -> Reply:
    """Return the number of input tokens of a request, without generating an answer."""
    conversation = await session.store_images(
        _build_conversation(wire.parse_body(CountTokensRequest, raw_body), session.warnings)
    )
    return Reply({"input_tokens": session.contexts.count_tokens(conversation)})


def _build_conversation(request: CountTokensRequest, warnings: WarningLog) -> Conversation:
    choice = request.tool_choice or ToolChoice(type="auto")
    specs = _read_tools(request.tools or (), warnings)
    known = {spec.name: f"<function>{to_json(spec.function['function']).decode()}</function>" for spec in specs}
    system = read_text(_remove_billing_header(request.system), warnings)
    functions = [] if choice.type == "none" else specs
    return Conversation(
        messages=[
            *([wire.build_chat_message("system", system)] if system else []),
            *(message for said in request.messages for message in _convert_message(said, warnings, known)),
        ],
        tools=[spec.function for spec in functions if not spec.deferred],
        deferred_tools=[spec.function for spec in functions if spec.deferred],
        format_constraints=[
            *wire.build_call_constraint(choice.model_dump() if choice.type == "tool" else choice.type, warnings),
            *wire.build_format_constraint("output_config", request.output_config),
        ],
    )


def _read_tools(tools: Sequence[ClientTool | UnknownObject], warnings: WarningLog) -> list[ToolSpec]:
    """Convert the tools of a request; the model sees a deferred tool only after a tool search has returned it."""
    unsupported = [_get_unknown_tool_name(tool) for tool in tools if isinstance(tool, UnknownObject)]
    vendor_searches = any(name.startswith("tool_search_tool") for name in unsupported)
    specs = [
        ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            deferred=bool(tool.defer_loading) and not vendor_searches,
        )
        for tool in tools
        if isinstance(tool, ClientTool)
    ]
    return warn_of_unsupported_tools(specs, unsupported, warnings)


def _get_unknown_tool_name(tool: UnknownObject) -> str:
    name = tool.fields.get("name")
    return name if isinstance(name, str) and name else tool.type


def _remove_billing_header(system: Content) -> Content:
    """Return the system prompt without the billing header that Claude Code adds."""
    # The header may change with each request; then no context would extend an earlier one.
    if system is None or isinstance(system, str):
        return system
    return [part for part in system if not (isinstance(part, TextPart) and part.text.startswith(_BILLING_HEADER))]


def _convert_message(message: AnthropicMessage, warnings: WarningLog, tools: Mapping[str, str]) -> list[Message]:
    """Convert a message to chat template messages: one for each tool result, then one for the remaining content."""
    if isinstance(message.content, str):
        return [wire.build_chat_message(message.role, message.content)]
    text = _read_blocks(message, warnings, tools)
    if message.role == "assistant":
        calls = [
            wire.build_function_call(each.id, each.name, each.input)
            for each in message.content
            if isinstance(each, ToolUse)
        ]
        return [wire.build_chat_message("assistant", text, tool_calls=calls)]
    results = [
        wire.build_chat_message("tool", read_content(block.content, warnings, tools), tool_call_id=block.tool_use_id)
        for block in message.content
        if isinstance(block, ToolResult)
    ]
    return [*results, *([wire.build_chat_message(message.role, text)] if text or not results else [])]


def _read_blocks(message: AnthropicMessage, warnings: WarningLog, tools: Mapping[str, str]) -> MessageContent:
    """Return the text and the images of a message; an assistant message has only text."""
    blocks = [block for block in message.content if isinstance(block, TextPart | UnknownObject)]
    return read_text(blocks, warnings, tools) if message.role == "assistant" else read_content(blocks, warnings, tools)


def _encode_block(block: ToolCall | str) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": dict(block.arguments)}


def _get_stop_reason(answer: Answer) -> str:
    if answer.call.finish_reason != "stop":
        return "max_tokens"
    if answer.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answer.tool_calls else "end_turn"


def _build_events(body: dict[str, Any], has_reasoning: bool, event: AnswerEvent) -> list[bytes]:
    """Return the server-sent events for one event of an answer.

    Args:
        body: The complete response.
        has_reasoning: Whether the answer has reasoning; the reasoning itself is not sent.
        event: The event.
    """
    index = event.block - has_reasoning
    match event.kind:
        case "begin":
            none = {"content": [], "stop_reason": None, "stop_sequence": None}
            given = {**body["usage"], "output_tokens": 0}
            return [_encode_event("message_start", message={**body, **none, "usage": given})]
        case "text begins":
            return [_encode_event("content_block_start", index=index, content_block=_encode_block(""))]
        case "text":
            return [_encode_event("content_block_delta", index=index, delta={"type": "text_delta", "text": event.text})]
        case "text ends":
            return [_encode_event("content_block_stop", index=index)]
        case "end":
            delta = {name: body[name] for name in ("stop_reason", "stop_sequence")}
            written = {"output_tokens": body["usage"]["output_tokens"]}
            return [_encode_event("message_delta", delta=delta, usage=written), _encode_event("message_stop")]
    if event.call is None:
        return []
    return [
        _encode_event("content_block_start", index=index, content_block={**_encode_block(event.call), "input": {}}),
        _encode_event(
            "content_block_delta",
            index=index,
            delta={"type": "input_json_delta", "partial_json": event.call.arguments_json},
        ),
        _encode_event("content_block_stop", index=index),
    ]


def _encode_event(kind: str, /, **data: Any) -> bytes:
    return wire.encode_event({"type": kind, **data}, kind)
