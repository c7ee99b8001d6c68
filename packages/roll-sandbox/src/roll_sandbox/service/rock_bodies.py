"""Requests and responses of ROCK's REST routes, as its SDK sends and parses them.

Source: alibaba/ROCK, `rock/admin/entrypoints`, `rock/sdk/sandbox/client.py`, version 1.11. As in ROCK, unknown fields
are ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from roll_sandbox.service.bodies import CheckedString, ResourceName
from roll_sandbox.types import Limits, SandboxSpec

__all__ = [
    "ExecuteRequest",
    "ReadRequest",
    "RockAnswer",
    "SandboxIdBody",
    "SessionCommand",
    "SessionRequest",
    "StartRequest",
    "WriteRequest",
]

BAD_REQUEST, BROKEN, COMMAND_FAILED = 4000, 5000, 6000
"""ROCK's error codes."""
_BYTES_PER_UNIT = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_Timeout = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Size = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?([bB]|[kKmMgGtT]([iI]?[bB])?)?$")]
_SessionName = Annotated[CheckedString, Field(min_length=1, max_length=200)]
_Path = Annotated[CheckedString, Field(min_length=1, max_length=4096)]


def _parse_size(size: str) -> int:
    number, unit = re.match(r"([0-9.]+)(.?)", size.lower()).groups()  # type: ignore[union-attr]
    return max(1, int(float(number) * _BYTES_PER_UNIT[unit]))


class RockAnswer(BaseModel):
    """The body of every response; `status` says whether the request has succeeded."""

    status: Literal["Success", "Failed"] = "Success"
    message: str | None = None
    error: str | None = None
    result: Any = None


class StartRequest(BaseModel):
    """The body of `start` and `start_async`."""

    image: Annotated[CheckedString, Field(min_length=1, max_length=1000)] = "python:3.11"
    auto_clear_time_minutes: Annotated[int, Field(ge=1, le=10**6)] = 360
    memory: _Size = "8g"
    cpus: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] = 2
    disk: _Size | None = None
    num_gpus: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] | None = None
    sandbox_id: ResourceName | None = None

    def make_spec(self, *, use_image: bool) -> SandboxSpec:
        """Return the spec of the requested sandbox, with the requested image if `use_image`; `cpus` has no effect.

        Files are in memory, so the disk limit is at most the memory limit.
        """
        memory = _parse_size(self.memory)
        disk = memory if self.disk is None else min(memory, _parse_size(self.disk))
        limits = Limits(
            wall_s=86400.0,
            memory_bytes=memory,
            disk_bytes=disk,
            file_size_bytes=disk,
            max_files=2**17,
            max_processes=1024,
            max_open_files=1024,
            output_bytes=2**24,
        )
        return SandboxSpec(limits=limits, image=self.image if use_image else None)


class SandboxIdBody(BaseModel):
    """The body of a request that only names a sandbox, and the base of other bodies."""

    sandbox_id: ResourceName


class ExecuteRequest(SandboxIdBody):
    """The body of `execute`. A command that is a list is run as a program; a string is run by bash."""

    command: CheckedString | Annotated[list[CheckedString], Field(min_length=1)]
    timeout: _Timeout | None = 1200.0
    env: dict[CheckedString, CheckedString] | None = None
    cwd: CheckedString | None = None
    check: bool = False


class SessionRequest(SandboxIdBody):
    """The body of `create_session` and `close_session`."""

    session: _SessionName = "default"
    env: dict[CheckedString, CheckedString] | None = None
    startup_source: Annotated[list[CheckedString], Field(max_length=64)] = []


class SessionCommand(SandboxIdBody):
    """The body of `run_in_session`."""

    session: _SessionName = "default"
    command: CheckedString
    timeout: _Timeout | None = None
    check: Literal["silent", "raise", "ignore"] = "raise"


class ReadRequest(SandboxIdBody):
    """The body of `read_file`."""

    path: _Path
    encoding: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")] | None = None
    errors: Literal["strict", "ignore", "replace", "backslashreplace", "surrogateescape"] | None = None


class WriteRequest(SandboxIdBody):
    """The body of `write_file`."""

    path: _Path
    content: str
