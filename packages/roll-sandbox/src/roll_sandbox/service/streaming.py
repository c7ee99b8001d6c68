"""Streams a program's output over a WebSocket as JSON messages, for clients without this package.

    client: {"run": RunBody, "key"?: name}   then {"input": base64} · {"end_input": true} · {"kill": true}
    server: {"stream": "stdout" | "stderr", "data": base64} …, then {"end": ResultBody without output}
            or {"error": kind, "message": text}; then the server closes the socket

A program without a key is killed when its socket closes. A program with a key keeps running, and a later socket with
the same key streams its output again from the beginning.
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

_TOKEN_CHECK_INTERVAL_S = 2.0


async def stream(socket: WebSocket, name: str) -> None:
    """Run one program, which the client sends, in the sandbox `name`, and stream its output over the socket."""
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
    message = await _receive(socket)
    key = message.get("key")
    if not isinstance(message.get("run"), dict) or message.keys() - {"run", "key"}:
        raise SandboxRequestError('the first message must be {"run": …}, with an optional "key".')
    try:
        body = RunBody.model_validate(message["run"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SandboxRequestError(f"run.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    program = dataclasses.replace(body.make_program(), interactive=True)
    sandbox = await owned.get_sandbox(check_name(name))
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
        message = parse_json((await socket.receive_text()).encode())
    except (SandboxRequestError, ValueError, KeyError):
        message = None
    if not isinstance(message, dict):
        raise SandboxRequestError("a message must be a JSON object, sent as text.")
    return message


async def _send_output(socket: WebSocket, job: Job) -> None:
    async for chunk in job.stream():
        await socket.send_json({"stream": chunk.stream, "data": base64.b64encode(chunk.data).decode()})
    ended = make_result_body(await job.wait()).model_dump(exclude={"stdout", "stderr", "encoding", "output_kept"})
    await socket.send_json({"end": ended})


async def _receive_input(socket: WebSocket, job: Job, rates: RateLimiter, owner: str) -> None:
    while True:
        message = await _receive(socket)
        if (wait_s := rates.consume(owner)) > 0.01:
            await asyncio.sleep(wait_s)
        if message.keys() == {"input"} and isinstance(message["input"], str):
            try:
                job.write(base64.b64decode(message["input"], validate=True))
            except binascii.Error as error:
                raise SandboxRequestError(f"'input' must be base64: {error}") from None
        elif message == {"end_input": True}:
            job.end_input()
        elif message == {"kill": True}:
            job.kill()
        else:
            raise SandboxRequestError('a message must be {"input": base64}, {"end_input": true} or {"kill": true}.')


async def _watch_token(tokens: Any, identity: Any) -> None:
    """Wait until the token is no longer valid.

    Raises:
        SandboxAccessError: the token has expired or was revoked.
    """
    while await asyncio.to_thread(tokens.is_valid, identity):
        await asyncio.sleep(_TOKEN_CHECK_INTERVAL_S)
    raise SandboxAccessError("the token has expired or was revoked.")
