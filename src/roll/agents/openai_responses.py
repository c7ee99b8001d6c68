"""`POST /v1/responses` of OpenAI's API, in which a conversation is a list of items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import Field

from roll.agents import wire
from roll.agents.contexts import Conversation
from roll.agents.replies import (
    AnswerEvent,
    Reply,
    StreamChunk,
    answer_conversation,
    build_assistant_message,
    count_usage,
    list_blocks,
    stream_answer,
)
from roll.agents.request_errors import RequestError
from roll.agents.response_items import Item, Tools, convert_items, read_tools
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.agents.tool_specs import ToolSpec, read_text_argument
from roll.agents.warning_log import WarningLog
from roll.types import Message

__all__ = ["ResponsesRequest", "count_input_tokens", "create_response"]

_CALL_EVENTS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""Maps each type of tool call to the field with its arguments, and to the event type that streams the field."""


class ResponsesRequest(wire.CommonRequest):
    """A request to continue a conversation. The run's sampling settings apply; `temperature` is ignored."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: wire.PositiveCount | None = None
    tools: Tools | None = None
    tool_choice: wire.ToolChoice | None = None
    text: wire.AnswerFormat | None = None
    conversation: Any = None
    prompt: Any = None


async def create_response(session: Session, raw_body: bytes) -> Reply:
    """Generate an answer to a request, given its body, and return it in the format of OpenAI's Responses API."""
    request = wire.parse_body(ResponsesRequest, raw_body, session.warnings)
    messages, specs = _read_request(session, request)
    conversation = _build_conversation(request, messages, specs, session.warnings)
    [answer] = answers = await answer_conversation(session, conversation, max_tokens=request.max_output_tokens)
    response_id = f"resp_{secrets.token_hex(12)}"
    session.answers[response_id] = (*messages, build_assistant_message(answer))
    body = _build_response(response_id, request, answer, {spec.name: spec for spec in specs})
    return (
        Reply(stream=_stream_response(body, answer), answers=answers)
        if request.stream
        else Reply(body, answers=answers)
    )


async def count_input_tokens(session: Session, raw_body: bytes) -> Reply:
    """Return the number of input tokens of a request, without generating an answer."""
    request = wire.parse_body(ResponsesRequest, raw_body, session.warnings)
    conversation = _build_conversation(request, *_read_request(session, request), session.warnings)
    num_tokens = session.contexts.count_tokens(await session.store_images(conversation))
    return Reply({"object": "response.input_tokens", "input_tokens": num_tokens})


def _read_request(session: Session, request: ResponsesRequest) -> tuple[list[Message], list[ToolSpec]]:
    for field in ("conversation", "prompt"):
        if getattr(request, field):
            message = (
                f"{field} refers to data on the vendor's servers, which is not supported: configure the agent to send "
                "the messages in input, or previous_response_id."
            )
            raise RequestError(400, "unsupported_parameter", message, field=field)
    messages = [
        *_load_previous_messages(session, request.previous_response_id),
        *convert_items(request.input, session.warnings),
    ]
    if not messages:
        raise RequestError(400, "invalid_value", "input must have at least one message.", field="input")
    return messages, read_tools(request.tools or (), request.input, session.warnings)


def _build_conversation(
    request: ResponsesRequest, messages: Sequence[Message], specs: Sequence[ToolSpec], warnings: WarningLog
) -> Conversation:
    choice = request.tool_choice
    return Conversation(
        messages=[
            *([wire.build_chat_message("system", request.instructions)] if request.instructions else []),
            *messages,
        ],
        tools=[] if wire.get_tool_choice_type(choice) == "none" else [spec.function for spec in specs],
        format_constraints=[
            *wire.build_call_constraint(choice, warnings),
            *wire.build_format_constraint("text", request.text),
        ],
    )


def _load_previous_messages(session: Session, response_id: str | None) -> Sequence[Message]:
    if response_id is None:
        return ()
    known = session.answers.get(response_id)
    if known is None:
        message = f"response '{response_id[:64]}' does not exist in this session."
        raise RequestError(404, "previous_response_not_found", message, field="previous_response_id")
    return known


