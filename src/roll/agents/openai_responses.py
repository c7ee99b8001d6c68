"""`POST /v1/responses`: OpenAI's newer interface, in which a conversation is a list of items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from roll.agents.contexts import Conversation
from roll.agents.openai_chat import TextPart, joined_text
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.wire import (
    Body,
    Count,
    Name,
    Piece,
    Reply,
    assistant,
    chat_message,
    checked,
    event,
    function_call,
    function_tool,
    pieces_of,
)
from roll.types import Message

__all__ = ["ResponsesRequest", "respond"]


class Item(Body):
    """A message, a call of a tool, or what a tool said."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[TextPart] | None = None
    call_id: str = ""
    name: Annotated[str, Field(max_length=256)] = ""
    arguments: str = "{}"
    output: str | list[TextPart] = ""


class ResponseTool(Body):
    """A tool that the model may call; only functions are."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesRequest(Body):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    model: Name
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=256)] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


async def respond(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = checked(ResponsesRequest, raw)
    tools = [] if request.tool_choice == "none" else list(request.tools or ())
    said = _messages(request.input)
    if request.previous_response_id is not None:
        said = [*_before(session, request.previous_response_id), *said]
    if not said:
        raise Refusal(400, "invalid_value", "input has no message: send one.", field="input")
    instructions = [chat_message("system", request.instructions)] if request.instructions else []
    conversation = Conversation(
        messages=[*instructions, *said],
        tools=[function_tool(tool.name, tool.description or "", tool.parameters) for tool in tools],
    )
    context = session.contexts.of_conversation(conversation)
    [answer] = await session.ask(context, max_tokens=request.max_output_tokens, tools=conversation.tools)
    session.contexts.remember(conversation, assistant(answer), context, answer.call.token_ids)
    response_id = f"resp_{secrets.token_hex(12)}"
    session.answers[response_id] = (*said, assistant(answer))
    body = _response(response_id, request, answer)
    if request.stream:
        return Reply(stream=_stream(body, answer), answers=[answer])
    return Reply(body, answers=[answer])


def _before(session: Session, response_id: str) -> Sequence[Message]:
    known = session.answers.get(response_id)
    if known is None:
        message = f"no response '{response_id[:64]}' was given in this session."
        raise Refusal(404, "previous_response_not_found", message, field="previous_response_id")
    return known  # type: ignore[return-value]


def _messages(given: str | Sequence[Item]) -> list[Message]:
    """Items as messages; the calls of one answer are one message, as they were when it was given."""
    if isinstance(given, str):
        return [chat_message("user", given)]
    said: list[Message] = []
    for item in given:
        if item.type == "message":
            said.append(chat_message(item.role, joined_text(item.content)))
        elif item.type == "function_call_output":
            said.append(chat_message("tool", joined_text(item.output), tool_call_id=item.call_id))
        elif item.type == "function_call":
            if not item.name:
                raise Refusal(400, "missing_required_parameter", "an item function_call has a name.", field="input")
            call = function_call(item.call_id, item.name, item.arguments)
            last: Any = said[-1] if said and said[-1]["role"] == "assistant" else None
            if last is None:
                said.append(chat_message("assistant", "", tool_calls=[call]))
            else:
                said[-1] = chat_message("assistant", last["content"], tool_calls=[*last.get("tool_calls", ()), call])
    return said


def _response(response_id: str, request: ResponsesRequest, answer: Answer) -> dict[str, Any]:
    given, written = len(answer.call.context), len(answer.call.token_ids)
    output: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": f"rs_{secrets.token_hex(8)}", "type": "reasoning", "summary": summary})
    cut_off = answer.call.finish_reason != "stop"
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        status = "incomplete" if cut_off else "completed"
        output.append(
            {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant", "status": status}
            | {"content": [part]}
        )
    output += [
        {
            "id": f"fc_{call.call_id}",
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments_json,
            "status": "completed",
        }
        for call in answer.tool_calls
    ]
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": "incomplete" if cut_off else "completed",
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
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {},
            }
            | {"strict": False}
            for tool in request.tools or ()
        ],
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + written,
        },
    }


def _stream(body: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    number = -1

    def said(kind: str, /, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    yield Piece(said("response.created", response=begun), answer, 0)
    yield Piece(said("response.in_progress", response=begun), answer, 0)
    for place, item in enumerate(body["output"]):
        at = {"output_index": place}
        empty = {"content": []} if item["type"] == "message" else {}
        empty |= {"arguments": ""} if item["type"] == "function_call" else {}
        sent = 0 if item["type"] == "message" and not answer.reasoning else None
        started = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
        yield Piece(said("response.output_item.added", **at, item=started), answer, sent)
        at_item = {**at, "item_id": item["id"]}
        if item["type"] == "message":
            part, in_part = item["content"][0], {**at_item, "content_index": 0}
            yield Piece(said("response.content_part.added", **in_part, part={**part, "text": ""}), answer, sent)
            for text, sent in pieces_of(answer):
                yield Piece(said("response.output_text.delta", **in_part, delta=text, logprobs=[]), answer, sent)
            yield Piece(said("response.output_text.done", **in_part, text=part["text"], logprobs=[]), answer)
            yield Piece(said("response.content_part.done", **in_part, part=part), answer)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield Piece(said("response.function_call_arguments.delta", **at_item, delta=arguments), answer)
            done = said("response.function_call_arguments.done", **at_item, name=item["name"], arguments=arguments)
            yield Piece(done, answer)
        yield Piece(said("response.output_item.done", **at, item=item), answer)
    yield Piece(said(f"response.{body['status']}", response=body), answer)
