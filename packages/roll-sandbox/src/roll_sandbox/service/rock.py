"""ROCK's REST routes, so that code for ROCK's SDK works with this service after changing the URL.

As in ROCK, errors after the token check are answered with HTTP status 200, `status` "Failed", and a code of ROCK.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from roll_sandbox.agent_sandbox import Session
from roll_sandbox.errors import RollSandboxError, SandboxError, SandboxRequestError, UnknownSandboxError
from roll_sandbox.remote.connection import RemoteSandbox
from roll_sandbox.service.access import ROCK_PREFIX
from roll_sandbox.service.bodies import CheckedRoute, ResourceName, describe_validation_error
from roll_sandbox.service.local_clients import LocalClients, OwnerSandboxes
from roll_sandbox.service.rock_bodies import (
    BAD_REQUEST,
    BROKEN,
    COMMAND_FAILED,
    ExecuteRequest,
    ReadRequest,
    RockAnswer,
    SandboxIdBody,
    SessionCommand,
    SessionRequest,
    StartRequest,
    WriteRequest,
)
from roll_sandbox.types import Command, Outcome

__all__ = ["add_rock_routes"]

_MAX_WALL_S = 86400.0
_ESCAPE_SEQUENCE_PATTERN = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
"""Matches the escape sequences that ROCK removes from a shell's output (`rock/rocklet/linux.py`)."""
_UPLOAD_SCHEMA = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "target_path", "sandbox_id"],
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "target_path": {"type": "string"},
                "sandbox_id": {"type": "string"},
            },
        }
    }
}


class CommandFailedError(SandboxRequestError):
    """A command failed, but the request required it to succeed."""