def _build_response(
    response_id: str, request: ResponsesRequest, answer: Answer, specs: Mapping[str, ToolSpec]
) -> dict[str, Any]:
    given, written = count_usage([answer])
    cut_off = answer.call.finish_reason != "stop"
    status = "incomplete" if cut_off else "completed"
    output: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": f"rs_{secrets.token_hex(8)}", "type": "reasoning", "summary": summary})
    output += [_encode_item(block, status, specs) for block in list_blocks(answer)]
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": request.tool_choice or "auto",
        "tools": [_encode_tool(tool) for tool in request.tools or ()],
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + written,
        },
    }


def _encode_tool(tool: Any) -> dict[str, Any]:
    """Return a tool as the agent sent it; missing fields of a function get their default values."""
    said: dict[str, Any] = tool.model_dump()
    return said | {"parameters": tool.parameters or {}, "strict": False} if said["type"] == "function" else said


def _encode_item(block: ToolCall | str, status: str, specs: Mapping[str, ToolSpec]) -> dict[str, Any]:
    if isinstance(block, str):
        part = {"type": "output_text", "text": block, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": [part]}
    spec = specs.get(block.name)
    head: dict[str, Any] = {"call_id": block.call_id, "name": spec.name_for_agent if spec else block.name}
    if spec is not None and spec.namespace:
        head["namespace"] = spec.namespace
    if spec is not None and spec.takes_text:
        item = {
            "id": f"ctc_{block.call_id}",
            "type": "custom_tool_call",
            **head,
            "input": read_text_argument(block.arguments),
        }
    else:
        item = {"id": f"fc_{block.call_id}", "type": "function_call", **head, "arguments": block.arguments_json}
    return {**item, "status": "completed"}


def _stream_response(body: dict[str, Any], answer: Answer) -> Iterator[StreamChunk]:
    numbers = count()

    def write(event: AnswerEvent) -> Iterator[bytes]:
        for kind, data in _build_events(body, event):
            yield wire.encode_event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    return stream_answer(answer, write)


def _build_events(body: dict[str, Any], event: AnswerEvent) -> list[tuple[str, dict[str, Any]]]:
    """Return the server-sent events for one event of an answer; `body` is the complete response."""
    if event.kind == "begin":
        begun = {"response": {**body, "status": "in_progress", "output": [], "usage": None}}
        return [("response.created", begun), ("response.in_progress", begun)]
    if event.kind == "end":
        return [(f"response.{body['status']}", {"response": body})]
    item = body["output"][event.block]
    at = {"output_index": event.block}
    in_item = {**at, "item_id": item["id"]}
    in_text = {**in_item, "content_index": 0}
    started = {**item, **({"status": "in_progress"} if "status" in item else {})}
    ended = ("response.output_item.done", {**at, "item": item})
    match event.kind:
        case "text begins":
            empty = {**item["content"][0], "text": ""}
            return [
                ("response.output_item.added", {**at, "item": {**started, "content": []}}),
                ("response.content_part.added", {**in_text, "part": empty}),
            ]
        case "text":
            return [("response.output_text.delta", {**in_text, "delta": event.text, "logprobs": []})]
        case "text ends":
            whole = item["content"][0]
            return [
                ("response.output_text.done", {**in_text, "text": whole["text"], "logprobs": []}),
                ("response.content_part.done", {**in_text, "part": whole}),
                ended,
            ]
        case "call":
            field, event_name = _CALL_EVENTS[item["type"]]
            value = item[field]
            done = {"name": item["name"], field: value} if field == "arguments" else {field: value}
            return [
                ("response.output_item.added", {**at, "item": {**started, field: ""}}),
                (f"{event_name}.delta", {**in_item, "delta": value}),
                (f"{event_name}.done", {**in_item, **done}),
                ended,
            ]
    return [("response.output_item.added", {**at, "item": started}), ended]
