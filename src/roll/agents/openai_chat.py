"""`POST /v1/chat/completions` of OpenAI's interface."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from roll.agents import wire
from roll.agents.answering import Part, Piece, Reply, converse, streamed, usage
from roll.agents.contexts import Conversation
from roll.agents.notes import Notes
from roll.agents.offers import INPUT, Offer, as_text, served, text_tool
from roll.agents.parts import Content, Foreign, text_of, type_of
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.types import Message

__all__ = ["ChatRequest", "chat", "choices"]


class CustomTool(wire.Body):
    """The definition of a tool that takes one text."""

    name: wire.Name
    description: str | None = None
    format: dict[str, Any] | None = None


class FunctionTool(wire.Body):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: wire.Function


class TextTool(wire.Body):
    """A tool that takes one text."""

    type: Literal["custom"]
    custom: CustomTool


def _tool_kind(value: Any) -> str:
    return {"function": "Function", "custom": "Custom"}.get(type_of(value, "function"), "Foreign")


Tool = Annotated[
    Annotated[FunctionTool, Tag("Function")] | Annotated[TextTool, Tag("Custom")] | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_tool_kind),
]


class CalledFunction(wire.Body):
    """Name and arguments of a call."""

    name: wire.Name
    arguments: str = "{}"


class CalledWithText(wire.Body):
    """Name and text of a call."""

    name: wire.Name
    input: str = ""


class FunctionCall(wire.Body):
    """A call of a function that an earlier answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class TextCall(wire.Body):
    """A call, by an earlier answer, of a tool that takes one text."""

    id: str = ""
    type: Literal["custom"]
    custom: CalledWithText


Called = Annotated[
    Annotated[FunctionCall, Tag("Function")] | Annotated[TextCall, Tag("Custom")] | Annotated[Foreign, Tag("Foreign")],
    Discriminator(_tool_kind),
]