class _RockRoute(CheckedRoute):
    """A route that reports errors in ROCK's format."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        answer = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await answer(request)
            except RequestValidationError as error:
                return _make_failure(describe_validation_error(error), BAD_REQUEST)
            except HTTPException as error:
                return _make_failure(str(error.detail), BAD_REQUEST)
            except CommandFailedError as error:
                return _make_failure(str(error), COMMAND_FAILED)
            except (RollSandboxError, ValueError) as error:
                broken = isinstance(error, SandboxError) and not isinstance(error, UnknownSandboxError)
                return _make_failure(str(error)[:2000], BROKEN if broken else BAD_REQUEST)

        return handle_errors


def _make_failure(error: str, code: int) -> Response:
    result = {"code": code, "exit_code": None, "failure_reason": error}
    error = error.encode(errors="replace").decode()
    return JSONResponse({"status": "Failed", "message": "refused", "error": error, "result": result})


class _SandboxState:
    """A sandbox's request and sessions, which only ROCK's routes need; lost when this server process ends."""

    def __init__(self, request: StartRequest) -> None:
        self.request = request
        self.sessions: dict[str, Session] = {}


class _RockHandlers:
    """Implements ROCK's routes for the sandboxes of one owner."""

    def __init__(self, owned: OwnerSandboxes, states: dict[tuple[str, str], _SandboxState]) -> None:
        self.owned = owned
        self._states = states

    async def start(self, request: StartRequest, *, use_image: bool) -> dict[str, Any]:
        """Start a sandbox, and wait until it runs.

        Args:
            request: ROCK's request.
            use_image: true to use the requested image even if no worker reports to have the image.
        """
        workers = self.owned.dispatcher.workers.values()
        use_image = use_image or any(request.image in each.report.images for each in workers)
        spec, name = request.make_spec(use_image=use_image), request.sandbox_id
        if request.num_gpus:
            raise SandboxRequestError("GPUs are not supported: leave out 'num_gpus'.")
        sandbox, _ = await self.owned.create(spec, request.auto_clear_time_minutes * 60.0, name=name)
        if (self.owned.owner, sandbox.name) not in self._states:
            self._store_state(sandbox.name, _SandboxState(request))
            sandbox.on_close(partial(self._remove_state, sandbox.name))
        worker = self.owned.dispatcher.find_sandbox(self.owned.owner, sandbox.name).worker.name
        return {"sandbox_id": sandbox.name, "host_name": worker, "host_ip": None}

    def _store_state(self, name: str, state: _SandboxState) -> _SandboxState:
        self._states[self.owned.owner, name] = state
        return state

    def _remove_state(self, name: str) -> None:
        self._states.pop((self.owned.owner, name), None)

    def get_state(self, name: str) -> _SandboxState:
        """Return the request and sessions of a live sandbox; if none are stored, store a default request."""
        self.owned.dispatcher.find_sandbox(self.owned.owner, name)
        return self._states.get((self.owned.owner, name)) or self._store_state(name, _SandboxState(StartRequest()))

    async def use_sandbox(self, name: str) -> RemoteSandbox:
        """Return a sandbox that is about to be used, and restart its lifetime if more than a tenth of the lifetime has
        passed.
        """
        sandbox = await self.owned.get_sandbox(name)
        entry = self.owned.dispatcher.find_sandbox(self.owned.owner, name)
        lifetime_s = self.get_state(name).request.auto_clear_time_minutes * 60.0
        if entry.ends_at - time.monotonic() < 0.9 * lifetime_s:
            self.owned.dispatcher.extend(entry, lifetime_s)
        return sandbox

    def get_status(self, name: str) -> dict[str, Any]:
        """Return the result of ROCK's `get_status` for a live sandbox."""
        entry, request = self.owned.dispatcher.find_sandbox(self.owned.owner, name), self.get_state(name).request
        alive = entry.state == "running"
        return {
            "sandbox_id": name,
            "status": {},
            "state": "running" if alive else "pending",
            "is_alive": alive,
            "host_name": entry.worker.name,
            "host_ip": None,
            "port_mapping": {},
            "image": request.image,
            "cpus": request.cpus,
            "memory": request.memory,
            "disk": request.disk,
            "user_id": self.owned.owner,
        }

    async def get_ended_status(self, name: str) -> dict[str, Any] | None:
        """Return the result of ROCK's `get_status` for a sandbox that ended within the last hour; otherwise `None`."""
        row = await asyncio.to_thread(self.owned.dispatcher.records.load_sandbox, self.owned.owner, name)
        status = {"sandbox_id": name, "status": {}, "state": "stopped", "is_alive": False, "port_mapping": {}}
        return None if row is None else {**status, "host_name": row.worker, "user_id": self.owned.owner}

    async def execute(self, request: ExecuteRequest) -> dict[str, Any]:
        """Run a command, and return its result."""
        command = request.command
        argv = ("bash", "-c", command) if isinstance(command, str) else tuple(command)
        program = Command(argv=argv, env=request.env or {}, cwd=request.cwd, wall_s=request.timeout or _MAX_WALL_S)
        result = await (await self.use_sandbox(request.sandbox_id)).execute(program)
        if result.outcome is Outcome.WALL_TIME:
            raise CommandFailedError(f"the command took longer than its timeout of {request.timeout} s.")
        # A program that a limit has ended has no exit code; report SIGKILL, as a shell would.
        code = 128 + 9 if result.exit_code is None else result.exit_code
        if request.check and code:
            raise CommandFailedError(f"the command ended with exit code {code}.")
        return {
            "stdout": result.stdout.decode(errors="replace"),
            "stderr": result.stderr.decode(errors="replace"),
            "exit_code": code,
        }

    async def open_session(self, request: SessionRequest) -> dict[str, Any]:
        """Open a shell session under the requested name."""
        sandbox = await self.use_sandbox(request.sandbox_id)
        sessions = self.get_state(request.sandbox_id).sessions
        if request.session in sessions and not sessions[request.session].closed:
            raise SandboxRequestError(f"the session '{request.session}' already exists.")
        session = sessions[request.session] = await sandbox.session(env=request.env)
        if request.startup_source:
            await session.run("; ".join(f"source {shlex.quote(path)}" for path in request.startup_source))
        return {"output": "", "session_type": "bash"}

    def get_session(self, sandbox: str, name: str) -> Session:
        """Return an open session."""
        session = self.get_state(sandbox).sessions.get(name)
        if session is None:
            raise SandboxRequestError(
                f"unknown session '{name}': it was never opened, or was lost when the server restarted."
            )
        return session

    async def run_in_session(self, request: SessionCommand) -> dict[str, Any]:
        """Run a command in a session; return stdout and stderr as one output, without terminal sequences."""
        await self.use_sandbox(request.sandbox_id)
        session = self.get_session(request.sandbox_id, request.session)
        job = await session.start(request.command, wall_s=request.timeout or _MAX_WALL_S)
        output = b"".join([chunk.data async for chunk in job.stream()]).decode(errors="replace")
        output = _ESCAPE_SEQUENCE_PATTERN.sub("", output).strip()
        result = await job.wait()
        if result.outcome is Outcome.WALL_TIME:
            raise CommandFailedError(f"timeout after {request.timeout} seconds while running a command.")
        code = 128 + 9 if result.exit_code is None else result.exit_code
        if request.check == "raise" and code:
            raise CommandFailedError(f"the command failed with exit code {code}. Here is the output:\n{output[:1000]}")
        reported_code = None if request.check == "ignore" else code
        return {"session_type": "bash", "output": output, "exit_code": reported_code, "failure_reason": ""}

    async def close_session(self, request: SessionRequest) -> dict[str, Any]:
        """End a shell session."""
        await self.get_session(request.sandbox_id, request.session).close()
        del self.get_state(request.sandbox_id).sessions[request.session]
        return {"session_type": "bash"}


