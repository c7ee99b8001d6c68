"""Reads tool calls and tools in the formats of OpenAI, Anthropic and data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from roll.data.cells import BadRow, as_list, check_unicode, is_null
from roll.data.conversations.fields import IGNORED_PART_FIELDS, UnreadFields
from roll.errors import shorten

__all__ = ["build_function_call", "decode_json", "read_calls", "read_tools", "to_plain_data"]

_CALL_FIELDS = ("id", "type", "function", "name", "arguments")
_TOOL_FIELDS = ("type", "function", "name", "description", "parameters", "input_schema", "strict")


def decode_json(value: str, label: str, location: str) -> Any:
    """Parse a JSON string.

    Raises:
        BadRow: The string is not valid JSON.
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{location}: {label} is not valid JSON ({error}): {shorten(value)}.") from None


def to_plain_data(value: Any, label: str, location: str, *, drop_nulls: bool = False) -> Any:
    """Convert nested data to the types of JSON: dictionaries, lists, strings, numbers, booleans and nulls.

    Args:
        value: The data; NumPy arrays and numbers become lists and Python numbers.
        label: The data's name, for messages.
        location: The row's location, for messages.
        drop_nulls: Whether to leave out fields that are null.

    Raises:
        BadRow: A value has a type that JSON does not support, or a string is not valid Unicode.
    """
    value = as_list(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BadRow("wrong type", f"{location}: the keys of {label} must be strings, got {shorten(key)}.")
        return {
            check_unicode(key, label, location): to_plain_data(inner, label, location, drop_nulls=drop_nulls)
            for key, inner in value.items()
            if not (drop_nulls and is_null(inner))
        }
    if isinstance(value, list | tuple):
        return [to_plain_data(inner, label, location, drop_nulls=drop_nulls) for inner in value]
    if isinstance(value, str):
        return check_unicode(value, label, location)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise BadRow("wrong type", f"{location}: {label} contains {shorten(value)}, which JSON cannot represent.")


def build_function_call(
    name: Any, arguments: Any, call_id: Any, location: str, *, drop_nulls: bool = False
) -> dict[str, Any]:
    """Build a tool call in the format of chat templates, as in `roll.types.Message`.

    Args:
        name: The function's name.
        arguments: An object, or an object as a JSON string; null for no arguments.
        call_id: The ID by which the tool's result refers to the call, or null.
        location: The call's location, for messages.
        drop_nulls: Whether to leave out arguments that are null, because Arrow tables add such arguments.

    Raises:
        BadRow: A part of the call has a wrong type.
    """
    if not isinstance(name, str) or not name.strip():
        raise BadRow("wrong type", f"{location}: a tool call must name its function, got {shorten(name)}.")
    if isinstance(arguments, str):
        drop_nulls = False  # a null in JSON text was written by the model, not added by Arrow
        arguments = decode_json(arguments, "a call's `arguments`", location) if arguments.strip() else {}
    arguments = {} if is_null(arguments) else arguments
    if not isinstance(arguments, Mapping):
        raise BadRow("wrong type", f"{location}: a call's `arguments` must be an object, got {shorten(arguments)}.")
    function = {
        "name": check_unicode(name, "the name of a tool call", location),
        "arguments": to_plain_data(arguments, "a call's `arguments`", location, drop_nulls=drop_nulls),
    }
    call: dict[str, Any] = {"type": "function", "function": function}
    if not is_null(call_id):
        call = {"id": check_unicode(str(call_id), "the id of a tool call", location), **call}
    return call


def read_calls(value: Any, location: str, *, drop_nulls: bool = False) -> list[dict[str, Any]]:
    """Read a message's `tool_calls`, and convert them to the format of chat templates.

    Args:
        value: A list of `{"id": …, "type": "function", "function": {"name": …, "arguments": …}}` or of
            `{"name": …, "arguments": …}`, or such a list as a JSON string.
        location: The message's location, for messages.
        drop_nulls: Whether to leave out arguments that are null, as in `build_function_call`.

    Raises:
        BadRow: The value has an unsupported format.
    """
    value = decode_json(value, "`tool_calls`", location) if isinstance(value, str) else as_list(value)
    if not isinstance(value, list | tuple):
        raise BadRow("wrong type", f"{location}: `tool_calls` must be a list of calls, got {shorten(value)}.")
    return [_read_call(call, location, drop_nulls) for call in value]


def _read_call(value: Any, location: str, drop_nulls: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{location}: a tool call must be an object, got {shorten(value)}.")
    fields = UnreadFields(value)
    call_id, kind, function = (fields.pop(name) for name in ("id", "type", "function"))
    if kind not in (None, "function"):
        raise BadRow(
            "wrong type",
            f"{location}: a tool call has the unsupported type {shorten(kind)}: only 'function' is supported.",
        )
    inner = fields
    if function is not None:
        if not isinstance(function, Mapping):
            raise BadRow("wrong type", f"{location}: a call's `function` must be an object, got {shorten(function)}.")
        inner = UnreadFields(function)
    name, arguments = inner.pop("name"), inner.pop("arguments")
    for left in (fields, inner):
        left.check_all_read(IGNORED_PART_FIELDS, _CALL_FIELDS, "a tool call", location)
    return build_function_call(name, arguments, call_id, location, drop_nulls=drop_nulls)


def read_tools(value: Any, location: str, *, drop_nulls: bool = False) -> tuple[dict[str, Any], ...]:
    """Read a row's tools, and convert each to the format of chat templates: `{"type": "function", "function": {…}}`.

    Args:
        value: A list of such objects, of bare functions (`name`, `description`, `parameters`), or of Anthropic's tools
            (`input_schema`); or such a list as a JSON string.
        location: The row's location, for messages.
        drop_nulls: Whether to leave out fields that are null.

    Raises:
        BadRow: The value has an unsupported format.
    """
    if isinstance(value, str):
        drop_nulls = False
        value = decode_json(value, "the column of tools", location) if value.strip() else []
    value = as_list(value)
    value = [] if is_null(value) else value
    if not isinstance(value, list | tuple):
        raise BadRow("wrong type", f"{location}: tools must be a list of function schemas, got {shorten(value)}.")
    return tuple(_read_tool(tool, location, drop_nulls) for tool in value)


def _read_tool(value: Any, location: str, drop_nulls: bool) -> dict[str, Any]:
    if isinstance(value, str):
        drop_nulls = False
        value = decode_json(value, "a tool", location)
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{location}: a tool must be a function schema, got {shorten(value)}.")
    tool = to_plain_data(value, "a tool", location, drop_nulls=drop_nulls)
    kind = tool.pop("type", None)
    function = tool.pop("function", None)
    if kind not in (None, "function", "custom") or (kind == "custom" and "input_schema" not in tool):
        raise BadRow(
            "wrong type",
            f"{location}: a tool has the unsupported type {shorten(kind)}: only 'function' is supported.",
        )
    if function is None:
        function, tool = tool, {}
        if "input_schema" in function and "parameters" not in function:
            function["parameters"] = function.pop("input_schema")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(
            "wrong type", f"{location}: a tool must be a function schema with a `name`, got {shorten(function)}."
        )
    UnreadFields(tool).check_all_read((), _TOOL_FIELDS, "a tool", location)
    return {"type": "function", "function": function}
