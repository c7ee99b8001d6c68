"""`POST /v1/chat/completions`, as OpenAI's interface has it."""

from __future__ import annotations

import secrets
import time
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
    Stops,
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

__all__ = ["ChatRequest", "Function", "TextPart", "chat", "finish_reason", "joined_text", "token_logprobs", "usage"]

DONE = b"data: [DONE]\n\n"


class TextPart(Body):
    """Part of a message: text alone."""

    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str = ""
    refusal: str = ""


class Function(Body):
    """What a tool is called and takes."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Body):
    """Name and arguments of a call."""

    name: Name
    arguments: str = "{}"


class Called(Body):
    """A call that an earlier answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[Called], Field(max_length=128)] | None = None
    tool_call_id: str | None = None


class StreamOptions(Body):
    """Of a streamed answer."""

    include_usage: bool = False


class ChatRequest(Body):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    model: Name
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


async def chat(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = checked(ChatRequest, raw)
    tools = () if request.tool_choice == "none" else _tools(request)
    conversation = Conversation(messages=[_message(message) for message in request.messages], tools=tools)
    context = session.contexts.of_conversation(conversation)
    answers = await session.ask(
        context,
        n=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=stops(request.stop),
        tools=tools,
    )
    for answer in answers:
        session.contexts.remember(conversation, assistant(answer), context, answer.call.token_ids)
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": _fingerprint(answers),
    }
    if request.stream:
        return Reply(stream=_stream(head, request, session, answers), answers=answers)
    choices = [
        {
            "index": index,
            "message": _said(answer),
            "finish_reason": finish_reason(answer),
            "logprobs": {"content": token_logprobs(session, answer), "refusal": None} if request.logprobs else None,
        }
        for index, answer in enumerate(answers)
    ]
    return Reply({**head, "object": "chat.completion", "choices": choices, "usage": usage(answers)}, answers=answers)


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    functions = [tool.function for tool in request.tools or ()]
    return [function_tool(each.name, each.description or "", each.parameters) for each in functions]


def _message(message: ChatMessage) -> Message:
    calls = [function_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if message.role == "tool" and not message.tool_call_id:
        raise Refusal(
            400, "missing_required_parameter", "a message of role tool names its tool_call_id.", field="messages"
        )
    return chat_message(
        message.role,
        joined_text(message.content),
        tool_calls=calls if message.role == "assistant" else (),
        tool_call_id=message.tool_call_id or "",
    )


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    """The text of a message, whichever form it has."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal for part in content)


def _said(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
    message["refusal"] = None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in answer.tool_calls
        ]
    return message


def _stream(head: dict[str, Any], request: ChatRequest, session: Session, answers: Sequence[Answer]) -> Iterator[Piece]:
    head = {**head, "object": "chat.completion.chunk"}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return event({**head, "choices": [choice]})

    for index, answer in enumerate(answers):
        yield Piece(chunk(index, {"role": "assistant", "content": "" if not answer.tool_calls else None}), answer, 0)
        if answer.reasoning:
            yield Piece(chunk(index, {"reasoning_content": answer.reasoning}), answer)
        logprobs = {"content": token_logprobs(session, answer), "refusal": None} if request.logprobs else None
        for text, sent in pieces_of(answer):
            yield Piece(chunk(index, {"content": text}, None, logprobs), answer, sent)
            logprobs = None
        for place, call in enumerate(answer.tool_calls):
            function = {"name": call.name, "arguments": ""}
            began = {"index": place, "id": call.call_id, "type": "function", "function": function}
            yield Piece(chunk(index, {"tool_calls": [began]}), answer)
            rest = {"index": place, "function": {"arguments": call.arguments_json}}
            yield Piece(chunk(index, {"tool_calls": [rest]}), answer)
        yield Piece(chunk(index, {}, finish_reason(answer), logprobs), answer)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield Piece(event({**head, "choices": [], "usage": usage(answers)}))
    yield Piece(DONE)


def finish_reason(answer: Answer) -> str:
    """As OpenAI names it."""
    if answer.call.finish_reason != "stop":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Tokens of a request and its answers."""
    given, written = len(answers[0].call.context), sum(len(answer.call.token_ids) for answer in answers)
    return {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}


def token_logprobs(session: Session, answer: Answer) -> list[dict[str, Any]]:
    """Of every token that the model wrote; engines say nothing of tokens that it did not write."""
    call = answer.call
    texts = [session.renderer.spelt(token) for token in call.token_ids[:, None]]
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, call.logprobs.tolist(), strict=True)
    ]


def _fingerprint(answers: Sequence[Answer]) -> str:
    versions = answers[0].call.policy_versions
    return f"policy-{int(versions[-1])}" if len(versions) else "policy"
