"""Bodies of requests and responses, as in the OpenAPI schema. Bytes are encoded in base64."""

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
from roll_sandbox.wire import check_json_bounds

__all__ = [
    "CheckedRoute",
    "CheckedString",
    "CreateBody",
    "EntryBody",
    "ExtendBody",
    "ProgramBody",
    "ResourceName",
    "ResultBody",
    "RunBody",
    "SandboxBody",
    "SessionBody",
    "SessionRunBody",
    "describe_validation_error",
    "make_result_body",
]

_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_NO_ZERO_BYTES = r"^[^\x00]*$"


def describe_validation_error(error: RequestValidationError) -> str:
    """Return a one-line description of a request's errors."""
    parts = []
    for each in error.errors():
        field = "" if each["type"] == "json_invalid" else ".".join(map(str, each["loc"][1:]))
        parts.append(f"{field or 'the body (must be JSON, with Content-Type: application/json)'}: {each['msg']}")
    return "; ".join(parts)[:1000]


def _check_utf8(text: str) -> str:
    """Check that a string can be encoded as UTF-8, and return it.

    Raises:
        ValueError: the string contains half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string must not contain an unpaired surrogate") from None
    return text


_Source = Annotated[str, AfterValidator(_check_utf8)]
CheckedString = Annotated[str, Field(pattern=_NO_ZERO_BYTES), AfterValidator(_check_utf8)]
"""A string without null bytes and unpaired surrogates."""
ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,64}$")]


class _CheckedRequest(Request):
    async def json(self) -> Any:
        """Parse the body after checking the number and the nesting depth of its values."""
        body = await self.body()
        check_json_bounds(body)
        return json.loads(body.decode())


class CheckedRoute(APIRoute):
    """A route that checks the size and depth of JSON bodies before it parses them."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the route's handler, extended with a check of the size and depth of JSON before parsing."""
        answer = super().get_route_handler()

        async def handle_checked(request: Request) -> Response:
            return await answer(_CheckedRequest(request.scope, request.receive))

        return handle_checked


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class CreateBody(_Body):
    """A request to start a sandbox."""

    spec: dict[str, Any] = {}
    """Fields of `SandboxSpec`."""
    lifetime_s: _Seconds | None = None


class SandboxBody(_Body):
    """The state of a sandbox."""

    sandbox: str
    state: str
    created: float
    expires: float
    worker: str
    programs: int
    """Number of running programs."""


class ExtendBody(_Body):
    """A request to change a sandbox's lifetime, in seconds from now on."""

    lifetime_s: _Seconds


class RunBody(_Body):
    """A program to run, given by Python `source` or by `argv`."""

    source: _Source | None = None
    argv: list[CheckedString] = []
    stdin: Base64Bytes = b""
    files: dict[CheckedString, Base64Bytes] = {}
    env: dict[CheckedString, CheckedString] = {}
    cwd: CheckedString | None = None
    wall_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    output_bytes: Annotated[int, Field(gt=0, lt=2**40)] | None = None
    alone: bool = False
    """True if the program gets its own namespaces and files, or the sandbox to itself if it has no namespaces."""

    def make_program(self) -> Program:
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
    """A request to open a shell session."""

    env: dict[CheckedString, CheckedString] = {}
    cwd: CheckedString | None = None


class SessionRunBody(_Body):
    """A request to run a command in a shell session."""

    command: CheckedString
    wall_s: _Seconds | None = None


class ResultBody(_Body):
    """A program's result; see `ExecutionResult`."""

    outcome: str
    exit_code: int | None
    stdout: str
    stderr: str
    encoding: str = "utf-8"
    """Encoding of stdout and stderr; bytes that are not valid are replaced by U+FFFD."""
    limits_hit: list[str]
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    output_kept: bool = True
    """True if `stdout` and `stderr` have the output; if it is no longer available, they are empty."""


class ProgramBody(BaseModel):
    """A program's state and, once it has ended, its result or error."""

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
