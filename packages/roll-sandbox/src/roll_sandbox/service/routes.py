"""The routes of `/v1`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from roll_sandbox.errors import (
    RollSandboxError,
    SandboxError,
    SandboxLostError,
    SandboxRequestError,
    UnknownSandboxError,
)
from roll_sandbox.results import parse_result
from roll_sandbox.service.archives import pack, unpack
from roll_sandbox.service.bodies import (
    CheckedRoute,
    CheckedString,
    CreateBody,
    EntryBody,
    ExtendBody,
    ProgramBody,
    ResourceName,
    ResultBody,
    RunBody,
    SandboxBody,
    SessionBody,
    SessionRunBody,
    describe_validation_error,
    make_result_body,
)
from roll_sandbox.service.dispatcher import Dispatcher, SandboxEntry
from roll_sandbox.service.local_clients import LocalClients, OwnerSandboxes
from roll_sandbox.service.streaming import stream
from roll_sandbox.types import Limit, PythonCode, Snapshot
from roll_sandbox.wire import error_to_json, parse_json, spec_from_json
from roll_sandbox.wire.error_messages import HTTP_STATUS

__all__ = ["add_routes"]

PathName = Annotated[ResourceName, Path()]
IdempotencyKey = Annotated[ResourceName | None, Header(alias="Idempotency-Key")]
"""Idempotency key: a request with the same key returns the same sandbox or program."""
FilePath = Annotated[CheckedString, Query(min_length=1, max_length=4096)]
_BINARY_CONTENT = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_ERROR_RESPONSE = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {"error": {"type": "string"}, "message": {"type": "string"}},
}
_TAR_CONTENT = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": "refused", "content": {"application/json": {"schema": _ERROR_RESPONSE}}}
    for status in (400, 401, 403, 404, 409, 410, 413, 422, 429, 502, 503)
}
_LIST_PROGRAM = """
import json, os
entries = sorted(os.scandir({path!r}), key=lambda entry: entry.name)
print(json.dumps([[e.name, e.is_dir(follow_symlinks=False), e.stat(follow_symlinks=False).st_size] for e in entries]))
"""
"""Prints the entries of a directory, run in the sandbox. A malicious sandbox can only misreport its own files."""


async def _get_sandboxes(request: Request) -> OwnerSandboxes:
    inside: LocalClients = request.app.state.local_clients
    return inside.get(request.scope["identity"])


Sandboxes = Annotated[OwnerSandboxes, Depends(_get_sandboxes)]


def add_routes(app: FastAPI, dispatcher: Dispatcher) -> None:
    """Add the routes and the error handlers."""
    app.state.local_clients = LocalClients(dispatcher)
    router = APIRouter(prefix="/v1", route_class=CheckedRoute, responses=_ERROR_RESPONSES)
    _add_sandboxes(router)
    _add_programs(router)
    _add_files(router)
    _add_snapshots(router)
    app.include_router(router)
    app.add_exception_handler(RollSandboxError, _handle_error)
    app.add_exception_handler(ValueError, _handle_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)


def _handle_error(_: Request, error: Exception) -> Response:
    body = error_to_json(error)
    return JSONResponse(body, status_code=HTTP_STATUS[body["error"]])


def _handle_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"error": "request", "message": describe_validation_error(error)}, status_code=422)


def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "unknown" if error.status_code == 404 else "request"
    body = {"error": kind, "message": str(error.detail)}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _make_sandbox_body(entry: SandboxEntry) -> SandboxBody:
    return SandboxBody(
        sandbox=entry.name,
        state=entry.state,
        created=entry.created,
        expires=entry.expires,
        worker=entry.worker.name,
        programs=entry.num_running,
    )


def _add_sandboxes(router: APIRouter) -> None:
    @router.post("/sandboxes", status_code=201)
    async def create_sandbox(body: CreateBody, owned: Sandboxes, key: IdempotencyKey = None) -> SandboxBody:
        sandbox, _ = await owned.create(spec_from_json(body.spec), body.lifetime_s, name=key)
        return _make_sandbox_body(owned.dispatcher.find_sandbox(owned.owner, sandbox.name))

    @router.get("/sandboxes")
    async def list_sandboxes(
        response: Response,
        owned: Sandboxes,
        after: Annotated[ResourceName | None, Query()] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> list[SandboxBody]:
        """List sandboxes, sorted by name; the header `Link` has the URL of the next page, if there is one."""
        rest = sorted(
            entry.name for entry in owned.dispatcher.list_sandboxes(owned.owner) if after is None or entry.name > after
        )
        page = rest[:limit]
        if len(rest) > limit:
            response.headers["Link"] = f'</v1/sandboxes?after={page[-1]}&limit={limit}>; rel="next"'
        return [_make_sandbox_body(owned.dispatcher.find_sandbox(owned.owner, name)) for name in page]

    @router.get("/sandboxes/{name}")
    async def get_sandbox(name: PathName, owned: Sandboxes) -> SandboxBody:
        return _make_sandbox_body(await owned.get_entry(name))

    @router.post("/sandboxes/{name}/extend")
    async def extend_lifetime(name: PathName, body: ExtendBody, owned: Sandboxes) -> SandboxBody:
        entry = await owned.get_entry(name)
        owned.dispatcher.extend(entry, body.lifetime_s)
        return _make_sandbox_body(entry)

    @router.delete("/sandboxes/{name}", status_code=204)
    async def stop_sandbox(name: PathName, owned: Sandboxes) -> None:
        await (await owned.get_sandbox(name)).close()


def _add_programs(router: APIRouter) -> None:
    @router.post("/sandboxes/{name}/run")
    async def run_program(name: PathName, body: RunBody, owned: Sandboxes, key: IdempotencyKey = None) -> ResultBody:
        job = owned.begin(await owned.get_sandbox(name), body.make_program(), alone=body.alone, key=key)
        try:
            return make_result_body(await job.wait())
        except SandboxLostError:
            # The end may be recorded although the output is no longer available.
            ended = None if key is None else await _load_program(owned, name, key)
            if ended is None or ended.result is None:
                raise
            return ended.result
        finally:
            if key is None:  # no later request could ask for the result
                job.kill()

    @router.get("/sandboxes/{name}/programs/{program}")
    async def get_program_end(name: PathName, program: PathName, owned: Sandboxes) -> ProgramBody:
        """Return a program's state and result, until an hour after its sandbox has ended."""
        record = await _load_program(owned, name, program)
        if record is None:
            raise UnknownSandboxError(f"program '{program}' does not exist in the sandbox '{name}' of '{owned.owner}'.")
        return record

    @router.websocket("/sandboxes/{name}/stream")
    async def stream_program(socket: WebSocket, name: str) -> None:
        await stream(socket, name)

    @router.post("/sandboxes/{name}/sessions", status_code=201)
    async def open_session(name: PathName, body: SessionBody, owned: Sandboxes) -> dict[str, str]:
        sandbox = await owned.get_sandbox(name)
        try:
            session = await sandbox.session(env=body.env, cwd=body.cwd)
        except SandboxError as error:
            if sandbox.has_ended or not (body.env or body.cwd):
                raise
            raise SandboxRequestError(f"the shell failed to start with the given 'env' and 'cwd': {error}") from None
        return {"session": owned.store_session(name, session)}

    @router.post("/sandboxes/{name}/sessions/{session}/run")
    async def run_in_session(name: PathName, session: PathName, body: SessionRunBody, owned: Sandboxes) -> ResultBody:
        return make_result_body(await (await owned.get_session(name, session)).run(body.command, wall_s=body.wall_s))

    @router.delete("/sandboxes/{name}/sessions/{session}", status_code=204)
    async def close_session(name: PathName, session: PathName, owned: Sandboxes) -> None:
        await (await owned.get_session(name, session)).close()
        owned.sessions.pop((name, session), None)


