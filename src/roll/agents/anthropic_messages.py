"""`POST /v1/messages`, as Anthropic's interface has it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from roll.agents.contexts import Conversation
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
    stops,
)
from roll.types import Message

__all__ = ["MessagesRequest", "answer_messages"]


class Text(Body):
    """Part of a text."""

    type: Literal["text"]
    text: str


class Block(Body):
    """Part of a message: text, a call of a tool, or what a tool said; what an answer thought is passed over."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: Annotated[str, Field(max_length=256)] = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[Text] | None = None


class Said(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Body):
    """A tool that the model may call."""

    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Body):
    """Whether tools are called; a model here is only ever free to, or not offered any."""

    type: Literal["auto", "any", "tool", "none"]


class MessagesRequest(Body):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    model: Name
    messages: Annotated[list[Said], Field(min_length=1, max_length=4096)]
    max_tokens: Count
    system: str | list[Text] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] | None
    ) = None
    stream: bool | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


async def answer_messages(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = checked(MessagesRequest, raw)
    if request.messages[-1].role == "assistant":
        message = "the last message is the assistant's: an answer that was begun cannot be continued here."
        raise Refusal(400, "invalid_value", message, field="messages")
    none = request.tool_choice is not None and request.tool_choice.type == "none"
    tools = [] if none else list(request.tools or ())
    system = _text(request.system)
    conversation = Conversation(
        messages=[
            *([chat_message("system", system)] if system else []),
            *(message for said in request.messages for message in _messages(said)),
        ],
        tools=[function_tool(tool.name, tool.description or "", tool.input_schema) for tool in tools],
    )
    context = session.contexts.of_conversation(conversation)
    [answer] = await session.ask(
        context,
        max_tokens=request.max_tokens,
        stop=stops(request.stop_sequences),
        tools=conversation.tools,
    )
    session.contexts.remember(conversation, assistant(answer), context, answer.call.token_ids)
    body = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(answer),
        "stop_reason": _stop_reason(answer),
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": len(context), "output_tokens": len(answer.call.token_ids)},
    }
    return Reply(stream=_stream(body, answer), answers=[answer]) if request.stream else Reply(body, answers=[answer])


def _text(content: str | Sequence[Text] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _messages(said: Said) -> list[Message]:
    """One message as chat templates take it; what tools said comes first, each as a message of its own."""
    if isinstance(said.content, str):
        return [chat_message(said.role, said.content)]
    text = "\n".join(block.text for block in said.content if block.type == "text")
    if said.role == "assistant":
        calls = [function_call(each.id, each.name, each.input) for each in said.content if each.type == "tool_use"]
        return [chat_message("assistant", text, tool_calls=calls)]
    results = [
        chat_message("tool", _text(block.content), tool_call_id=block.tool_use_id)
        for block in said.content
        if block.type == "tool_result"
    ]
    return [*results, *([chat_message("user", text)] if text or not results else [])]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    calls = [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(call.arguments)}
        for call in answer.tool_calls
    ]
    text: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text or not calls else []
    return text + calls


def _stop_reason(answer: Answer) -> str:
    if answer.call.finish_reason != "stop":
        return "max_tokens"
    if answer.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answer.tool_calls else "end_turn"


def _stream(body: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    def said(kind: str, /, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    usage = body["usage"]
    begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield Piece(said("message_start", message=begun), answer, 0)
    for index, block in enumerate(body["content"]):
        if block["type"] == "text":
            yield Piece(said("content_block_start", index=index, content_block={"type": "text", "text": ""}), answer, 0)
            for text, sent in pieces_of(answer):
                delta = {"type": "text_delta", "text": text}
                yield Piece(said("content_block_delta", index=index, delta=delta), answer, sent)
        else:
            yield Piece(said("content_block_start", index=index, content_block={**block, "input": {}}), answer)
            call = next(call for call in answer.tool_calls if call.call_id == block["id"])
            delta = {"type": "input_json_delta", "partial_json": call.arguments_json}
            yield Piece(said("content_block_delta", index=index, delta=delta), answer)
        yield Piece(said("content_block_stop", index=index), answer)
    delta = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield Piece(said("message_delta", delta=delta, usage={"output_tokens": usage["output_tokens"]}), answer)
    yield Piece(said("message_stop"), answer)
