"""`POST /v1/responses`: OpenAI's newer interface, in which a conversation is a list of items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field

from roll.agents import wire
from roll.agents.answering import Part, Piece, Reply, assistant, blocks, converse, streamed, usage
from roll.agents.contexts import Conversation
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.types import Message

__all__ = ["ResponsesRequest", "respond"]


class Item(wire.Body):
    """A message, a call of a tool, or what a tool said."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[wire.TextPart] | None = None
    call_id: str = ""
    name: Annotated[str, Field(max_length=256)] = ""
    arguments: str = "{}"
    output: str | list[wire.TextPart] = ""


class ResponseTool(wire.Function):
    """A tool that the model may call; only functions are."""

    type: Literal["function"]


class ResponsesRequest(wire.Asking):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: wire.Count | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=256)] | None = None
    tool_choice: wire.Choice | None = None
    text: wire.Form | None = None


async def respond(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(ResponsesRequest, raw)
    said = [*_before(session, request.previous_response_id), *_messages(request.input)]
    if not said:
        raise Refusal(400, "invalid_value", "input has no message: send one.", field="input")
    [answer] = answers = await converse(session, _conversation(request, said), max_tokens=request.max_output_tokens)
    response_id = f"resp_{secrets.token_hex(12)}"
    session.answers[response_id] = (*said, assistant(answer))
    body = _response(response_id, request, answer)
    return Reply(stream=_stream(body, answer), answers=answers) if request.stream else Reply(body, answers=answers)


def _conversation(request: ResponsesRequest, said: Sequence[Message]) -> Conversation:
    choice = request.tool_choice
    tools = [] if choice == "none" else request.tools or ()
    return Conversation(
        messages=[*([wire.chat_message("system", request.instructions)] if request.instructions else []), *said],
        tools=[wire.function_tool(tool.name, tool.description, tool.parameters) for tool in tools],
        demands=[*wire.demanded_call(choice), *wire.demanded_format("text", request.text)],
    )


def _before(session: Session, response_id: str | None) -> Sequence[Message]:
    if response_id is None:
        return ()
    known = session.answers.get(response_id)
    if known is None:
        message = f"no response '{response_id[:64]}' was given in this session."
        raise Refusal(404, "previous_response_not_found", message, field="previous_response_id")
    return known


def _messages(given: str | Sequence[Item]) -> list[Message]:
    """Items as messages; the calls of one answer are one message, as they were when it was given."""
    if isinstance(given, str):
        return [wire.chat_message("user", given)]
    said: list[Message] = []
    for item in given:
        if item.type == "message":
            said.append(wire.chat_message(item.role, wire.joined_text(item.content)))
        elif item.type == "function_call_output":
            said.append(wire.chat_message("tool", wire.joined_text(item.output), tool_call_id=item.call_id))
        elif item.type == "function_call":
            if not item.name:
                raise Refusal(400, "missing_required_parameter", "an item function_call has a name.", field="input")
            call = wire.function_call(item.call_id, item.name, item.arguments)
            last: Any = said.pop() if said and said[-1]["role"] == "assistant" else {"content": ""}
            said.append(wire.chat_message("assistant", last["content"], tool_calls=[*last.get("tool_calls", ()), call]))
    return said


def _response(response_id: str, request: ResponsesRequest, answer: Answer) -> dict[str, Any]:
    given, written = usage([answer])
    cut_off = answer.call.finish_reason != "stop"
    status = "incomplete" if cut_off else "completed"
    output: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": f"rs_{secrets.token_hex(8)}", "type": "reasoning", "summary": summary})
    output += [_item(block, status) for block in blocks(answer)]
    tools = [tool.model_dump() | {"parameters": tool.parameters or {}, "strict": False} for tool in request.tools or ()]
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
        "tools": tools,
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + written,
        },
    }


def _item(block: ToolCall | str, status: str) -> dict[str, Any]:
    if isinstance(block, str):
        part = {"type": "output_text", "text": block, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": [part]}
    return {
        "id": f"fc_{block.call_id}",
        "type": "function_call",
        "call_id": block.call_id,
        "name": block.name,
        "arguments": block.arguments_json,
        "status": "completed",
    }


def _stream(body: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    numbers = count()

    def write(part: Part) -> Iterator[bytes]:
        for kind, data in _events(body, part):
            yield wire.event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    return streamed(answer, write)


def _events(body: dict[str, Any], part: Part) -> list[tuple[str, dict[str, Any]]]:
    """Of an answer whose whole object is `body`; each part belongs to one of its items."""
    if part.kind == "begin":
        begun = {"response": {**body, "status": "in_progress", "output": [], "usage": None}}
        return [("response.created", begun), ("response.in_progress", begun)]
    if part.kind == "end":
        return [(f"response.{body['status']}", {"response": body})]
    item = body["output"][part.block]
    at = {"output_index": part.block}
    in_item = {**at, "item_id": item["id"]}
    in_text = {**in_item, "content_index": 0}
    started = {**item, **({"status": "in_progress"} if "status" in item else {})}
    ended = ("response.output_item.done", {**at, "item": item})
    match part.kind:
        case "text begins":
            empty = {**item["content"][0], "text": ""}
            return [
                ("response.output_item.added", {**at, "item": {**started, "content": []}}),
                ("response.content_part.added", {**in_text, "part": empty}),
            ]
        case "text":
            return [("response.output_text.delta", {**in_text, "delta": part.text, "logprobs": []})]
        case "text ends":
            whole = item["content"][0]
            return [
                ("response.output_text.done", {**in_text, "text": whole["text"], "logprobs": []}),
                ("response.content_part.done", {**in_text, "part": whole}),
                ended,
            ]
        case "call":
            said = {name: item[name] for name in ("name", "arguments")}
            return [
                ("response.output_item.added", {**at, "item": {**started, "arguments": ""}}),
                ("response.function_call_arguments.delta", {**in_item, "delta": said["arguments"]}),
                ("response.function_call_arguments.done", {**in_item, **said}),
                ended,
            ]
    return [("response.output_item.added", {**at, "item": started}), ended]
