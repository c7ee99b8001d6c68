"""`POST /v1/chat/completions` of OpenAI's API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from roll.agents import wire
from roll.agents.contexts import Conversation
from roll.agents.message_parts import Content, UnknownObject, get_type, read_content, read_text
from roll.agents.replies import AnswerEvent, Reply, StreamChunk, answer_conversation, count_usage, stream_answer
from roll.agents.request_errors import RequestError
from roll.agents.session import Answer, Session
from roll.agents.tool_calls import ToolCall
from roll.agents.tool_specs import (
    TEXT_PARAMETER,
    ToolSpec,
    build_text_tool,
    read_text_argument,
    warn_of_unsupported_tools,
)
from roll.agents.warning_log import WarningLog
from roll.types import Message

__all__ = ["ChatRequest", "build_reply", "create_chat_completion"]


class CustomToolBody(wire.ApiObject):
    """The definition of a custom tool, which takes one string."""

    name: wire.Name
    description: str | None = None
    format: dict[str, Any] | None = None


class FunctionTool(wire.ApiObject):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: wire.FunctionDefinition


class CustomTool(wire.ApiObject):
    """A custom tool, which takes one string."""

    type: Literal["custom"]
    custom: CustomToolBody


def _get_tool_type(value: Any) -> str:
    return {"function": "Function", "custom": "Custom"}.get(get_type(value, "function"), "Unknown")


Tool = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_tool_type),
]


class FunctionCallBody(wire.ApiObject):
    """The name and arguments of a function call."""

    name: wire.Name
    arguments: str = "{}"


class CustomCallBody(wire.ApiObject):
    """The name and input of a call to a custom tool."""

    name: wire.Name
    input: str = ""


class FunctionCall(wire.ApiObject):
    """A function call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallBody


class CustomCall(wire.ApiObject):
    """A call to a custom tool in an earlier answer."""

    id: str = ""
    type: Literal["custom"]
    custom: CustomCallBody


AnyToolCall = Annotated[
    Annotated[FunctionCall, Tag("Function")]
    | Annotated[CustomCall, Tag("Custom")]
    | Annotated[UnknownObject, Tag("Unknown")],
    Discriminator(_get_tool_type),
]


class ChatMessage(wire.ApiObject):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: Annotated[list[AnyToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None
    name: Any = None


class ChatRequest(wire.ChoicesRequest):
    """A request to continue a conversation. The run's sampling settings apply; `temperature` is ignored."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: wire.PositiveCount | None = None
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: wire.ToolChoice | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


async def create_chat_completion(session: Session, raw_body: bytes) -> Reply:
    """Generate answers to a request, given its body, and return them in OpenAI's chat format."""
    request = wire.parse_body(ChatRequest, raw_body, session.warnings)
    specs = _read_tools(request, session.warnings)
    answers = await answer_conversation(
        session,
        _build_conversation(request, specs, session.warnings),
        n=request.n or 1,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=request.stop_strings,
    )
    versions = answers[0].call.policy_versions
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"policy-{int(versions[-1])}" if len(versions) else "policy",
    }

    def build_logprobs(answer: Answer) -> dict[str, Any]:
        return {"logprobs": _build_logprobs(session, answer) if request.logprobs else None}

    texts = {spec.name for spec in specs if spec.takes_text}

    def build_choice(answer: Answer) -> dict[str, Any]:
        return {"message": _build_message(answer, texts), **build_logprobs(answer)}

    def build_chunks(answer: Answer, event: AnswerEvent) -> list[dict[str, Any]]:
        with_it = build_logprobs(answer) if event.kind == "end" else {}
        return [{"delta": delta, **with_it} for delta in _build_deltas(answer, event, texts)]

    return build_reply(request, head, answers, build_choice, build_chunks)


def build_reply(
    request: wire.ChoicesRequest,
    head: dict[str, Any],
    answers: Sequence[Answer],
    build_choice: Callable[[Answer], dict[str, Any]],
    build_chunks: Callable[[Answer, AnswerEvent], list[dict[str, Any]]],
) -> Reply:
    """Build the reply to a chat or text completion: an object with one choice per answer, or a stream of chunks.

    Args:
        request: The request; its `stream` selects a stream.
        head: Fields that the object and every chunk have in common, such as `id`.
        answers: The answers to the request.
        build_choice: Returns the fields of the choice for a complete answer.
        build_chunks: Returns the fields of each chunk for one event of an answer; the last chunk has the fields that
            are known only at the end.
    """
    given, written = count_usage(answers)
    used = {"usage": {"prompt_tokens": given, "completion_tokens": written, "total_tokens": given + written}}

    def write_chunk(index: int, answer: Answer, event: AnswerEvent) -> Iterator[bytes]:
        reason = _get_finish_reason(answer) if event.kind == "end" else None
        for chunk in build_chunks(answer, event):
            choice = {"index": index, "finish_reason": reason, "logprobs": None, **chunk}
            yield wire.encode_event({**head, "choices": [choice]})

    def stream() -> Iterator[StreamChunk]:
        for index, answer in enumerate(answers):
            yield from stream_answer(answer, partial(write_chunk, index, answer))
        if request.stream_options is not None and request.stream_options.include_usage:
            yield StreamChunk(wire.encode_event({**head, "choices": [], **used}))
        yield StreamChunk(b"data: [DONE]\n\n")

    if request.stream:
        return Reply(stream=stream(), answers=answers)
    each = [{"index": i, "finish_reason": _get_finish_reason(a), **build_choice(a)} for i, a in enumerate(answers)]
    return Reply({**head, "choices": each, **used}, answers=answers)


def _read_tools(request: ChatRequest, warnings: WarningLog) -> list[ToolSpec]:
    if request.functions:
        message = "`functions` is deprecated and not supported: configure the agent to send `tools`."
        raise RequestError(400, "unsupported_parameter", message, field="functions")
    specs: list[ToolSpec] = []
    unsupported: list[str] = []
    for tool in request.tools or ():
        if isinstance(tool, FunctionTool):
            each = tool.function
            specs.append(ToolSpec(name=each.name, description=each.description, parameters=each.parameters))
        elif isinstance(tool, CustomTool):
            specs.append(build_text_tool(tool.custom.name, tool.custom.description, tool.custom.format))
        else:
            unsupported.append(tool.type)
    return warn_of_unsupported_tools(specs, unsupported, warnings)


def _build_conversation(request: ChatRequest, specs: Sequence[ToolSpec], warnings: WarningLog) -> Conversation:
    choice = request.tool_choice
    return Conversation(
        messages=[_convert_message(message, warnings) for message in request.messages],
        tools=[] if wire.get_tool_choice_type(choice) == "none" else [spec.function for spec in specs],
        format_constraints=[
            *wire.build_call_constraint(choice, warnings),
            *wire.build_format_constraint("response_format", wire.AnswerFormat(format=request.response_format)),
        ],
    )


def _convert_message(message: ChatMessage, warnings: WarningLog) -> Message:
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            400,
            "missing_required_parameter",
            "a message with the role `tool` must have a `tool_call_id`.",
            field="messages",
        )
    if message.name and message.role != "tool":  # its name is in the call that it answers
        wire.warn_of_ignored_field("name", warnings)
    calls: list[Mapping[str, Any]] = []
    for call in (message.tool_calls or ()) if message.role == "assistant" else ():
        if isinstance(call, FunctionCall):
            calls.append(wire.build_function_call(call.id, call.function.name, call.function.arguments))
        elif isinstance(call, CustomCall):
            calls.append(wire.build_function_call(call.id, call.custom.name, {TEXT_PARAMETER: call.custom.input}))
        else:
            warnings.warn_once(
                f"call {call.type[:64]}", f"agents send calls of the type '{call.type[:64]}', which are ignored."
            )
    return wire.build_chat_message(
        message.role,
        (read_text if message.role == "assistant" else read_content)(message.content, warnings),
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
    )


