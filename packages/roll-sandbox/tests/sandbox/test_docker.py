"""The docker runtime: what it says where something is missing (no engine needed), and what only containers do.

What it has in common with the others is in `test_contract.py`. Tests that need an engine skip where none answers, or
where it has no image `ROLL_TEST_IMAGE` (python:3.11-slim): docs/security.md tells how to get both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox.conftest import IMAGE, missing, spec_for, started
from sandbox.hostile import HOSTILE, Hostile

from roll_sandbox import (
    Command,
    Limit,
    Mount,
    Outcome,
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxUnavailableError,
)
from roll_sandbox.docker import DEFAULT_IMAGE, LABEL, DockerRuntime
from roll_sandbox.errors import UserError

HELLO = PythonCode(source="print('hello')")


class DockerError(Exception):
    """Stands in for the SDK's."""


class ImageNotFound(DockerError):
    """Stands in for the SDK's."""


class Container:
    """One that does not start."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.removed = False

    def attach_socket(self, params: object) -> Any:
        import socket

        ours, self.theirs = socket.socketpair()
        return ours

    def start(self) -> None:
        raise self.error

    def remove(self, force: bool) -> None:
        self.removed = force
        self.theirs.close()


def sdk(monkeypatch: pytest.MonkeyPatch, *, connects: object, creates: object = None) -> None:
    """The Docker SDK as far as the runtime uses it; an exception is raised, anything else is returned."""

    def giving(value: object) -> Any:
        def call(*_: object, **__: object) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return call

    client = types.SimpleNamespace(
        info=giving({"Architecture": "x86_64"}),
        close=giving(None),
        containers=types.SimpleNamespace(create=giving(creates), list=giving([])),
    )
    module, errors, kinds = (types.ModuleType(name) for name in ("docker", "docker.errors", "docker.types"))
    module.errors, module.types = errors, kinds  # type: ignore[attr-defined]
    module.from_env = giving(connects or client)  # type: ignore[attr-defined]
    errors.DockerException, errors.ImageNotFound = DockerError, ImageNotFound  # type: ignore[attr-defined]
    kinds.Mount = kinds.LogConfig = lambda **settings: settings  # type: ignore[attr-defined]
    for each in (module, errors, kinds):
        monkeypatch.setitem(sys.modules, each.__name__, each)


async def test_sandbox_docker_without_the_sdk_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SandboxUnavailableError, match=r"pip install 'roll-sandbox\[docker\]'"):
        await SandboxManager("docker").start()


async def test_sandbox_docker_without_an_engine_the_message_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdk(monkeypatch, connects=DockerError("no such file: /var/run/docker.sock"))
    with pytest.raises(
        SandboxUnavailableError, match=r"cannot connect to the Docker engine .*docker\.sock.*DOCKER_HOST"
    ):
        await SandboxManager("docker").start()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ImageNotFound("404"), SandboxUnavailableError, f"has no image '{DEFAULT_IMAGE}': run `docker pull"),
        (
            DockerError("bind source path does not exist: /no"),
            SandboxUnavailableError,
            "'/no' at '/x'.*Sources must exist on the engine's machine",
        ),
        (DockerError("500: no space left on device"), SandboxError, "cannot start a container.*no space"),
        (ConnectionError("reset"), SandboxError, "cannot start a container.*reset"),
    ],
)
async def test_sandbox_docker_why_no_container_is_made_is_said_to_whom_it_concerns(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    sdk(monkeypatch, connects=None, creates=error)
    async with SandboxManager("docker", warm=0) as sandboxes:
        with pytest.raises(kind, match=words):
            await sandboxes.execute(
                HELLO, spec=spec_for("docker", image=None, mounts=(Mount(source="/no", target="/x"),))
            )


async def test_sandbox_docker_a_container_that_does_not_start_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    container = Container(DockerError('exec: "python3": executable file not found in $PATH'))
    sdk(monkeypatch, connects=None, creates=container)
    async with SandboxManager("docker", warm=0) as sandboxes:
        with pytest.raises(SandboxUnavailableError, match=r"image 'mine' does not contain python3.*3\.9 or newer"):
            await sandboxes.execute(HELLO, spec=spec_for("docker", image="mine"))
    assert container.removed


def test_sandbox_docker_what_the_user_has_to_mend_is_no_infrastructure_error() -> None:
    assert issubclass(SandboxUnavailableError, UserError)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def containers() -> AsyncIterator[SandboxManager]:
    """A manager of containers, where there is an engine."""
    async for manager in started("docker", warm=1):
        yield manager


def left(manager: SandboxManager) -> list[Any]:
    """Containers of this manager that the engine knows, running or not."""
    runtime = manager.runtime
    assert isinstance(runtime, DockerRuntime) and runtime._client is not None
    label = f"{LABEL}={runtime._label}"
    return runtime._client.containers.list(all=True, filters={"label": label}, ignore_removed=True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
async def test_sandbox_docker_hostile_program_is_contained(
    containers: SandboxManager, hostile: Hostile, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("host")
    program = hostile.program
    if isinstance(program, PythonCode):
        source = program.source.replace("HOST_PORT", "9").replace("HOST_PID", str(os.getpid()))
        program = PythonCode(**{**vars(program), "source": source.replace("HOST_CANARY", str(tmp_path / "canary"))})
    result = await containers.execute(program)
    assert b"BREACH" not in result.stdout + result.result, result
    assert result.outcome in hostile.outcomes, result
    assert hostile.limits <= result.limits_hit, result
    assert hostile.says is None or hostile.says in result.stdout, result
    assert (await containers.execute(HELLO)).stdout == b"hello\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_sandbox_docker_time_of_what_left_the_program_counts(containers: SandboxManager) -> None:
    """A daemon is no descendant any more, but nothing else runs in its container."""
    source = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    while True: pass
import time; time.sleep(30)
"""
    result = await containers.execute(PythonCode(source=source, cpu_s=0.5))
    assert result.outcome is Outcome.CPU_TIME and result.wall_s < 15


