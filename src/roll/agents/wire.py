"""What all dialects write alike: checked bodies, messages and tools as chat templates take them, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from roll.agents.refusals import Refusal
from roll.types import Message

Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Stops = Annotated[list[Name], Field(max_length=16)]
Choice = Literal["auto", "none", "required"] | dict[str, Any]
"""Of tools."""


class Body(BaseModel):
    """What a vendor's interface sends; what has no meaning here is ignored, as programs send much of it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class Asking(Body):
    """What every request has. The run's own sampling holds, whatever temperature is asked for."""

    model: Name
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class StreamOptions(Body):
    """Of a streamed answer."""

    include_usage: bool = False


class Choosing(Asking):
    """What OpenAI's older interfaces take: several answers to choose from."""

    n: Count | None = None
    max_tokens: Count | None = None
    stop: Name | Stops | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> Sequence[str]:
        """However many were given."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()


class Function(Body):
    """What a tool is called and takes."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Form(Body):
    """What an answer is to be like."""

    format: dict[str, Any] | None = None


B = TypeVar("B", bound=BaseModel)


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


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates take it."""
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


# ---- what an answer is to be like: the field, and what the model is told


def demanded_call(choice: str | Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """That tools are called, where a request leaves the model no choice: a mapping names one, in some depth."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = (function if isinstance(function, Mapping) else choice).get("name")
        if isinstance(name, str) and name:
            return [("tool_choice", f"Answer with a call of the function {name[:256]}.")]
    elif choice in (None, "auto", "none"):
        return []
    return [("tool_choice", "Answer with a call of one of the functions.")]


def demanded_format(field: str, form: Form | None) -> list[tuple[str, str]]:
    """That the answer is JSON, perhaps of a schema, which OpenAI's older interface has one level deeper."""
    given = form.format if form is not None and form.format is not None else {}
    if given.get("type") not in ("json_object", "json_schema"):
        return []
    nested = given.get("json_schema")
    schema = (nested if isinstance(nested, dict) else given).get("schema")
    words = f" It has this schema: {to_json(schema, inf_nan_mode='null').decode()}" if isinstance(schema, dict) else ""
    return [(field, f"Answer with one JSON object and nothing else.{words}")]


# ---- streams


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(data) + b"\n\n"
