"""Sandboxes for code that is not asynchronous, of a service that is running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox.conftest import LIMITS, missing, served

from roll_sandbox import (
    Command,
    PythonCode,
    SandboxError,
    SandboxPathError,
    SandboxSpec,
    SandboxUnavailableError,
    SyncSandboxes,
    connect_sync,
)
from roll_sandbox.sync import _LoopThread


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncSandboxes]:
    if reason := missing("service"):
        pytest.skip(reason)
    with (
        served(tmp_path_factory.mktemp("service"), "--warm", "0") as (url, token),
        connect_sync(url, token, spec=SandboxSpec(limits=LIMITS), warm=0) as sandboxes,
    ):
        yield sandboxes


def test_sandbox_sync_client_programs_files_sessions_and_snapshots_as_with_the_asynchronous_client(
    sandboxes: SyncSandboxes,
) -> None:
    assert sandboxes.execute(PythonCode(source="print(6 * 7)")).stdout == b"42\n"
    with sandboxes.create() as sandbox:
        sandbox.write_file("a/b", b"\x00\xff")
        assert sandbox.read_file("a/b") == b"\x00\xff"
        with pytest.raises(SandboxPathError):
            sandbox.read_file("none")
        session = sandbox.session(env={"X": "1"})
        session.run("cd a; Y=2")
        assert session.run("echo $X$Y; ls").stdout == b"12\nb\n"
        session.close()
        with sandboxes.create() as other:
            other.restore(sandbox.snapshot())
            assert other.read_file("a/b") == b"\x00\xff"
    assert sandbox.has_ended and sandbox.broken  # the former name


def test_sandbox_sync_client_a_program_can_be_talked_to_and_its_output_comes_as_it_is_made(
    sandboxes: SyncSandboxes,
) -> None:
    with sandboxes.run_interactive(Command(argv=("cat",), interactive=True)) as job:
        pieces = job.stream()
        job.write(b"one")
        assert next(pieces).data == b"one"
        job.end_input()
        assert [piece.data for piece in pieces] == []
        assert job.wait().ok
    with sandboxes.run_interactive(PythonCode(source="import time; time.sleep(60)")) as job:
        assert not job.done()


def test_sandbox_sync_client_it_works_where_a_loop_is_running_as_in_a_notebook(sandboxes: SyncSandboxes) -> None:
    async def cell() -> bytes:
        return sandboxes.execute(PythonCode(source="print('in a loop')")).stdout

    assert asyncio.run(cell()) == b"in a loop\n"


def test_sandbox_sync_client_an_interrupt_ends_the_program_and_the_client_goes_on(sandboxes: SyncSandboxes) -> None:
    with sandboxes.create() as sandbox:
        job = sandbox.start(Command(argv=("sh", "-c", "echo $$; exec sleep 60"), wall_s=90.0))
        next(job.stream())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sandbox.execute(Command(argv=("sh", "-c", "touch ran; exec sleep 61"), wall_s=90.0))
        gone = "import glob\nprint(any('61' in open(path).read() for path in glob.glob('/proc/[0-9]*/cmdline')))"
        for _ in range(100):
            if sandbox.execute(PythonCode(source=gone)).stdout == b"False\n":
                break
        else:
            pytest.fail("the program that was interrupted still runs")
        assert not job.done()


def test_sandbox_sync_client_an_interrupt_that_does_not_end_the_wait_is_seen_nevertheless() -> None:
    late = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)  # to this thread, not to who waits
        await asyncio.sleep(20)
        late.append(True)

    loop = _LoopThread()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    loop.close()
    assert not late


def test_sandbox_sync_client_nothing_is_left_of_a_client_that_could_not_start_or_has_ended() -> None:
    before = set(threading.enumerate())
    with (
        pytest.raises(SandboxUnavailableError, match="cannot reach a sandbox service"),
        connect_sync("http://[::1]:9", "x"),
    ):
        pass
    assert set(threading.enumerate()) <= before


def test_sandbox_sync_client_a_client_that_has_ended_says_so(sandboxes: SyncSandboxes) -> None:
    closed = SyncSandboxes(sandboxes._make)
    with closed:
        pass
    with pytest.raises(SandboxError, match="closed"):
        closed.execute(PythonCode(source="1"))


def test_sandbox_sync_client_importing_sandboxes_imports_no_http_client(tmp_path: Path) -> None:
    source = (
        "import sys, roll_sandbox; print(*sorted({'aiohttp', 'fastapi', 'sqlalchemy', 'torch'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.split() == []