def _build_message(answer: Answer, custom_tools: Collection[str]) -> dict[str, Any]:
    content = answer.text or (None if answer.tool_calls else "")
    calls = [_encode_call(call, custom_tools) for call in answer.tool_calls]
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _encode_call(call: ToolCall, custom_tools: Collection[str], *, omit_arguments: bool = False) -> dict[str, Any]:
    """Return a tool call in OpenAI's format.

    Args:
        call: The call.
        custom_tools: Names of the custom tools, which take one string.
        omit_arguments: Whether the arguments are empty, as in the first chunk of a stream.
    """
    if call.name in custom_tools:
        body = {"name": call.name, "input": "" if omit_arguments else read_text_argument(call.arguments)}
        return {"id": call.call_id, "type": "custom", "custom": body}
    function = {"name": call.name, "arguments": "" if omit_arguments else call.arguments_json}
    return {"id": call.call_id, "type": "function", "function": function}


def _build_deltas(answer: Answer, event: AnswerEvent, custom_tools: Collection[str]) -> list[dict[str, Any]]:
    match event.kind:
        case "begin":
            return [{"role": "assistant", "content": None if answer.tool_calls else ""}]
        case "reasoning":
            return [{"reasoning_content": event.text}]
        case "text":
            return [{"content": event.text}]
        case "end":
            return [{}]
    if event.call is None:
        return []
    index = answer.tool_calls.index(event.call)
    whole = _encode_call(event.call, custom_tools)
    rest = {"index": index, **{kind: _drop_name(whole[kind]) for kind in ("function", "custom") if kind in whole}}
    return [
        {"tool_calls": [{"index": index, **_encode_call(event.call, custom_tools, omit_arguments=True)}]},
        {"tool_calls": [rest]},
    ]


def _drop_name(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "name"}


def _get_finish_reason(answer: Answer) -> str:
    """Return OpenAI's name for the reason why the answer ended: `length`, `tool_calls` or `stop`."""
    if answer.call.finish_reason != "stop":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def _build_logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    """Return the log-probs of the generated tokens; `top_logprobs` is empty, because engines do not return them."""
    call = answer.call
    texts = [session.renderer.decode_raw(token) for token in call.token_ids[:, None]]
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, call.logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}
