"""However a sandbox and a program in it were started, it is confined alike, and knows nothing of others."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from sandbox.conftest import agents, spec_for, started
from sandbox.hostile import HOSTILE

from roll_sandbox import Command, Mount, Outcome, PythonCode, SandboxError, SandboxManager
from roll_sandbox.bubblewrap import BubblewrapRuntime

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes are forked from a zygote for root only"),
]

LOOK = """
import json, os, resource, signal, socket, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
words = "Umask Uid Gid Groups NSpid NSsid CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters"
found = {name: status[name] for name in (words + " SigBlk SigIgn SigCgt Threads").split()}
for name in ("uid_map", "gid_map"):
    inside, _, count = open(f"/proc/self/{name}").read().split()
    found[name] = inside, count
found["setgroups"] = open("/proc/self/setgroups").read()
mounts = [line.split() for line in open("/proc/self/mountinfo")]
found["mounts"] = sorted((fields[4], sorted(fields[5].split(","))) for fields in mounts)
found["cgroup"] = sorted(line.strip().split(":")[2] for line in open("/proc/self/cgroup"))
found["oom"] = open("/proc/self/oom_score_adj").read()
found["limits"] = open("/proc/self/limits").read()
names = [f"/proc/self/fd/{name}" for name in sorted(os.listdir("/proc/self/fd"))]
found["descriptors"] = {name: os.readlink(name).split(":")[0] for name in names if os.path.lexists(name)}
found["processes"] = [name for name in os.listdir("/proc") if name.isdigit()]
found["root"], found["dev"], found["etc"] = (sorted(os.listdir(path)) for path in ("/", "/dev", "/etc"))
found["who"] = os.getpid(), os.getppid(), os.getsid(0), os.getcwd(), socket.gethostname()
found["environment"] = dict(os.environ)
found["python"] = sys.executable, sys.argv, sys.path, repr(sys.flags), sorted(sys.modules), sys.getrecursionlimit()
found["depth"] = 0
frame = sys._getframe()
while frame := frame.f_back: found["depth"] += 1
server = socket.create_server(("127.0.0.1", 0))
found["loopback"] = socket.create_connection(server.getsockname()).getpeername()[0]
found["devices"] = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
print(json.dumps(found))
"""
DIRECT = LOOK + "#" * (1 << 20)
"""Too long for a child that waits: a new fork runs it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forked() -> AsyncIterator[SandboxManager]:
    """Sandboxes from a zygote."""
    async for manager in started("bubblewrap", warm=1, instance=BubblewrapRuntime()):
        yield manager


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wrapped() -> AsyncIterator[SandboxManager]:
    """Sandboxes of bwrap."""
    async for manager in started("bubblewrap", warm=1, instance=BubblewrapRuntime(zygote=False)):
        yield manager


async def _seen(manager: SandboxManager, source: str, *, kept: bool) -> dict[str, Any]:
    program = PythonCode(source=source)
    if kept:
        async with await manager.create() as sandbox:
            result = await sandbox.execute(program)
    else:
        result = await manager.execute(program)
    assert result.ok, result.stderr
    found = json.loads(result.stdout)
    if kept:  # a child that waited in vain has had a number, and may still be about to end
        for name in ("processes", "who", "NSpid", "NSsid"):
            del found[name]
    return found


@pytest.mark.parametrize("kept", [False, True])
async def test_sandbox_isolation_a_program_sees_the_same_in_a_sandbox_of_the_zygote_as_in_one_of_bwrap(
    forked: SandboxManager, wrapped: SandboxManager, kept: bool
) -> None:
    for source in (LOOK, DIRECT):
        ours, theirs = [await _seen(manager, source, kept=kept) for manager in (forked, wrapped)]
        assert ours == theirs
        assert ours["CapBnd"] == ours["CapEff"] == "0" * 16
        assert set(ours["cgroup"]) == {"/"}
        assert all(
            "ro" in options or point in ("/proc", "/home", "/tmp", "/dev/shm") for point, options in ours["mounts"]
        )
        assert all("nosuid" in options for _, options in ours["mounts"])


async def test_sandbox_isolation_a_child_that_waited_runs_a_program_as_a_new_one_does(forked: SandboxManager) -> None:
    await forked.execute(PythonCode(source=""))  # from now on, a child waits in this sandbox
    waited, new = [await _seen(forked, source, kept=False) for source in (LOOK, DIRECT)]
    assert waited == new


