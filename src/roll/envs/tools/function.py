"""A user's function as a tool: the model sees its name, its docstring and its signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from roll.errors import ConfigError

__all__ = ["FunctionTool"]


class FunctionTool:
    """A `Tool`. The function's result is shown as text; its exceptions, except `ToolError`, are infrastructure
    failures.

    Args:
        function: A function with an annotation for each argument that is not text, and a default for each optional one.
        options: Arguments that the model does not set.

    Raises:
        ConfigError: The function has no docstring, or arguments that a call cannot name.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name = function.__name__
        self.description = inspect.cleandoc(function.__doc__ or "")
        if not self.description:
            raise ConfigError(f"tool '{self.name}' has no docstring: say in it, for the model, what the function does.")
        self._function, self._options = function, dict(options)
        self.parameters: Mapping[str, Any] = self._schema()
        waits = inspect.iscoroutinefunction(function)
        self.call: Callable[[Mapping[str, Any]], Any] = self._call_later if waits else self._call

    def _schema(self) -> dict[str, Any]:
        try:
            hints = typing.get_type_hints(self._function)
        except Exception as error:  # evaluating annotations runs the user's code
            raise ConfigError(f"tool '{self.name}': its annotations cannot be read: {error}.") from error
        fields: dict[str, Any] = {}
        found = inspect.signature(self._function).parameters
        unknown = sorted(set(self._options) - set(found))
        if unknown:
            raise ConfigError(f"tool '{self.name}' has no argument {unknown}: it has {', '.join(found) or 'none'}.")
        for name, parameter in found.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"tool '{self.name}': its argument '{parameter}' has no name that a call could give.")
            if name not in self._options:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[f"field_{name}"] = (hints.get(name, str), pydantic.Field(default, alias=name))
        try:
            schema = pydantic.create_model("arguments", **fields).model_json_schema()
        except pydantic.errors.PydanticUserError as error:
            raise ConfigError(f"tool '{self.name}': {error.message}") from error
        for entry in schema["properties"].values() if fields else ():
            entry.pop("title", None)
        return {"type": "object", "properties": {}, **{key: schema[key] for key in schema if key != "title"}}

    def _call(self, arguments: Mapping[str, Any], /) -> str:
        return str(self._function(**arguments, **self._options))

    async def _call_later(self, arguments: Mapping[str, Any], /) -> str:
        return str(await self._function(**arguments, **self._options))