async def _load_program(owned: OwnerSandboxes, name: str, program: str) -> ProgramBody | None:
    row = await asyncio.to_thread(owned.dispatcher.records.load_program, owned.owner, name, program)
    if row is None:
        return None
    end = row.end or {}
    body = ProgramBody(program=program, state=row.state, started=row.started)
    if "end" in end:
        counted = [Limit(each) for each in end["end"].get("counted", ())]
        body.result = make_result_body(parse_result(end["end"], counted), output_kept=False)
    body.error, body.message = (each if isinstance(each, str) else None for each in map(end.get, ("error", "message")))
    return body


def _decode_name(name: str) -> str:
    """Return a file name with U+FFFD for each byte that is not valid UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode(errors="replace")


def _add_files(router: APIRouter) -> None:
    @router.get("/sandboxes/{name}/file", response_class=Response, responses={200: {"content": _BINARY_CONTENT}})
    async def read_file(name: PathName, path: FilePath, owned: Sandboxes) -> Response:
        data = await (await owned.get_sandbox(name)).read_file(path)
        return Response(data, media_type="application/octet-stream")

    @router.put("/sandboxes/{name}/file", status_code=204, openapi_extra={"requestBody": {"content": _BINARY_CONTENT}})
    async def write_file(name: PathName, path: FilePath, request: Request, owned: Sandboxes) -> None:
        await (await owned.get_sandbox(name)).write_file(path, await request.body())

    @router.get("/sandboxes/{name}/directory")
    async def list_directory(name: PathName, path: FilePath, owned: Sandboxes) -> list[EntryBody]:
        sandbox = await owned.get_sandbox(name)
        result = await sandbox.execute(PythonCode(source=_LIST_PROGRAM.format(path=path), wall_s=20.0))
        if not result.ok:
            last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SandboxRequestError(f"the directory '{path[:200]}' cannot be read: {''.join(last)[:300]}")
        try:
            return [
                EntryBody(name=_decode_name(each[0]), directory=each[1], size=each[2])
                for each in parse_json(result.stdout)
            ]
        except (SandboxRequestError, ValueError, TypeError, LookupError, AttributeError):
            raise SandboxRequestError("the sandbox did not return a list of directory entries.") from None

    @router.get("/sandboxes/{name}/archive", response_class=Response, responses={200: {"content": _TAR_CONTENT}})
    async def read_archive(name: PathName, path: FilePath, owned: Sandboxes) -> Response:
        """Return a directory as a tar archive, without links and devices."""
        return Response(await pack(await owned.get_sandbox(name), path), media_type="application/x-tar")

    @router.put(
        "/sandboxes/{name}/archive", status_code=204, openapi_extra={"requestBody": {"content": _BINARY_CONTENT}}
    )
    async def write_archive(name: PathName, path: FilePath, request: Request, owned: Sandboxes) -> None:
        """Unpack an uncompressed tar archive of files and directories below `path`."""
        await unpack(await owned.get_sandbox(name), path, await request.body())


def _add_snapshots(router: APIRouter) -> None:
    @router.post("/sandboxes/{name}/snapshot", response_class=Response, responses={200: {"content": _BINARY_CONTENT}})
    async def take_snapshot(name: PathName, owned: Sandboxes) -> Response:
        snapshot = await (await owned.get_sandbox(name)).snapshot()
        return Response(snapshot.archive, media_type="application/octet-stream")

    @router.post(
        "/sandboxes/{name}/restore", status_code=204, openapi_extra={"requestBody": {"content": _BINARY_CONTENT}}
    )
    async def restore_snapshot(name: PathName, request: Request, owned: Sandboxes) -> None:
        await (await owned.get_sandbox(name)).restore(Snapshot(archive=await request.body()))

    @router.post("/sandboxes/{name}/fork", status_code=201)
    async def fork_sandbox(
        name: PathName, body: Annotated[ExtendBody | None, Body()] = None, *, owned: Sandboxes
    ) -> SandboxBody:
        origin = await owned.get_sandbox(name)
        snapshot = await origin.snapshot()
        lifetime_s = None if body is None else body.lifetime_s
        copy, _ = await owned.create(dataclasses.replace(origin.spec), lifetime_s, near=name)
        try:
            await copy.restore(snapshot)
        except BaseException:
            await copy.close()
            raise
        return _make_sandbox_body(owned.dispatcher.find_sandbox(owned.owner, copy.name))
