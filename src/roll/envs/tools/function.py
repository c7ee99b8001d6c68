"""User-defined functions as tools: the model sees the function's name, docstring and signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from roll.errors import ConfigError

__all__ = ["FunctionTool"]


class FunctionTool:
    """A `Tool` that calls a Python function. The function's result is converted to text. Any exception other than
    `ToolError` is an infrastructure failure.

    Args:
        function: A function with an annotation for each argument that is not a string, and a default for each optional
            argument.
        options: Arguments that the model does not set.

    Raises:
        ConfigError: The function has no docstring, or has an argument that cannot be passed by name.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name = function.__name__
        self.description = inspect.cleandoc(function.__doc__ or "")
        if not self.description:
            raise ConfigError(f"tool '{self.name}' has no docstring: describe the function there for the model.")
        self._function, self._options = function, dict(options)
        self.parameters: Mapping[str, Any] = self._build_schema()
        waits = inspect.iscoroutinefunction(function)
        self.call: Callable[[Mapping[str, Any]], Any] = self._call_async if waits else self._call

    def _build_schema(self) -> dict[str, Any]:
        try:
            hints = typing.get_type_hints(self._function)
        except Exception as error:  # evaluating annotations runs the user's code
            raise ConfigError(f"tool '{self.name}': its annotations cannot be read: {error}.") from error
        fields: dict[str, Any] = {}
        parameters = inspect.signature(self._function).parameters
        unknown = sorted(set(self._options) - set(parameters))
        if unknown:
            raise ConfigError(
                f"tool '{self.name}' has no arguments {unknown}. Supported arguments: "
                f"{', '.join(parameters) or 'none'}."
            )
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(f"tool '{self.name}': its argument '{parameter}' cannot be passed by name.")
            if name not in self._options:
                default = ... if parameter.default is parameter.empty else parameter.default
                # Pydantic rejects names of fields that begin with `_` or shadow its own methods (`json`, `copy`):
                # the alias keeps the argument's name.
                fields[f"field_{name}"] = (hints.get(name, str), pydantic.Field(default, alias=name))
        try:
            schema = pydantic.create_model("arguments", **fields).model_json_schema()
        except pydantic.errors.PydanticUserError as error:
            raise ConfigError(f"tool '{self.name}': its arguments have no JSON schema: {error.message}") from error
        for entry in schema["properties"].values() if fields else ():
            entry.pop("title", None)
        return {"type": "object", "properties": {}, **{key: schema[key] for key in schema if key != "title"}}

    def _call(self, arguments: Mapping[str, Any], /) -> str:
        return str(self._function(**arguments, **self._options))

    async def _call_async(self, arguments: Mapping[str, Any], /) -> str:
        return str(await self._function(**arguments, **self._options))