class ChatMessage(wire.Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: Annotated[list[Called], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    name: Any = None


class ChatRequest(wire.Choosing):
    """A conversation to be continued. The run's own sampling holds, whatever temperature is asked for."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: wire.Count | None = None
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: wire.Choice | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


async def chat(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(ChatRequest, raw, session.notes)
    offers = _offers(request, session.notes)
    answers = await converse(
        session,
        _conversation(request, offers, session.notes),
        n=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=request.stops,
    )
    versions = answers[0].call.policy_versions
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"policy-{int(versions[-1])}" if len(versions) else "policy",
    }

    def logprobs(answer: Answer) -> dict[str, Any]:
        return {"logprobs": _logprobs(session, answer) if request.logprobs else None}

    texts = {offer.name for offer in offers if offer.takes_text}

    def whole(answer: Answer) -> dict[str, Any]:
        return {"message": _said(answer, texts), **logprobs(answer)}

    def chunks(answer: Answer, part: Part) -> list[dict[str, Any]]:
        with_it = logprobs(answer) if part.kind == "end" else {}
        return [{"delta": delta, **with_it} for delta in _deltas(answer, part, texts)]

    return choices(request, head, answers, whole, chunks)


def choices(
    request: wire.Choosing,
    head: dict[str, Any],
    answers: Sequence[Answer],
    whole: Callable[[Answer], dict[str, Any]],
    chunks: Callable[[Answer, Part], list[dict[str, Any]]],
) -> Reply:
    """Build a reply of OpenAI's older interfaces: an object with a choice per answer, or a stream of chunks.

    Args:
        request: The request, which says whether to stream.
        head: Fields of the object and of every chunk.
        answers: The answers to the request.
        whole: A function that returns the fields of a complete answer.
        chunks: A function that returns the fields of each chunk of an answer's part; the last chunk has the fields that
            are known only at the end.
    """
    given, written = usage(answers)
    used = {"usage": {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}}

    def write(index: int, answer: Answer, part: Part) -> Iterator[bytes]:
        reason = _finish_reason(answer) if part.kind == "end" else None
        for chunk in chunks(answer, part):
            choice = {"index": index, "finish_reason": reason, "logprobs": None, **chunk}
            yield wire.event({**head, "choices": [choice]})

    def stream() -> Iterator[Piece]:
        for index, answer in enumerate(answers):
            yield from streamed(answer, partial(write, index, answer))
        if request.stream_options is not None and request.stream_options.include_usage:
            yield Piece(wire.event({**head, "choices": [], **used}))
        yield Piece(b"data: [DONE]\n\n")

    if request.stream:
        return Reply(stream=stream(), answers=answers)
    each = [{"index": i, "finish_reason": _finish_reason(a), **whole(a)} for i, a in enumerate(answers)]
    return Reply({**head, "choices": each, **used}, answers=answers)


def _offers(request: ChatRequest, notes: Notes) -> list[Offer]:
    if request.functions:
        message = "functions is the older form of tools, which is not served here: have the agent send tools."
        raise Refusal(400, "unsupported_parameter", message, field="functions")
    offers: list[Offer] = []
    left_out: list[str] = []
    for tool in request.tools or ():
        if isinstance(tool, FunctionTool):
            each = tool.function
            offers.append(Offer(name=each.name, description=each.description, parameters=each.parameters))
        elif isinstance(tool, TextTool):
            offers.append(text_tool(tool.custom.name, tool.custom.description, tool.custom.format))
        else:
            left_out.append(tool.type)
    return served(offers, left_out, notes)


def _conversation(request: ChatRequest, offers: Sequence[Offer], notes: Notes) -> Conversation:
    choice = request.tool_choice
    return Conversation(
        messages=[_message(message, notes) for message in request.messages],
        tools=[] if wire.chosen_kind(choice) == "none" else [offer.function for offer in offers],
        demands=[
            *wire.demanded_call(choice, notes),
            *wire.demanded_format("response_format", wire.Form(format=request.response_format)),
        ],
    )


def _message(message: ChatMessage, notes: Notes) -> Message:
    if message.role == "tool" and not message.tool_call_id:
        raise Refusal(
            400, "missing_required_parameter", "a message of role tool names its tool_call_id.", field="messages"
        )
    if message.name and message.role != "tool":  # its name is in the call that it answers
        wire.note_field("name", notes)
    calls: list[Mapping[str, Any]] = []
    for call in (message.tool_calls or ()) if message.role == "assistant" else ():
        if isinstance(call, FunctionCall):
            calls.append(wire.function_call(call.id, call.function.name, call.function.arguments))
        elif isinstance(call, TextCall):
            calls.append(wire.function_call(call.id, call.custom.name, {INPUT: call.custom.input}))
        else:
            notes.add(f"call {call.type[:64]}", f"agents send calls of the type '{call.type[:64]}': they are left out.")
    return wire.chat_message(
        message.role,
        text_of(message.content, notes),
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
    )


def _said(answer: Answer, texts: Collection[str]) -> dict[str, Any]:
    content = answer.text or (None if answer.tool_calls else "")
    calls = [_call(call, texts) for call in answer.tool_calls]
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(call: ToolCall, texts: Collection[str], *, begun: bool = False) -> dict[str, Any]:
    """Return a tool call in OpenAI's form; if it has only `begun`, its arguments are empty."""
    if call.name in texts:
        body = {"name": call.name, "input": "" if begun else as_text(call.arguments)}
        return {"id": call.call_id, "type": "custom", "custom": body}
    function = {"name": call.name, "arguments": "" if begun else call.arguments_json}
    return {"id": call.call_id, "type": "function", "function": function}


def _deltas(answer: Answer, part: Part, texts: Collection[str]) -> list[dict[str, Any]]:
    match part.kind:
        case "begin":
            return [{"role": "assistant", "content": None if answer.tool_calls else ""}]
        case "reasoning":
            return [{"reasoning_content": part.text}]
        case "text":
            return [{"content": part.text}]
        case "end":
            return [{}]
    if part.call is None:
        return []
    index = answer.tool_calls.index(part.call)
    whole = _call(part.call, texts)
    rest = {"index": index, **{kind: _rest(whole[kind]) for kind in ("function", "custom") if kind in whole}}
    return [{"tool_calls": [{"index": index, **_call(part.call, texts, begun=True)}]}, {"tool_calls": [rest]}]


def _rest(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "name"}


def _finish_reason(answer: Answer) -> str:
    """Return the finish reason by OpenAI's name."""
    if answer.call.finish_reason != "stop":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def _logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    """Return the log-probs of every token that the model wrote; engines return none for other tokens."""
    call = answer.call
    texts = [session.renderer.decode_raw(token) for token in call.token_ids[:, None]]
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, call.logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}