async def _get_rock_handlers(request: Request) -> _RockHandlers:
    inside: LocalClients = request.app.state.local_clients
    return _RockHandlers(inside.get(request.scope["identity"]), request.app.state.rock)


RockHandlers = Annotated[_RockHandlers, Depends(_get_rock_handlers)]
SandboxId = Annotated[ResourceName, Query()]


def add_rock_routes(app: FastAPI, *, use_images: bool) -> None:
    """Add ROCK's routes.

    Args:
        app: the application.
        use_images: true if each sandbox uses the requested image. If false, a sandbox uses the image only if a worker
            reports to have it, and otherwise the files of its machine.
    """
    app.state.rock = {}
    router = APIRouter(prefix=ROCK_PREFIX, route_class=_RockRoute, responses=_ERROR_RESPONSES)

    @router.post("/start")
    @router.post("/start_async")
    async def start_sandbox(request: StartRequest, rock: RockHandlers) -> RockAnswer:
        return RockAnswer(result=await rock.start(request, use_image=use_images))

    @router.get("/is_alive")
    async def is_alive(sandbox_id: SandboxId, rock: RockHandlers) -> RockAnswer:
        try:
            status = rock.get_status(sandbox_id)
        except UnknownSandboxError as error:  # not a failure, as in ROCK
            status = {"is_alive": False, "host_name": str(error)}
        return RockAnswer(result={"is_alive": status["is_alive"], "message": status["host_name"]})

    @router.get("/get_status")
    async def get_status(sandbox_id: SandboxId, rock: RockHandlers, include_all_states: bool = False) -> RockAnswer:
        """Return the status of a sandbox; `include_all_states` includes ended sandboxes."""
        try:
            return RockAnswer(result=rock.get_status(sandbox_id))
        except UnknownSandboxError:
            if not include_all_states or (status := await rock.get_ended_status(sandbox_id)) is None:
                raise
            return RockAnswer(result=status)

    @router.get("/sandboxes")
    async def list_sandboxes(rock: RockHandlers) -> RockAnswer:
        items = [rock.get_status(entry.name) for entry in rock.owned.dispatcher.list_sandboxes(rock.owned.owner)]
        return RockAnswer(result={"items": items, "total": len(items), "has_more": False})

    @router.post("/execute")
    async def execute_command(request: ExecuteRequest, rock: RockHandlers) -> RockAnswer:
        return RockAnswer(result=await rock.execute(request))

    @router.post("/stop")
    @router.post("/delete")
    async def stop_sandbox(request: SandboxIdBody, rock: RockHandlers) -> RockAnswer:
        """Stop a sandbox. As in ROCK, it is not an error if it has already ended."""
        if f"{rock.owned.owner}/{request.sandbox_id}" in rock.owned.dispatcher.entries:
            await (await rock.owned.get_sandbox(request.sandbox_id)).close()
        return RockAnswer(result=f"{request.sandbox_id} stopped")

    @router.post("/restart")
    @router.post("/commit")
    @router.get("/get_token")
    async def reject_unsupported() -> RockAnswer:
        raise SandboxRequestError("this route of ROCK is not supported: see docs/sandbox-service.md.")

    _add_sessions(router)
    _add_files(router)
    app.include_router(router)


