"""Workers in processes of their own: they outlive the server, and what dies with them is said to be lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.conftest import _ROLL_SANDBOX, LIMITS, missing, roll_sandbox

from roll_sandbox import PythonCode, SandboxLostError, SandboxSpec, SandboxUnavailableError, connect
from roll_sandbox.__main__ import run

pytestmark = [pytest.mark.asyncio]

SPEC = SandboxSpec(limits=LIMITS)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`roll-sandbox …`, once it has said its first line."""
    with subprocess.Popen([*_ROLL_SANDBOX, *arguments], stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            assert re.search("http", started.stdout.readline())
            yield started
        finally:
            started.kill()


async def test_sandbox_worker_join_a_worker_outlives_its_server_and_what_it_held_is_lost_with_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("sqlalchemy")
    if reason := missing("service"):
        pytest.skip(reason)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database = f"sqlite:///{tmp_path}/sandboxes.db"
    token = roll_sandbox("token", "create", "ann", "--scope", "run", "--scope", "worker", "--database", database)
    url = f"http://127.0.0.1:{port}"
    serve = ("serve", "--port", str(port), "--database", database, "--runtime", "none")
    join = ("worker", "--join", url, "--token", token, "--warm", "0", "--name", "worker-one")
    with process(*serve) as server, process(*join) as worker:
        async with connect(url, token, spec=SPEC, warm=0) as sandboxes:
            sandbox = None
            while sandbox is None:
                with contextlib.suppress(SandboxUnavailableError):
                    sandbox = await sandboxes.create()
            job = await sandbox.start(PythonCode(source="print(1, flush=True); input(); print(2)", interactive=True))
            async for _ in job.stream():
                break
            server.send_signal(signal.SIGKILL)
            server.wait()
            with process(*serve):
                job.end_input()
                result = await asyncio.wait_for(job.wait(), 30)
                assert result.stdout.startswith(b"1\n") and b"EOF" in result.stderr
                assert (await sandbox.execute(PythonCode(source="print(3)"))).stdout == b"3\n"
                lost = await sandbox.start(PythonCode(source="import time; time.sleep(50)"))
                os.kill(worker.pid, signal.SIGKILL)
                worker.wait()
                with process(*join), pytest.raises(SandboxLostError, match="lost"):
                    await asyncio.wait_for(lost.wait(), 30)


async def test_sandbox_worker_join_a_worker_without_a_token_is_told_where_one_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROLL_SANDBOX_TOKEN", raising=False)
    assert run(["worker", "--join", "http://127.0.0.1:1"]) == 2
    assert "roll-sandbox token create OWNER --scope worker" in capsys.readouterr().err