def _outside(agent: psutil.Process) -> dict[str, Any]:
    directory = Path(f"/proc/{agent.pid}")
    status = dict(line.split(":\t", 1) for line in (directory / "status").read_text().splitlines() if ":\t" in line)
    return {
        "status": {name: status[name] for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Groups", "Threads")},
        "gains": {status[name] for name in ("CapInh", "CapAmb")},
        "users": set(status["Uid"].split() + status["Gid"].split()),
        "namespaces": {entry.name: os.readlink(entry) for entry in (directory / "ns").iterdir()},
        "files": {re.sub(r"[:\d].*", "", os.readlink(entry)) for entry in (directory / "fd").iterdir()},
        "environment": {entry.split(b"=")[0] for entry in (directory / "environ").read_bytes().split(b"\0")},
    }


async def test_sandbox_isolation_an_agent_from_the_zygote_keeps_no_more_than_one_of_bwrap(
    forked: SandboxManager, wrapped: SandboxManager
) -> None:
    ours, theirs = [_outside(agents(manager)[0]) for manager in (forked, wrapped)]
    assert ours["status"] == theirs["status"]
    assert ours["status"]["CapEff"] == f"{1 << 8 | 1 << 12 | 1 << 21:016x}"
    assert ours["gains"] == {"0" * 16}
    assert len(ours["users"]) == 1 and "0" not in ours["users"]
    assert ours["files"] <= theirs["files"] | {"/proc/locks"}  # which an agent reads for a moment, now and then
    assert ours["environment"] == theirs["environment"] - {b"PWD"}
    here = {entry.name: os.readlink(entry) for entry in Path("/proc/self/ns").iterdir()}
    for own in (ours, theirs):
        shared = {name for name in here if own["namespaces"][name] == here[name]}
        assert shared <= {"time", "time_for_children"}


async def test_sandbox_isolation_a_slot_has_left_the_privileges_of_root(forked: SandboxManager) -> None:
    for agent in agents(forked):
        status = Path(f"/proc/{agent.ppid()}/status").read_text()
        assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
        assert "Groups:\t \n" in status and "Uid:\t0" not in status


async def _first_agents(manager: SandboxManager) -> list[psutil.Process]:
    """The agents, as soon as there is one to be seen: on a busy machine that may be a moment later."""
    for _ in range(500):
        if found := agents(manager):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("no agent was seen in 10 s")


async def test_sandbox_isolation_a_sandbox_started_where_another_was_finds_nothing_of_it() -> None:
    """The zygote and the slot that both were forked from have not heard of what the first was given."""
    secret = f"CANARY-{secrets.token_hex(16)}"
    search = next(each.program for each in HOSTILE if each.name == "searching the memory")
    async for manager in started("bubblewrap", warm=0, instance=BubblewrapRuntime()):
        async with await manager.create(spec_for("bubblewrap", pool="checker")) as sandbox:
            slot = (await _first_agents(manager))[0].ppid()
            told = PythonCode(source=f"print({secret!r})", stdin=secret.encode(), env={"WORD": secret}, argv=(secret,))
            assert secret.encode() in (await sandbox.execute(told)).stdout
        async with await manager.create() as sandbox:
            assert (await _first_agents(manager))[0].ppid() == slot
            assert (await sandbox.execute(search)).stdout == b"searched\n"


async def test_sandbox_isolation_a_killed_slot_ends_its_sandbox_and_no_other() -> None:
    async for manager in started("bubblewrap", warm=0, instance=BubblewrapRuntime()):
        async with await manager.create() as sandbox:
            assert (await sandbox.execute(PythonCode(source="print(0)"))).ok  # now its processes are what they will be
            (agent,) = await _first_agents(manager)
            async with await manager.create() as other:
                agent.parent().kill()
                with pytest.raises(SandboxError):
                    await sandbox.execute(PythonCode(source="import time; time.sleep(1000)"))
                assert (await other.execute(PythonCode(source="print(1)"))).ok
        assert (await manager.execute(PythonCode(source="print(2)"))).stdout == b"2\n"


async def test_sandbox_isolation_a_killed_zygote_is_replaced() -> None:
    async for manager in started("bubblewrap", warm=1, instance=BubblewrapRuntime()):
        (zygote,) = psutil.Process(manager.runtime._spawner._process.pid).children()
        below = zygote.children(recursive=True)
        zygote.kill()
        for _ in range(200):  # until its death is noticed, work may still fail: never silently
            try:
                result = await manager.execute(PythonCode(source="print(1)"))
                break
            except SandboxError:
                await asyncio.sleep(0.02)
        assert result.stdout == b"1\n"
        assert psutil.wait_procs(below, timeout=10)[1] == []


async def test_sandbox_isolation_the_first_program_of_a_kept_sandbox_meets_no_waiting_child(
    forked: SandboxManager,
) -> None:
    async with await forked.create() as sandbox:
        for _ in range(2):
            result = await sandbox.execute(Command(argv=("bash", "-c", "echo /proc/[0-9]*")))
            assert (result.outcome, len(result.stdout.split())) == (Outcome.EXITED, 2), result


async def test_sandbox_isolation_mounts_do_not_tell_where_they_are_on_the_host(
    forked: SandboxManager, wrapped: SandboxManager, tmp_path: Path
) -> None:
    source = tmp_path / "secret-project"
    (source / "deeper").mkdir(parents=True)
    (source / "deeper" / "module.py").write_text("found = 42")
    for above in (source, *source.parents[:-1]):
        above.chmod(above.stat().st_mode | 0o555)
    spec = spec_for("bubblewrap", mounts=(Mount(source=str(source), target="/opt/mine"),), python_path=("/opt/mine",))
    look = """
from deeper import module
print(module.found, open("/proc/self/mountinfo").read())
open("/opt/mine/x", "w")
"""
    for manager in (forked, wrapped):
        result = await manager.execute(PythonCode(source=look), spec=spec)
        assert result.stdout.startswith(b"42 ") and b" /opt/mine " in result.stdout, result
        assert b"secret-project" not in result.stdout and b"Read-only file system" in result.stderr, result