def _add_sessions(router: APIRouter) -> None:
    @router.post("/create_session")
    async def create_session(request: SessionRequest, rock: RockHandlers) -> RockAnswer:
        return RockAnswer(result=await rock.open_session(request))

    @router.post("/run_in_session")
    async def run_in_session(request: SessionCommand, rock: RockHandlers) -> RockAnswer:
        return RockAnswer(result=await rock.run_in_session(request))

    @router.post("/close_session")
    async def close_session(request: SessionRequest, rock: RockHandlers) -> RockAnswer:
        return RockAnswer(result=await rock.close_session(request))


def _add_files(router: APIRouter) -> None:
    @router.post("/read_file")
    async def read_file(request: ReadRequest, rock: RockHandlers) -> RockAnswer:
        data = await (await rock.use_sandbox(request.sandbox_id)).read_file(request.path)
        try:
            text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        except LookupError:
            raise SandboxRequestError(
                f"unknown encoding '{request.encoding}': use a Python encoding such as 'utf-8'."
            ) from None
        return RockAnswer(result={"content": text.encode(errors="replace").decode()})

    @router.post("/write_file")
    async def write_file(request: WriteRequest, rock: RockHandlers) -> RockAnswer:
        await (await rock.use_sandbox(request.sandbox_id)).write_file(request.path, request.content.encode())
        return RockAnswer(result={"success": True, "message": ""})

    @router.post("/upload", openapi_extra={"requestBody": {"content": _UPLOAD_SCHEMA, "required": True}})
    async def upload_file(request: Request, rock: RockHandlers) -> RockAnswer:
        kind = request.headers.get("content-type", "")
        parts = await asyncio.to_thread(_parse_form, kind, await request.body())
        if not parts.keys() >= {"file", "target_path", "sandbox_id"}:
            raise SandboxRequestError("an upload must have the form fields 'file', 'target_path' and 'sandbox_id'.")
        target, name = parts["target_path"].decode(), parts["sandbox_id"].decode()
        await (await rock.use_sandbox(name)).write_file(target, parts["file"])
        return RockAnswer(result={"success": True, "message": "", "file_name": target.rpartition("/")[2]})


def _parse_form(kind: str, body: bytes) -> dict[str, bytes]:
    """Return the parts of a multipart form, by name.

    Raises:
        SandboxRequestError: the body is not a multipart form.
    """
    match = re.fullmatch(r'multipart/form-data; *boundary="?([^";]{1,70})"?', kind)
    if match is None:
        raise SandboxRequestError("an upload must be 'multipart/form-data' with a boundary.")
    parts = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + match[1].encode())[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        name = re.search(rb'[; ]name="([^"]{1,100})"', head)
        if name is not None:
            parts[name[1].decode(errors="replace")] = data
    return parts


_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": "refused",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["error", "message"],
                    "properties": {"error": {"type": "string"}, "message": {"type": "string"}},
                }
            }
        },
    }
    for status in (401, 403, 413, 429)
}
