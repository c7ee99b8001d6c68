"""`POST /v1/messages`, as Anthropic's interface has it."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from roll.agents import wire
from roll.agents.answering import Part, Reply, blocks, converse, streamed, usage
from roll.agents.contexts import Conversation
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.types import Message

__all__ = ["MessagesRequest", "answer_messages"]


class Block(wire.Body):
    """Part of a message: text, a call of a tool, or what a tool said; what an answer thought is passed over."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: Annotated[str, Field(max_length=256)] = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[wire.TextPart] | None = None


class Said(wire.Body):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(wire.Body):
    """A tool that the model may call."""

    name: wire.Name
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(wire.Body):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class MessagesRequest(wire.Asking):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    messages: Annotated[list[Said], Field(min_length=1, max_length=4096)]
    max_tokens: wire.Count
    system: str | list[wire.TextPart] | None = None
    stop_sequences: wire.Stops | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: wire.Form | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


async def answer_messages(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(MessagesRequest, raw)
    if request.messages[-1].role == "assistant":
        message = "the last message is the assistant's: an answer that was begun cannot be continued here."
        raise Refusal(400, "invalid_value", message, field="messages")
    [answer] = answers = await converse(
        session, _conversation(request), max_tokens=request.max_tokens, stop=request.stop_sequences or ()
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


def _conversation(request: MessagesRequest) -> Conversation:
    choice = request.tool_choice or ToolChoice(type="auto")
    tools = [] if choice.type == "none" else request.tools or ()
    system = wire.joined_text(request.system)
    return Conversation(
        messages=[
            *([wire.chat_message("system", system)] if system else []),
            *(message for said in request.messages for message in _messages(said)),
        ],
        tools=[wire.function_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
        demands=[
            *wire.demanded_call(choice.model_dump() if choice.type == "tool" else choice.type),
            *wire.demanded_format("output_config", request.output_config),
        ],
    )


def _messages(said: Said) -> list[Message]:
    """One message as chat templates take it; what tools said comes first, each as a message of its own."""
    if isinstance(said.content, str):
        return [wire.chat_message(said.role, said.content)]
    text = "\n".join(block.text for block in said.content if block.type == "text")
    if said.role == "assistant":
        calls = [wire.function_call(each.id, each.name, each.input) for each in said.content if each.type == "tool_use"]
        return [wire.chat_message("assistant", text, tool_calls=calls)]
    results = [
        wire.chat_message("tool", wire.joined_text(block.content), tool_call_id=block.tool_use_id)
        for block in said.content
        if block.type == "tool_result"
    ]
    return [*results, *([wire.chat_message("user", text)] if text or not results else [])]


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
    """Of an answer whose whole object is `body`; its reasoning is no block of that."""
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
