"""Streams a program's output over a WebSocket of JSON texts, for clients other than this package's.

    client: {"run": RunBody, "key"?: name}   then {"input": base64} · {"end_input": true} · {"kill": true}
    server: {"stream": "stdout" | "stderr", "data": base64} …, then {"end": ResultBody without output}
            or {"error": kind, "message": text}, and closes the socket

A program without a key ends with its socket. A program with a key keeps running, and a later socket with the same key
streams it again, from its first output on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
from typing import Any

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from roll_sandbox.agent_sandbox import Job
from roll_sandbox.errors import RollSandboxError, SandboxAccessError, SandboxRequestError
from roll_sandbox.service.bodies import RunBody, make_result_body
from roll_sandbox.service.rate_limits import RateLimiter
from roll_sandbox.wire import check_name, error_to_json, parse_json

__all__ = ["stream"]

_TOKEN_CHECK_S = 2.0


async def stream(socket: WebSocket, name: str) -> None:
    """Serve one socket for one program."""
    await socket.accept()
    try:
        await _serve(socket, name)
    except (RollSandboxError, ValueError) as error:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            await socket.send_json(error_to_json(error))
    except (WebSocketDisconnect, RuntimeError, OSError):
        return
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
        await socket.close()


async def _serve(socket: WebSocket, name: str) -> None:
    identity, state = socket.scope["identity"], socket.app.state
    owned = state.local_clients.get(identity)
    said = await _receive(socket)
    key = said.get("key")
    if not isinstance(said.get("run"), dict) or said.keys() - {"run", "key"}:
        raise SandboxRequestError('the first message must be {"run": …}, with an optional "key".')
    try:
        body = RunBody.model_validate(said["run"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SandboxRequestError(f"run.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    program = dataclasses.replace(body.program(), interactive=True)
    sandbox = await owned.sandbox(check_name(name))
    job = owned.begin(sandbox, program, alone=body.alone, key=None if key is None else check_name(key))
    tasks = [
        asyncio.create_task(_send_output(socket, job)),
        asyncio.create_task(_receive_input(socket, job, state.service.get_rate_limiter(identity), identity.owner)),
        asyncio.create_task(_watch_token(state.service.tokens, identity)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if key is None:
            job.kill()


async def _receive(socket: WebSocket) -> dict[str, Any]:
    try:
        said = parse_json((await socket.receive_text()).encode())
    except (SandboxRequestError, ValueError, KeyError):
        said = None
    if not isinstance(said, dict):
        raise SandboxRequestError("a message must be a JSON object, sent as text.")
    return said


async def _send_output(socket: WebSocket, job: Job) -> None:
    async for chunk in job.stream():
        await socket.send_json({"stream": chunk.stream, "data": base64.b64encode(chunk.data).decode()})
    ended = make_result_body(await job.wait()).model_dump(exclude={"stdout", "stderr", "encoding", "output_kept"})
    await socket.send_json({"end": ended})


async def _receive_input(socket: WebSocket, job: Job, rates: RateLimiter, owner: str) -> None:
    while True:
        said = await _receive(socket)
        if (wait_s := rates.take(owner)) > 0.01:
            await asyncio.sleep(wait_s)
        if said.keys() == {"input"} and isinstance(said["input"], str):
            try:
                job.write(base64.b64decode(said["input"], validate=True))
            except binascii.Error as error:
                raise SandboxRequestError(f"'input' must be base64: {error}") from None
        elif said == {"end_input": True}:
            job.end_input()
        elif said == {"kill": True}:
            job.kill()
        else:
            raise SandboxRequestError('a message must be {"input": base64}, {"end_input": true} or {"kill": true}.')


async def _watch_token(tokens: Any, identity: Any) -> None:
    """Wait until the token is no longer valid.

    Raises:
        SandboxAccessError: the token has expired or was revoked.
    """
    while await asyncio.to_thread(tokens.is_valid, identity):
        await asyncio.sleep(_TOKEN_CHECK_S)
    raise SandboxAccessError("the token has expired or was revoked.")
