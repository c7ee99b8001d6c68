"""Code that all API formats share: request validation, messages and tools for chat templates, server-sent events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import from_json, to_json

from roll.agents.request_errors import RequestError
from roll.agents.warning_log import WarningLog
from roll.types import Content, Message, Speaker

Name = Annotated[str, Field(min_length=1, max_length=256)]
PositiveCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopStrings = Annotated[list[Name], Field(max_length=16)]
ToolChoice = Literal["auto", "none", "required"] | dict[str, Any]
"""A request's `tool_choice`."""


MAX_OBJECTS = 65_536
"""Maximum number of objects in one body: parsing this many takes a third of a second, during which no other agent is
answered."""
_FIELDS_WITHOUT_EFFECT = """
metadata user store service_tier include prompt_cache_key prompt_cache_retention safety_identifier client_metadata
cache_control diagnostics id status phase caller eager_input_streaming include_obfuscation annotations citations
signature logprobs is_error encrypted_content provider_specific_fields
thinking thinking_blocks reasoning reasoning_content reasoning_details reasoning_effort effort verbosity
"""
IGNORED_FIELDS = frozenset(_FIELDS_WITHOUT_EFFECT.split())
"""Fields that do not change the policy's input, or that set the amount of reasoning, which only the policy decides."""


class _ParseState:
    """The state of parsing one body."""

    def __init__(self, warnings: WarningLog | None) -> None:
        self._warnings, self._num_objects = warnings, 0

    def check_object(self, fields: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Count one object of the body, check the total count, and log a warning for each unknown field of the object.

        Raises:
            RequestError: The body has too many objects.
        """
        self._num_objects += 1
        if self._num_objects > MAX_OBJECTS:
            raise RequestError(
                413, "request_too_large", f"the body has more than {MAX_OBJECTS} messages, parts and tools."
            )
        if self._warnings is None or fields.keys() <= known.keys():
            return
        for name in fields.keys() - known.keys() - IGNORED_FIELDS:
            if _has_effect(name, fields[name]):
                warn_of_ignored_field(name, self._warnings)


def warn_of_ignored_field(name: str, warnings: WarningLog) -> None:
    """Log a warning that a field is ignored."""
    warnings.warn_once(
        f"field {name[:64]}", f"agents send the field '{name[:64]}', which is not supported and has no effect."
    )


def _has_effect(name: str, value: Any) -> bool:
    """Return whether a field's value requests a feature: it is not null, false or empty.

    `parallel_tool_calls` is true by default, so for this field, false requests a feature.
    """
    return value is False if name == "parallel_tool_calls" else value not in (None, False, "", [], {})


class ApiObject(BaseModel):
    """An object of a vendor's API; a null field is treated as missing, and an unknown field is ignored with a
    warning."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if info.context is not None:
            known = value if cls.model_config.get("extra") == "allow" else cls.__pydantic_fields__
            info.context.check_object(value, known)
        if None in value.values():
            return {name: field for name, field in value.items() if field is not None}
        return value


class CommonRequest(ApiObject):
    """The fields that all requests have in common. The run's sampling settings apply; `temperature` is ignored."""

    model: Name
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class StreamOptions(ApiObject):
    """The options of a streamed answer."""

    include_usage: bool = False


class ChoicesRequest(CommonRequest):
    """The fields of requests that can return several choices: chat and text completions."""

    n: PositiveCount | None = None
    max_tokens: PositiveCount | None = None
    stop: Name | StopStrings | None = None
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> Sequence[str]:
        """The stop strings as a sequence."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()


class FunctionDefinition(ApiObject):
    """The definition of a function."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class AnswerFormat(ApiObject):
    """Constraints on the format of an answer."""

    format: dict[str, Any] | None = None


B = TypeVar("B", bound=BaseModel)


def parse_body(model: type[B], raw_body: bytes, warnings: WarningLog | None = None) -> B:
    """Parse and validate the body of a request.

    Args:
        model: The body's model.
        raw_body: The body as it was received.
        warnings: Logs a warning for each unsupported field.

    Raises:
        RequestError: The body is invalid; the message names the field.
    """
    try:
        return model.model_validate_json(raw_body, context=_ParseState(warnings))
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid" and (repaired := _replace_surrogates(raw_body)) != raw_body:
            return parse_body(model, repaired, warnings)
        # pydantic reports errors for each type of a union; the deepest error belongs to the type that matches best.
        found = max(error.errors(include_url=False, include_context=False), key=lambda entry: len(entry["loc"]))
        place = _format_location(found["loc"])
        message = f"{place}: {found['msg']}" if place else found["msg"]
        raise RequestError(400, "invalid_value", f"{message[:400]}.", field=place) from error
    except RecursionError as error:
        raise RequestError(400, "invalid_value", "the body is nested too deeply.") from error


_UNPAIRED_SURROGATE_PATTERN = re.compile(
    rb"""(\\\\ | \\u[dD][89abAB][0-9a-fA-F]{2} \\u[dD][c-fC-F][0-9a-fA-F]{2}) | \\u[dD][89a-fA-F][0-9a-fA-F]{2}""",
    re.VERBOSE,
)
"""Matches an unpaired surrogate in JSON; its group matches escapes that must be kept."""


def _replace_surrogates(raw_body: bytes) -> bytes:
    """Replace unpaired surrogates, which agents produce by truncating a tool's output."""
    return _UNPAIRED_SURROGATE_PATTERN.sub(lambda found: found[1] or rb"\ufffd", raw_body)


def _format_location(loc: Sequence[int | str]) -> str:
    """Format the location of a pydantic error as `messages[2].content`, without the names of union members."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "dict", "bool", "int") and part[:1].islower():
            place += f".{part}" if place else part
    return place[:200]


# ---- conversations


def build_chat_message(
    role: str, content: Content, *, tool_calls: Sequence[Mapping[str, Any]] = (), tool_call_id: str = ""
) -> Message:
    """Return a message for chat templates."""
    return Message(
        role=cast(Speaker, "system" if role == "developer" else role),
        content=content,
        tool_calls=tuple(tool_calls),
        tool_call_id=tool_call_id or None,
    )


def build_function_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call for chat templates; arguments that parse as a JSON object are passed as a mapping."""
    if isinstance(arguments, str):
        try:
            value = from_json(arguments, allow_inf_nan=False)
        except ValueError:
            value = arguments
        arguments = value if isinstance(value, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def build_function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a function's definition for chat templates."""
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


# ---- constraints on an answer: the field, and the instruction for the model


def get_tool_choice_type(choice: str | Mapping[str, Any] | None) -> str:
    """Return the type of a vendor's tool choice: `auto`, `none`, `required`, or the type of the required tool."""
    if not isinstance(choice, Mapping):
        return choice or "auto"
    kind = choice.get("type")
    if kind == "allowed_tools":
        nested = choice.get("allowed_tools")
        kind = (nested if isinstance(nested, Mapping) else choice).get("mode")
    return kind if isinstance(kind, str) else "auto"


def build_call_constraint(choice: str | Mapping[str, Any] | None, warnings: WarningLog) -> list[tuple[str, str]]:
    """Return the constraint of a tool choice that requires a call, as (`tool_choice`, instruction for the model).

    Args:
        choice: The request's tool choice.
        warnings: Logs a warning if the choice requires a tool that only the vendor provides.

    Returns:
        A list with one constraint, or an empty list.
    """
    kind = get_tool_choice_type(choice)
    if kind in ("auto", "none"):
        return []
    if kind not in ("required", "any", "function", "tool", "custom"):
        said = f"agents require a call to the vendor's tool '{kind[:64]}' (tool_choice), which the policy does not see."
        warnings.warn_once(f"choice {kind[:64]}", said)
        return []
    if isinstance(choice, Mapping):
        nested = choice.get(kind)
        name = (nested if isinstance(nested, Mapping) else choice).get("name")
        if isinstance(name, str) and name:
            return [("tool_choice", f"Answer with a call to the function {name[:256]}.")]
    return [("tool_choice", "Answer with a call to one of the functions.")]


def build_format_constraint(field: str, answer_format: AnswerFormat | None) -> list[tuple[str, str]]:
    """Return the constraint of an answer format such as a JSON schema, as (`field`, instruction for the model).

    Args:
        field: The request's field that contains the format.
        answer_format: The format.

    Returns:
        A list with one constraint, or an empty list for plain text.
    """
    given = answer_format.format if answer_format is not None and answer_format.format is not None else {}
    kind = given.get("type") or "text"
    if kind == "text":
        return []
    if kind not in ("json_object", "json_schema"):
        return [(field, f"Answer in this format: {to_json(given, inf_nan_mode='null').decode()}")]
    nested = given.get("json_schema")
    schema = (nested if isinstance(nested, dict) else given).get("schema")
    words = f" It has this schema: {to_json(schema, inf_nan_mode='null').decode()}" if isinstance(schema, dict) else ""
    return [(field, f"Answer with one JSON object and nothing else.{words}")]


# ---- streams


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(data) + b"\n\n"
