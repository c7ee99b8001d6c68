"""Requests and responses of ROCK's REST routes, as its SDK sends and parses them.

Source: alibaba/ROCK, `rock/admin/entrypoints`, `rock/sdk/sandbox/client.py`, version 1.11. Other fields are ignored, as
in ROCK.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from roll_sandbox.service.bodies import Named, Text
from roll_sandbox.types import Limits, SandboxSpec

__all__ = [
    "ExecuteRequest",
    "OfSandbox",
    "ReadRequest",
    "RockAnswer",
    "SessionCommand",
    "SessionRequest",
    "StartRequest",
    "WriteRequest",
]

BAD_REQUEST, BROKEN, COMMAND_FAILED = 4000, 5000, 6000
"""ROCK's error codes."""
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_Timeout = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Size = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?([bB]|[kKmMgGtT]([iI]?[bB])?)?$")]
_Session = Annotated[Text, Field(min_length=1, max_length=200)]
_Path = Annotated[Text, Field(min_length=1, max_length=4096)]


def _bytes(size: str) -> int:
    number, unit = re.match(r"([0-9.]+)(.?)", size.lower()).groups()  # type: ignore[union-attr]
    return max(1, int(float(number) * _UNITS[unit]))


class RockAnswer(BaseModel):
    """The format of every response: `status` says whether the request was carried out."""

    status: Literal["Success", "Failed"] = "Success"
    message: str | None = None
    error: str | None = None
    result: Any = None


class StartRequest(BaseModel):
    """`start` and `start_async`."""

    image: Annotated[Text, Field(min_length=1, max_length=1000)] = "python:3.11"
    auto_clear_time_minutes: Annotated[int, Field(ge=1, le=10**6)] = 360
    memory: _Size = "8g"
    cpus: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] = 2
    disk: _Size | None = None
    num_gpus: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] | None = None
    sandbox_id: Named | None = None

    def spec(self, *, images: bool) -> SandboxSpec:
        """Return the spec. Files live in memory, so the disk is never larger than it. CPUs are shared, not reserved."""
        memory = _bytes(self.memory)
        disk = memory if self.disk is None else min(memory, _bytes(self.disk))
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
        return SandboxSpec(limits=limits, image=self.image if images else None)


class OfSandbox(BaseModel):
    """A request that names a sandbox, and nothing else."""

    sandbox_id: Named


class ExecuteRequest(OfSandbox):
    """`execute`: a list is run as is, a string by bash."""

    command: Text | Annotated[list[Text], Field(min_length=1)]
    timeout: _Timeout | None = 1200.0
    env: dict[Text, Text] | None = None
    cwd: Text | None = None
    check: bool = False


class SessionRequest(OfSandbox):
    """`create_session` and `close_session`."""

    session: _Session = "default"
    env: dict[Text, Text] | None = None
    startup_source: Annotated[list[Text], Field(max_length=64)] = []


class SessionCommand(OfSandbox):
    """`run_in_session`."""

    session: _Session = "default"
    command: Text
    timeout: _Timeout | None = None
    check: Literal["silent", "raise", "ignore"] = "raise"


class ReadRequest(OfSandbox):
    """`read_file`."""

    path: _Path
    encoding: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")] | None = None
    errors: Literal["strict", "ignore", "replace", "backslashreplace", "surrogateescape"] | None = None


class WriteRequest(OfSandbox):
    """`write_file`."""

    path: _Path
    content: str
