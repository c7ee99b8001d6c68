"""Streams a program's output over a WebSocket of JSON texts, for clients other than this package's.

    client: {"run": RunBody, "key"?: name}   then {"input": base64} · {"end_input": true} · {"kill": true}
    server: {"stream": "stdout" | "stderr", "data": base64} …, then {"end": ResultBody without output}
            or {"error": kind, "message": text}, and closes the socket

A program without a key ends with its socket. A program with a key goes on, and the same key finds it again, from its
first output on.
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
from roll_sandbox.service.bodies import RunBody, result_body
from roll_sandbox.service.rates import Rates
from roll_sandbox.wire import check_name, failure_said, parsed

__all__ = ["stream"]

_CHECK_S = 2.0


async def stream(socket: WebSocket, name: str) -> None:
    """Serve one socket for one program."""
    await socket.accept()
    try:
        await _serve(socket, name)
    except (RollSandboxError, ValueError) as error:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            await socket.send_json(failure_said(error))
    except (WebSocketDisconnect, RuntimeError, OSError):
        return
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
        await socket.close()


async def _serve(socket: WebSocket, name: str) -> None:
    identity, state = socket.scope["identity"], socket.app.state
    owned = state.inside.of(identity)
    said = await _heard(socket)
    key = said.get("key")
    if not isinstance(said.get("run"), dict) or said.keys() - {"run", "key"}:
        raise SandboxRequestError('the first message is {"run": …}, with a "key" where it may be sent again.')
    try:
        body = RunBody.model_validate(said["run"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SandboxRequestError(f"run.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    program = dataclasses.replace(body.program(), interactive=True)
    sandbox = await owned.sandbox(check_name(name))
    job = owned.begin(sandbox, program, alone=body.alone, key=None if key is None else check_name(key))
    tasks = [
        asyncio.create_task(_tell(socket, job)),
        asyncio.create_task(_listen(socket, job, state.service.rates(identity), identity.owner)),
        asyncio.create_task(_check(state.service.tokens, identity)),
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


async def _heard(socket: WebSocket) -> dict[str, Any]:
    try:
        said = parsed((await socket.receive_text()).encode())
    except (SandboxRequestError, ValueError, KeyError):
        said = None
    if not isinstance(said, dict):
        raise SandboxRequestError("a message is a JSON object, as text.")
    return said


async def _tell(socket: WebSocket, job: Job) -> None:
    async for chunk in job.stream():
        await socket.send_json({"stream": chunk.stream, "data": base64.b64encode(chunk.data).decode()})
    ended = result_body(await job.wait()).model_dump(exclude={"stdout", "stderr", "encoding", "output_kept"})
    await socket.send_json({"end": ended})


async def _listen(socket: WebSocket, job: Job, rates: Rates, owner: str) -> None:
    while True:
        said = await _heard(socket)
        if (wait_s := rates.wait_s(owner)) > 0.01:
            await asyncio.sleep(wait_s)
        if said.keys() == {"input"} and isinstance(said["input"], str):
            try:
                job.write(base64.b64decode(said["input"], validate=True))
            except binascii.Error as error:
                raise SandboxRequestError(f"'input' is no base64: {error}") from None
        elif said == {"end_input": True}:
            job.end_input()
        elif said == {"kill": True}:
            job.kill()
        else:
            raise SandboxRequestError('known are {"input": base64}, {"end_input": true} and {"kill": true}.')


async def _check(tokens: Any, identity: Any) -> None:
    """Wait until the token is no longer valid.

    Raises:
        SandboxAccessError: the token has expired or was revoked.
    """
    while await asyncio.to_thread(tokens.good, identity):
        await asyncio.sleep(_CHECK_S)
    raise SandboxAccessError("the token has expired or was revoked.")
