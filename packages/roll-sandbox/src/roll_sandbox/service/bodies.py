"""Bodies of requests and responses, as in the OpenAPI schema. Bytes are base64."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, Base64Bytes, BaseModel, ConfigDict, Field
from starlette.responses import Response

from roll_sandbox.errors import SandboxRequestError
from roll_sandbox.types import Command, ExecutionResult, Program, PythonCode
from roll_sandbox.wire import check_values

__all__ = [
    "CheckedRoute",
    "CreateBody",
    "EntryBody",
    "ExtendBody",
    "Named",
    "ProgramBody",
    "ResultBody",
    "RunBody",
    "SandboxBody",
    "SessionBody",
    "SessionRunBody",
    "Text",
    "describe_validation_error",
    "make_result_body",
]

_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_NO_ZERO = r"^[^\x00]*$"


def describe_validation_error(error: RequestValidationError) -> str:
    """Return a one-line description of a request's errors."""
    said = []
    for each in error.errors():
        field = "" if each["type"] == "json_invalid" else ".".join(map(str, each["loc"][1:]))
        said.append(f"{field or 'the body (must be JSON, with Content-Type: application/json)'}: {each['msg']}")
    return "; ".join(said)[:1000]


def _check_utf8(text: str) -> str:
    """Check that a text can be encoded as UTF-8.

    Raises:
        ValueError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string must not contain half of a surrogate pair") from None
    return text


_Source = Annotated[str, AfterValidator(_check_utf8)]
Text = Annotated[str, Field(pattern=_NO_ZERO), AfterValidator(_check_utf8)]
"""A text without zero bytes and halves of surrogate pairs."""
Named = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")]


class _Request(Request):
    async def json(self) -> Any:
        """Parse the body, whose number and depth of values were checked first."""
        body = await self.body()
        check_values(body)
        return json.loads(body.decode())


class CheckedRoute(APIRoute):
    """A route whose JSON is checked before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the handler; see `APIRoute`."""
        answer = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await answer(_Request(request.scope, request.receive))

        return checked


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class CreateBody(_Body):
    """A sandbox to start."""

    spec: dict[str, Any] = {}
    """Fields of `SandboxSpec`."""
    lifetime_s: _Seconds | None = None


class SandboxBody(_Body):
    """A sandbox."""

    sandbox: str
    state: str
    created: float
    expires: float
    worker: str
    programs: int
    """Running programs."""


class ExtendBody(_Body):
    """A new lifetime, counted from now on."""

    lifetime_s: _Seconds


class RunBody(_Body):
    """A program: Python `source`, or `argv`."""

    source: _Source | None = None
    argv: list[Text] = []
    stdin: Base64Bytes = b""
    files: dict[Text, Base64Bytes] = {}
    env: dict[Text, Text] = {}
    cwd: Text | None = None
    wall_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    output_bytes: Annotated[int, Field(gt=0, lt=2**40)] | None = None
    alone: bool = False
    """Whether the program gets namespaces and files of its own."""

    def program(self) -> Program:
        """Return the program to run.

        Raises:
            SandboxRequestError: the body has neither `source` nor `argv`.
        """
        settings = {key: value for key, value in self if key not in ("source", "argv", "alone")}
        settings["argv"] = tuple(self.argv)
        if self.source is None and not self.argv:
            raise SandboxRequestError("a program must have 'source' (Python) or 'argv'.")
        return Command(**settings) if self.source is None else PythonCode(source=self.source, **settings)


class SessionBody(_Body):
    """A shell to open."""

    env: dict[Text, Text] = {}
    cwd: Text | None = None


class SessionRunBody(_Body):
    """A command for a shell."""

    command: Text
    wall_s: _Seconds | None = None


class ResultBody(_Body):
    """A program's result; see `ExecutionResult`."""

    outcome: str
    exit_code: int | None
    stdout: str
    stderr: str
    encoding: str = "utf-8"
    """Encoding of stdout and stderr; bytes that are not UTF-8 are shown as U+FFFD."""
    limits_hit: list[str]
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    output_kept: bool = True
    """Whether the output is still known; if not, `stdout` and `stderr` are empty."""


class ProgramBody(BaseModel):
    """The record of a program."""

    program: str
    state: str
    """`running`, `ended`, `failed` (its sandbox broke or ended) or `lost` (its end is unknown)."""
    started: float
    result: ResultBody | None = None
    """Result of a program that has ended, without its output."""
    error: str | None = None
    message: str | None = None


class EntryBody(BaseModel):
    """An entry of a directory."""

    name: str
    directory: bool
    size: int


def make_result_body(result: ExecutionResult, *, output_kept: bool = True) -> ResultBody:
    """Convert a result to a response body."""
    return ResultBody(
        outcome=result.outcome.value,
        exit_code=result.exit_code,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        limits_hit=sorted(limit.value for limit in result.limits_hit),
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
        output_kept=output_kept,
    )
