"""Sandboxes for tests: those of bubblewrap where it works, of docker where an engine and an image are there."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from sandbox import databases

from roll_sandbox import Limits, SandboxManager, SandboxSpec, SandboxUnavailableError
from roll_sandbox.bubblewrap import BubblewrapRuntime
from roll_sandbox.remote import RemoteRuntime

postgres, new_database, database = databases.postgres, databases.new_database, databases.database

LIMITS = Limits(wall_s=20.0, memory_bytes=128 * 2**20, disk_bytes=16 * 2**20, file_size_bytes=8 * 2**20, max_files=512)
IMAGE = os.environ.get("ROLL_TEST_IMAGE", "python:3.11-slim")
"""Tests pull nothing: the image must be there."""


@functools.cache
def missing(runtime: str) -> str:
    """Why tests of this runtime cannot run here; empty if they can."""
    if runtime in ("bubblewrap", "service") and not shutil.which("bwrap"):
        return "bubblewrap is not installed (scripts/setup.sh says how)"
    if runtime == "docker":
        docker = pytest.importorskip("docker", reason="the Docker SDK is not installed")
        try:
            client = docker.from_env()
            client.images.get(IMAGE)
            client.close()
        except docker.errors.DockerException as error:
            return f"no Docker engine, or no image '{IMAGE}': {error}"
    return ""


def spec_for(runtime: str, **settings: object) -> SandboxSpec:
    return SandboxSpec(
        **{
            "limits": LIMITS,
            "trust": "trusted" if runtime == "subprocess" else "untrusted",
            "image": IMAGE if runtime == "docker" else None,
            **settings,
        }
    )


async def started(runtime: str, **settings: object) -> AsyncIterator[SandboxManager]:
    """A manager, closed at the end; skips where the runtime cannot run."""
    if reason := missing(runtime):
        pytest.skip(reason)
    manager = SandboxManager(settings.pop("instance", runtime), spec=spec_for(runtime), **settings)
    try:
        await manager.start()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield manager
    await manager.close()


@contextlib.contextmanager
def served(directory: Path, *arguments: str, address: str = "") -> Iterator[tuple[str, str]]:
    """`roll-sandbox serve` in a process of its own; its address, and a token for all scopes.

    Args:
        address: of its database, else a file in `directory`.
    """
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed")
    database = address or f"sqlite:///{directory}/sandboxes.db"
    token = roll_sandbox("token", "create", "tester", "--scope", "admin", "--scope", "worker", "--database", database)
    command = ["serve", "--port", "0", "--database", database, *arguments]
    with subprocess.Popen([*_ROLL_SANDBOX, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1], token
        finally:
            process.terminate()
            process.wait(30)


_ROLL_SANDBOX = (sys.executable, "-m", "roll_sandbox")


def roll_sandbox(*arguments: str) -> str:
    """What the command `roll-sandbox …` prints."""
    return subprocess.run([*_ROLL_SANDBOX, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["bubblewrap", "docker", "subprocess", "service"])
async def sandboxes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxManager]:
    """A manager of each runtime, and one whose sandboxes are those of a service."""
    if request.param != "service":
        async for manager in started(request.param, warm=1):
            yield manager
        return
    if reason := missing("service"):
        pytest.skip(reason)
    with served(tmp_path_factory.mktemp("service"), "--warm", "1") as (url, token):
        async for manager in started("service", warm=1, instance=RemoteRuntime(url, token)):
            yield manager


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serviced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxManager]:
    """A manager with one idle sandbox of a service."""
    if reason := missing("service"):
        pytest.skip(reason)
    with served(tmp_path_factory.mktemp("service"), "--warm", "1") as (url, token):
        async for manager in started("service", warm=1, instance=RemoteRuntime(url, token)):
            yield manager


WAYS = ["zygote", pytest.param("bwrap", marks=pytest.mark.slow)] if os.geteuid() == 0 else ["bwrap"]
"""How sandboxes are started: forked from a zygote where root may, and by bwrap."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def bubblewrap(request: pytest.FixtureRequest) -> AsyncIterator[SandboxManager]:
    """A manager with one idle sandbox."""
    runtime = BubblewrapRuntime(zygote=request.param == "zygote")
    async for manager in started("bubblewrap", warm=1, instance=runtime):
        assert runtime._zygote is (request.param == "zygote")
        yield manager


def agents(manager: SandboxManager) -> list[psutil.Process]:
    """The first process of every sandbox, as the host sees it."""
    runtime = manager.runtime
    outer = psutil.Process(runtime._spawner._process.pid).children()
    if runtime._zygote and os.geteuid() == 0:
        outer = [slot for zygote in outer for slot in zygote.children()]
    return [agent for process in outer for agent in process.children()]
