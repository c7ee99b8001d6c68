"""ROCK's REST routes, so that code written for ROCK's SDK runs here with another URL.

Errors after the token check are answered as ROCK does: 200, `status` "Failed", and one of ROCK's codes.
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
from roll_sandbox.service.access import ROCK
from roll_sandbox.service.bodies import CheckedRoute, Named, describe_validation_error
from roll_sandbox.service.local_clients import LocalClients, OwnerSandboxes
from roll_sandbox.service.rock_bodies import (
    BAD_REQUEST,
    BROKEN,
    COMMAND_FAILED,
    ExecuteRequest,
    OfSandbox,
    ReadRequest,
    RockAnswer,
    SessionCommand,
    SessionRequest,
    StartRequest,
    WriteRequest,
)
from roll_sandbox.types import Command, Outcome

__all__ = ["add_rock_routes"]

_MAX_WALL_S = 86400.0
_ESCAPES = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
"""The escape sequences that ROCK removes from a shell's output (`rock/rocklet/linux.py`)."""
_FORM = {
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
    """A command whose success was required has failed."""


class _RockRoute(CheckedRoute):
    """A route that reports errors in ROCK's format."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
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

        return guarded


def _make_failure(error: str, code: int) -> Response:
    result = {"code": code, "exit_code": None, "failure_reason": error}
    error = error.encode(errors="replace").decode()
    return JSONResponse({"status": "Failed", "message": "refused", "error": error, "result": result})


class _SandboxState:
    """The state that ROCK's routes keep of a sandbox, beyond the service's; lost with this server."""

    def __init__(self, request: StartRequest) -> None:
        self.request = request
        self.sessions: dict[str, Session] = {}


class _Rock:
    """One owner's sandboxes in ROCK's format."""

    def __init__(self, owned: OwnerSandboxes, known: dict[tuple[str, str], _SandboxState]) -> None:
        self.owned = owned
        self._states = known

    async def start(self, request: StartRequest, *, images: bool) -> dict[str, Any]:
        """Start a sandbox, and return when it runs.

        Args:
            request: ROCK's request.
            images: whether to use the image even if no worker reports to have it.
        """
        images = images or any(request.image in each.report.images for each in self.owned.dispatcher.workers.values())
        spec, name = request.spec(images=images), request.sandbox_id
        if request.num_gpus:
            raise SandboxRequestError("GPUs are not supported: leave out 'num_gpus'.")
        sandbox, _ = await self.owned.create(spec, request.auto_clear_time_minutes * 60.0, name=name)
        if (self.owned.owner, sandbox.name) not in self._states:
            self._keep(sandbox.name, _SandboxState(request))
            sandbox.on_close(partial(self._forget, sandbox.name))
        worker = self.owned.dispatcher.find(self.owned.owner, sandbox.name).worker.name
        return {"sandbox_id": sandbox.name, "host_name": worker, "host_ip": None}

    def _keep(self, name: str, known: _SandboxState) -> _SandboxState:
        self._states[self.owned.owner, name] = known
        return known

    def _forget(self, name: str) -> None:
        self._states.pop((self.owned.owner, name), None)

    def get_state(self, name: str) -> _SandboxState:
        """Return the state of a live sandbox."""
        self.owned.dispatcher.find(self.owned.owner, name)
        return self._states.get((self.owned.owner, name)) or self._keep(name, _SandboxState(StartRequest()))

    async def touch(self, name: str) -> RemoteSandbox:
        """Return a sandbox that is about to be used, and restart its lifetime if a tenth of it has passed."""
        sandbox = await self.owned.sandbox(name)
        entry = self.owned.dispatcher.find(self.owned.owner, name)
        lifetime_s = self.get_state(name).request.auto_clear_time_minutes * 60.0
        if entry.ends_at - time.monotonic() < 0.9 * lifetime_s:
            self.owned.dispatcher.extend(entry, lifetime_s)
        return sandbox

    def get_status(self, name: str) -> dict[str, Any]:
        """Return `get_status` of a live sandbox."""
        entry, request = self.owned.dispatcher.find(self.owned.owner, name), self.get_state(name).request
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
        """Return `get_status` of a sandbox that ended within the last hour."""
        row = await asyncio.to_thread(self.owned.dispatcher.records.load_sandbox, self.owned.owner, name)
        said = {"sandbox_id": name, "status": {}, "state": "stopped", "is_alive": False, "port_mapping": {}}
        return None if row is None else {**said, "host_name": row.worker, "user_id": self.owned.owner}

    async def execute(self, request: ExecuteRequest) -> dict[str, Any]:
        """Run a command and wait for its end."""
        command = request.command
        argv = ("bash", "-c", command) if isinstance(command, str) else tuple(command)
        program = Command(argv=argv, env=request.env or {}, cwd=request.cwd, wall_s=request.timeout or _MAX_WALL_S)
        result = await (await self.touch(request.sandbox_id)).execute(program)
        if result.outcome is Outcome.WALL_TIME:
            raise CommandFailedError(f"the command took longer than its timeout of {request.timeout} s.")
        code = 128 + 9 if result.exit_code is None else result.exit_code
        if request.check and code:
            raise CommandFailedError(f"the command ended with exit code {code}.")
        return {
            "stdout": result.stdout.decode(errors="replace"),
            "stderr": result.stderr.decode(errors="replace"),
            "exit_code": code,
        }

    async def open(self, request: SessionRequest) -> dict[str, Any]:
        """Open a shell under the caller's name for it."""
        sandbox = await self.touch(request.sandbox_id)
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

    async def run(self, request: SessionCommand) -> dict[str, Any]:
        """Run a command in a session, and return both streams as one output without terminal sequences."""
        await self.touch(request.sandbox_id)
        session = self.get_session(request.sandbox_id, request.session)
        job = await session.start(request.command, wall_s=request.timeout or _MAX_WALL_S)
        output = b"".join([chunk.data async for chunk in job.stream()]).decode(errors="replace")
        output = _ESCAPES.sub("", output).strip()
        result = await job.wait()
        if result.outcome is Outcome.WALL_TIME:
            raise CommandFailedError(f"timeout after {request.timeout} seconds while running a command.")
        code = 128 + 9 if result.exit_code is None else result.exit_code
        if request.check == "raise" and code:
            raise CommandFailedError(f"the command failed with exit code {code}. Here is the output:\n{output[:1000]}")
        code_said = None if request.check == "ignore" else code
        return {"session_type": "bash", "output": output, "exit_code": code_said, "failure_reason": ""}

    async def close(self, request: SessionRequest) -> dict[str, Any]:
        """End a shell."""
        await self.get_session(request.sandbox_id, request.session).close()
        del self.get_state(request.sandbox_id).sessions[request.session]
        return {"session_type": "bash"}


async def _get_rock(request: Request) -> _Rock:
    inside: LocalClients = request.app.state.local_clients
    return _Rock(inside.get(request.scope["identity"]), request.app.state.rock)


Here = Annotated[_Rock, Depends(_get_rock)]
Id = Annotated[Named, Query()]


def add_rock_routes(app: FastAPI, *, images: bool) -> None:
    """Add ROCK's routes.

    Args:
        app: the application.
        images: whether sandboxes use the requested image; otherwise they use this machine's files.
    """
    app.state.rock = {}
    router = APIRouter(prefix=ROCK, route_class=_RockRoute, responses=_REFUSALS)

    @router.post("/start")
    @router.post("/start_async")
    async def start(request: StartRequest, here: Here) -> RockAnswer:
        return RockAnswer(result=await here.start(request, images=images))

    @router.get("/is_alive")
    async def is_alive(sandbox_id: Id, here: Here) -> RockAnswer:
        try:
            said = here.get_status(sandbox_id)
        except UnknownSandboxError as error:  # not a failure, as in ROCK
            said = {"is_alive": False, "host_name": str(error)}
        return RockAnswer(result={"is_alive": said["is_alive"], "message": said["host_name"]})

    @router.get("/get_status")
    async def get_status(sandbox_id: Id, here: Here, include_all_states: bool = False) -> RockAnswer:
        """Return a sandbox's status; with `include_all_states`, also of one that has ended."""
        try:
            return RockAnswer(result=here.get_status(sandbox_id))
        except UnknownSandboxError:
            if not include_all_states or (said := await here.get_ended_status(sandbox_id)) is None:
                raise
            return RockAnswer(result=said)

    @router.get("/sandboxes")
    async def list_all(here: Here) -> RockAnswer:
        items = [here.get_status(entry.name) for entry in here.owned.dispatcher.list_sandboxes(here.owned.owner)]
        return RockAnswer(result={"items": items, "total": len(items), "has_more": False})

    @router.post("/execute")
    async def execute(request: ExecuteRequest, here: Here) -> RockAnswer:
        return RockAnswer(result=await here.execute(request))

    @router.post("/stop")
    @router.post("/delete")
    async def stop(request: OfSandbox, here: Here) -> RockAnswer:
        """Stop a sandbox. As in ROCK, it is no error if it has already ended."""
        if f"{here.owned.owner}/{request.sandbox_id}" in here.owned.dispatcher.entries:
            await (await here.owned.sandbox(request.sandbox_id)).close()
        return RockAnswer(result=f"{request.sandbox_id} stopped")

    @router.post("/restart")
    @router.post("/commit")
    @router.get("/get_token")
    async def not_offered() -> RockAnswer:
        raise SandboxRequestError("this route of ROCK is not supported: see docs/sandbox-service.md.")

    _add_sessions(router)
    _add_files(router)
    app.include_router(router)


def _add_sessions(router: APIRouter) -> None:
    @router.post("/create_session")
    async def create_session(request: SessionRequest, here: Here) -> RockAnswer:
        return RockAnswer(result=await here.open(request))

    @router.post("/run_in_session")
    async def run_in_session(request: SessionCommand, here: Here) -> RockAnswer:
        return RockAnswer(result=await here.run(request))

    @router.post("/close_session")
    async def close_session(request: SessionRequest, here: Here) -> RockAnswer:
        return RockAnswer(result=await here.close(request))


def _add_files(router: APIRouter) -> None:
    @router.post("/read_file")
    async def read_file(request: ReadRequest, here: Here) -> RockAnswer:
        data = await (await here.touch(request.sandbox_id)).read_file(request.path)
        try:
            text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        except LookupError:
            raise SandboxRequestError(f"unknown encoding '{request.encoding}'.") from None
        return RockAnswer(result={"content": text.encode(errors="replace").decode()})

    @router.post("/write_file")
    async def write_file(request: WriteRequest, here: Here) -> RockAnswer:
        await (await here.touch(request.sandbox_id)).write_file(request.path, request.content.encode())
        return RockAnswer(result={"success": True, "message": ""})

    @router.post("/upload", openapi_extra={"requestBody": {"content": _FORM, "required": True}})
    async def upload(request: Request, here: Here) -> RockAnswer:
        kind = request.headers.get("content-type", "")
        parts = await asyncio.to_thread(_parse_form, kind, await request.body())
        if not parts.keys() >= {"file", "target_path", "sandbox_id"}:
            raise SandboxRequestError("an upload must have the form fields 'file', 'target_path' and 'sandbox_id'.")
        target, name = parts["target_path"].decode(), parts["sandbox_id"].decode()
        await (await here.touch(name)).write_file(target, parts["file"])
        return RockAnswer(result={"success": True, "message": "", "file_name": target.rpartition("/")[2]})


def _parse_form(kind: str, body: bytes) -> dict[str, bytes]:
    """Parse the parts of a form, by name.

    Raises:
        SandboxRequestError: it is not a multipart form.
    """
    found = re.fullmatch(r'multipart/form-data; *boundary="?([^";]{1,70})"?', kind)
    if found is None:
        raise SandboxRequestError("an upload must be 'multipart/form-data' with a boundary.")
    parts = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + found[1].encode())[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        name = re.search(rb'[; ]name="([^"]{1,100})"', head)
        if name is not None:
            parts[name[1].decode(errors="replace")] = data
    return parts


_REFUSALS: dict[int | str, dict[str, Any]] = {
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
