"""Tool calls and tools, in the formats of OpenAI, Anthropic and data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from roll.data.cells import BadRow, as_list, is_null, unicode_text
from roll.data.conversations.fields import IGNORED_PART_FIELDS, Fields
from roll.errors import short

__all__ = ["decoded_json", "function_call", "plain_data", "read_calls", "read_tools"]

_CALL_FIELDS = ("id", "type", "function", "name", "arguments")
_TOOL_FIELDS = ("type", "function", "name", "description", "parameters", "input_schema", "strict")


def decoded_json(value: str, what: str, where: str) -> Any:
    """Parse a JSON text.

    Raises:
        BadRow: The text is not JSON.
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{where}: {what} is a text that is not JSON ({error}): {short(value)}.") from None


def plain_data(value: Any, what: str, where: str, *, drop_nulls: bool = False) -> Any:
    """Return nested data as dictionaries, lists, texts, numbers and nulls only, as in JSON.

    Args:
        value: The data; NumPy arrays and numbers become lists and Python numbers.
        what: The data's name, for messages.
        where: The row's place, for messages.
        drop_nulls: Whether to leave out fields that are null.

    Raises:
        BadRow: A value is of another type, or a text is not valid Unicode.
    """
    value = as_list(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BadRow("wrong type", f"{where}: the keys of {what} must be texts, got {short(key)}.")
        return {
            unicode_text(key, what, where): plain_data(inner, what, where, drop_nulls=drop_nulls)
            for key, inner in value.items()
            if not (drop_nulls and is_null(inner))
        }
    if isinstance(value, list | tuple):
        return [plain_data(inner, what, where, drop_nulls=drop_nulls) for inner in value]
    if isinstance(value, str):
        return unicode_text(value, what, where)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise BadRow("wrong type", f"{where}: {what} holds {short(value)}, which JSON does not have.")


def function_call(name: Any, arguments: Any, call_id: Any, where: str, *, drop_nulls: bool = False) -> dict[str, Any]:
    """Return a call in the form of chat templates; see `roll.types.Message`.

    Args:
        name: The function's name.
        arguments: An object, or its JSON text; null for no arguments.
        call_id: The ID by which the tool's result refers to the call, or null.
        where: The call's place, for messages.
        drop_nulls: Whether to leave out arguments that are null, if the row comes from a table that adds them.

    Raises:
        BadRow: A part of the call is of another type.
    """
    if not isinstance(name, str) or not name.strip():
        raise BadRow("wrong type", f"{where}: a tool's call must name its function, got {short(name)}.")
    if isinstance(arguments, str):
        drop_nulls = False
        arguments = decoded_json(arguments, "a call's `arguments`", where) if arguments.strip() else {}
    arguments = {} if is_null(arguments) else arguments
    if not isinstance(arguments, Mapping):
        raise BadRow("wrong type", f"{where}: a call's `arguments` must be an object, got {short(arguments)}.")
    function = {
        "name": unicode_text(name, "the name of a tool call", where),
        "arguments": plain_data(arguments, "a call's `arguments`", where, drop_nulls=drop_nulls),
    }
    call: dict[str, Any] = {"type": "function", "function": function}
    if not is_null(call_id):
        call = {"id": unicode_text(str(call_id), "the id of a tool call", where), **call}
    return call


def read_calls(value: Any, where: str, *, drop_nulls: bool = False) -> list[dict[str, Any]]:
    """Return a message's `tool_calls` in the form of chat templates.

    Args:
        value: A list of `{"id": …, "type": "function", "function": {"name": …, "arguments": …}}` or of
            `{"name": …, "arguments": …}`, or its JSON text.
        where: The message's place, for messages.
        drop_nulls: See `function_call`.

    Raises:
        BadRow: The value has another form.
    """
    value = decoded_json(value, "`tool_calls`", where) if isinstance(value, str) else as_list(value)
    if not isinstance(value, list | tuple):
        raise BadRow("wrong type", f"{where}: `tool_calls` must be a list of calls, got {short(value)}.")
    return [_call(call, where, drop_nulls) for call in value]


def _call(value: Any, where: str, drop_nulls: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{where}: a tool's call must be an object, got {short(value)}.")
    fields = Fields(value)
    call_id, kind, function = (fields.take(name) for name in ("id", "type", "function"))
    if kind not in (None, "function"):
        raise BadRow("wrong type", f"{where}: a tool's call of type {short(kind)} is not read, only 'function'.")
    inner = fields
    if function is not None:
        if not isinstance(function, Mapping):
            raise BadRow("wrong type", f"{where}: a call's `function` must be an object, got {short(function)}.")
        inner = Fields(function)
    name, arguments = inner.take("name"), inner.take("arguments")
    for left in (fields, inner):
        left.check_all_read(IGNORED_PART_FIELDS, _CALL_FIELDS, "a tool's call", where)
    return function_call(name, arguments, call_id, where, drop_nulls=drop_nulls)


def read_tools(value: Any, where: str, *, drop_nulls: bool = False) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row in the form of chat templates: `{"type": "function", "function": {…}}` each.

    Args:
        value: A list of such objects, of bare functions (`name`, `description`, `parameters`), or of Anthropic's tools
            (`input_schema`); or its JSON text.
        where: The row's place, for messages.
        drop_nulls: Whether to leave out fields that are null.

    Raises:
        BadRow: The value has another form.
    """
    if isinstance(value, str):
        drop_nulls = False
        value = decoded_json(value, "the column of tools", where) if value.strip() else []
    value = as_list(value)
    value = [] if is_null(value) else value
    if not isinstance(value, list | tuple):
        raise BadRow("wrong type", f"{where}: tools must be a list of functions' schemas, got {short(value)}.")
    return tuple(_tool(tool, where, drop_nulls) for tool in value)


def _tool(value: Any, where: str, drop_nulls: bool) -> dict[str, Any]:
    if isinstance(value, str):
        drop_nulls = False
        value = decoded_json(value, "a tool", where)
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{where}: a tool must be a function's schema, got {short(value)}.")
    tool = plain_data(value, "a tool", where, drop_nulls=drop_nulls)
    kind = tool.pop("type", None)
    function = tool.pop("function", None)
    if kind not in (None, "function", "custom") or (kind == "custom" and "input_schema" not in tool):
        raise BadRow("wrong type", f"{where}: a tool of type {short(kind)} is not read, only 'function'.")
    if function is None:
        function, tool = tool, {}
        if "input_schema" in function and "parameters" not in function:
            function["parameters"] = function.pop("input_schema")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("wrong type", f"{where}: a tool must be a function's schema with a `name`, got {short(function)}.")
    Fields(tool).check_all_read((), _TOOL_FIELDS, "a tool", where)
    return {"type": "function", "function": function}
