"""`POST /v1/responses`: OpenAI's newer interface, in which a conversation is a list of items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import Field

from roll.agents import wire
from roll.agents.answering import Part, Piece, Reply, assistant, blocks, converse, streamed, usage
from roll.agents.contexts import Conversation
from roll.agents.notes import Notes
from roll.agents.offers import Offer, as_text
from roll.agents.refusals import Refusal
from roll.agents.response_items import Item, Tools, messages_of, offers_of
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.types import Message

__all__ = ["ResponsesRequest", "count_input", "respond"]

_CALLS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The field with the content of each kind of call, and the events that stream it."""


class ResponsesRequest(wire.Asking):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: wire.Count | None = None
    tools: Tools | None = None
    tool_choice: wire.Choice | None = None
    text: wire.Form | None = None
    conversation: Any = None
    prompt: Any = None


async def respond(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(ResponsesRequest, raw, session.notes)
    said, offers = _read(session, request)
    conversation = _conversation(request, said, offers, session.notes)
    [answer] = answers = await converse(session, conversation, max_tokens=request.max_output_tokens)
    response_id = f"resp_{secrets.token_hex(12)}"
    session.answers[response_id] = (*said, assistant(answer))
    body = _response(response_id, request, answer, {offer.name: offer for offer in offers})
    return Reply(stream=_stream(body, answer), answers=answers) if request.stream else Reply(body, answers=answers)


async def count_input(session: Session, raw: bytes) -> Reply:
    """Count the tokens of the model's input, without generating."""
    request = wire.checked(ResponsesRequest, raw, session.notes)
    num_tokens = session.contexts.count(_conversation(request, *_read(session, request), session.notes))
    return Reply({"object": "response.input_tokens", "input_tokens": num_tokens})


def _read(session: Session, request: ResponsesRequest) -> tuple[list[Message], list[Offer]]:
    for field in ("conversation", "prompt"):
        if getattr(request, field):
            message = f"{field} names what the vendor keeps: have the agent send it in input, or previous_response_id."
            raise Refusal(400, "unsupported_parameter", message, field=field)
    said = [*_before(session, request.previous_response_id), *messages_of(request.input, session.notes)]
    if not said:
        raise Refusal(400, "invalid_value", "input has no message: send one.", field="input")
    return said, offers_of(request.tools or (), request.input, session.notes)


def _conversation(
    request: ResponsesRequest, said: Sequence[Message], offers: Sequence[Offer], notes: Notes
) -> Conversation:
    choice = request.tool_choice
    return Conversation(
        messages=[*([wire.chat_message("system", request.instructions)] if request.instructions else []), *said],
        tools=[] if wire.chosen_kind(choice) == "none" else [offer.function for offer in offers],
        demands=[*wire.demanded_call(choice, notes), *wire.demanded_format("text", request.text)],
    )


def _before(session: Session, response_id: str | None) -> Sequence[Message]:
    if response_id is None:
        return ()
    known = session.answers.get(response_id)
    if known is None:
        message = f"no response '{response_id[:64]}' was given in this session."
        raise Refusal(404, "previous_response_not_found", message, field="previous_response_id")
    return known


def _response(
    response_id: str, request: ResponsesRequest, answer: Answer, offers: Mapping[str, Offer]
) -> dict[str, Any]:
    given, written = usage([answer])
    cut_off = answer.call.finish_reason != "stop"
    status = "incomplete" if cut_off else "completed"
    output: list[dict[str, Any]] = []
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        output.append({"id": f"rs_{secrets.token_hex(8)}", "type": "reasoning", "summary": summary})
    output += [_item(block, status, offers) for block in blocks(answer)]
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
        "tools": [_tool(tool) for tool in request.tools or ()],
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + written,
        },
    }


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as the agent sent it."""
    said: dict[str, Any] = tool.model_dump()
    return said | {"parameters": tool.parameters or {}, "strict": False} if said["type"] == "function" else said


def _item(block: ToolCall | str, status: str, offers: Mapping[str, Offer]) -> dict[str, Any]:
    if isinstance(block, str):
        part = {"type": "output_text", "text": block, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{secrets.token_hex(8)}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": [part]}
    offer = offers.get(block.name)
    head: dict[str, Any] = {"call_id": block.call_id, "name": offer.agents_name if offer else block.name}
    if offer is not None and offer.namespace:
        head["namespace"] = offer.namespace
    if offer is not None and offer.takes_text:
        item = {"id": f"ctc_{block.call_id}", "type": "custom_tool_call", **head, "input": as_text(block.arguments)}
    else:
        item = {"id": f"fc_{block.call_id}", "type": "function_call", **head, "arguments": block.arguments_json}
    return {**item, "status": "completed"}


def _stream(body: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    numbers = count()

    def write(part: Part) -> Iterator[bytes]:
        for kind, data in _events(body, part):
            yield wire.event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    return streamed(answer, write)


def _events(body: dict[str, Any], part: Part) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of an answer with the object `body`; each part belongs to one of its items."""
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
            field, event = _CALLS[item["type"]]
            value = item[field]
            done = {"name": item["name"], field: value} if field == "arguments" else {field: value}
            return [
                ("response.output_item.added", {**at, "item": {**started, field: ""}}),
                (f"{event}.delta", {**in_item, "delta": value}),
                (f"{event}.done", {**in_item, **done}),
                ended,
            ]
    return [("response.output_item.added", {**at, "item": started}), ended]