@pytest.mark.asyncio(loop_scope="module")
async def test_sandbox_docker_limits_that_the_kernel_counts_are_outcomes(containers: SandboxManager) -> None:
    survived = PythonCode(
        source="import os\ntry:\n  while True:\n    if os.fork() == 0: os._exit(0)\nexcept OSError: pass"
    )
    result = await containers.execute(survived)
    assert result.ok and Limit.PROCESSES in result.limits_hit


@pytest.mark.asyncio(loop_scope="module")
async def test_sandbox_docker_a_mount_may_be_seen_at_two_places(containers: SandboxManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "word").write_text("there")
    mounts = tuple(Mount(source=str(tmp_path), target=target) for target in ("/one", "/two"))
    look = Command(argv=("bash", "-c", "cat /one/word /two/word; touch /one/x 2>&1 || true"))
    result = await containers.execute(look, spec=spec_for("docker", mounts=mounts))
    assert result.stdout.startswith(b"therethere") and b"Read-only" in result.stdout


@pytest.mark.asyncio(loop_scope="module")
async def test_sandbox_docker_missing_images_and_mounts_are_named(containers: SandboxManager) -> None:
    with pytest.raises(SandboxUnavailableError, match="no image 'roll-no-such-image'"):
        await containers.execute(HELLO, spec=spec_for("docker", image="roll-no-such-image"))
    with pytest.raises(SandboxUnavailableError, match="/no/such"):
        await containers.execute(HELLO, spec=spec_for("docker", mounts=(Mount(source="/no/such", target="/x"),)))


async def test_sandbox_docker_closing_leaves_no_container_also_of_starts_that_were_cancelled() -> None:
    async for manager in started("docker", warm=0):
        kept = await manager.create()
        for pause_s in (0.0, 0.05, 0.1, 0.2):
            task = asyncio.create_task(manager.create())
            await asyncio.wait([task], timeout=pause_s)
            task.cancel()
            await asyncio.wait([task])
        client, label = manager.runtime._client, manager.runtime._label
        await manager.close()
        assert kept.has_ended
        assert client.containers.list(all=True, filters={"label": f"{LABEL}={label}"}, ignore_removed=True) == []


def test_sandbox_docker_a_killed_manager_leaves_no_container() -> None:
    if reason := missing("docker"):
        pytest.skip(reason)
    import docker

    code = f"""
        import asyncio, sys
        from roll_sandbox import PythonCode, SandboxManager, SandboxSpec
        async def main():
            manager = SandboxManager("docker", spec=SandboxSpec(image={IMAGE!r}), warm=0)
            await manager.start()
            sandbox = await manager.create()
            await sandbox.start(PythonCode(source="import time; time.sleep(1000)"))
            print(manager.runtime._label, flush=True)
            await asyncio.sleep(1000)
        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    label = process.stdout.readline().strip()
    client = docker.from_env()

    def running() -> int:
        return len(client.containers.list(all=True, filters={"label": f"{LABEL}={label}"}, ignore_removed=True))

    assert running() == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    for each in client.containers.list(all=True, filters={"label": f"{LABEL}={label}"}, ignore_removed=True):
        try:
            each.wait(timeout=20, condition="removed")
        except docker.errors.NotFound:
            continue
    assert running() == 0


async def test_sandbox_docker_what_a_killed_process_never_started_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if reason := missing("docker"):
        pytest.skip(reason)
    import docker

    client = docker.from_env()
    left_behind = client.containers.create(IMAGE, ["true"], labels={LABEL: "of-a-killed-one"})
    async for _ in started("docker", warm=0):
        assert client.containers.get(left_behind.id).status == "created", "another process may be about to start it"
    monkeypatch.setattr("roll_sandbox.docker.STALE_AFTER_S", 0.0)
    async for _ in started("docker", warm=0):
        with pytest.raises(docker.errors.NotFound):
            client.containers.get(left_behind.id)
