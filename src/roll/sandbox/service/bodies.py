"""Bodies of requests and answers, as OpenAPI has them. Bytes are base64."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from roll.sandbox.types import ExecutionResult

__all__ = [
    "CreateBody",
    "ExtendBody",
    "ResultBody",
    "RunBody",
    "SandboxBody",
    "SessionBody",
    "SessionRunBody",
    "result_body",
]

_Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


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
    """Running in it."""


class ExtendBody(_Body):
    """How long from now on."""

    lifetime_s: _Seconds


class RunBody(_Body):
    """A program: `source` of Python, or `argv`."""

    source: str | None = None
    argv: list[str] = []
    stdin: Base64Bytes = b""
    files: dict[str, Base64Bytes] = {}
    env: dict[str, str] = {}
    cwd: str | None = None
    wall_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    output_bytes: Annotated[int, Field(gt=0, lt=2**40)] | None = None
    alone: bool = False
    """In namespaces and files of its own."""


class SessionBody(_Body):
    """A shell to open."""

    env: dict[str, str] = {}
    cwd: str | None = None


class SessionRunBody(_Body):
    """A command for it."""

    command: str
    wall_s: _Seconds | None = None


class ResultBody(_Body):
    """See `ExecutionResult`."""

    outcome: str
    exit_code: int | None
    stdout: str
    stderr: str
    encoding: str = "utf-8"
    """Of stdout and stderr; what is not UTF-8 is shown as U+FFFD."""
    limits_hit: list[str]
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int


def result_body(result: ExecutionResult) -> ResultBody:
    """A result as an answer."""
    return ResultBody(
        outcome=result.outcome.value,
        exit_code=result.exit_code,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        limits_hit=sorted(limit.value for limit in result.limits_hit),
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
    )
