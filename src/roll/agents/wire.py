"""What all routes share: bodies that are checked, answers as messages, and streams of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from roll.agents.refusals import Refusal
from roll.agents.session import Answer
from roll.types import Message

__all__ = [
    "Body",
    "Count",
    "Name",
    "Piece",
    "Reply",
    "Stops",
    "assistant",
    "chat_message",
    "checked",
    "event",
    "function_call",
    "function_tool",
    "pieces_of",
    "stops",
]

MOST_PIECES = 16
"""Into which the text of a streamed answer is cut."""
SHORTEST_PIECE = 16
"""Characters."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Stops = (
    Annotated[str, Field(min_length=1, max_length=256)]
    | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]
)


class Body(BaseModel):
    """What a vendor's interface sends; what has no meaning here is ignored, as programs send much of it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream."""

    data: bytes
    answer: Answer | None = None
    """Of which it is."""
    num_characters: int | None = None
    """Of the answer's text that have been sent when this has; `None`: nothing less than all of it can be told."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answers: one object, or a stream."""

    body: Mapping[str, Any] | None = None
    stream: Iterator[Piece] | None = None
    answers: Sequence[Answer] = ()
    """All of them."""


def checked(model: type[B], raw: bytes) -> B:
    """The body of a request.

    Raises:
        Refusal: names the field that is wrong.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        found = max(error.errors(include_url=False, include_context=False), key=lambda entry: len(entry["loc"]))
        place = _place(found["loc"])
        message = f"{place}: {found['msg']}" if place else found["msg"]
        raise Refusal(400, "invalid_value", f"{message[:400]}.", field=place) from error
    except RecursionError as error:
        raise Refusal(400, "invalid_value", "the body is nested too deeply.") from error


def _place(loc: Sequence[int | str]) -> str:
    """`messages[2].content` of pydantic's path, without the names of alternatives that it tried."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "dict", "bool", "int") and part[:1].islower():
            place += f".{part}" if place else part
    return place[:200]


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


# ---- conversations


def chat_message(
    role: str, content: str, *, tool_calls: Sequence[Mapping[str, Any]] = (), tool_call_id: str = ""
) -> Message:
    """A message as chat templates take it."""
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    if tool_call_id:
        message["tool_call_id"] = tool_call_id
    return cast(Message, message)


def function_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool as chat templates take it: arguments as an object where they are one."""
    if isinstance(arguments, str):
        try:
            value = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            value = arguments
        arguments = value if isinstance(value, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates take it."""
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def assistant(answer: Answer) -> Message:
    """An answer as a message of the conversation that goes on."""
    calls = [function_call(call.call_id, call.name, call.arguments) for call in answer.tool_calls]
    return chat_message("assistant", answer.text, tool_calls=calls)


# ---- streams


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(data) + b"\n\n"


def pieces_of(answer: Answer) -> Iterator[tuple[str, int | None]]:
    """The answer's text in pieces, each with how many characters have been sent with it."""
    text = answer.text
    size = max(SHORTEST_PIECE, -(-len(text) // MOST_PIECES))
    plain = not answer.reasoning and not answer.tool_calls
    for begin in range(0, len(text), size):
        yield text[begin : begin + size], min(begin + size, len(text)) if plain else None
