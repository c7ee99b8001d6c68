"""A spawner that is killed, slow or not wanted any more: nothing of it is left, and every caller gets a clear error."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sandbox.conftest import missing, spec_for

from roll_sandbox import Command, PythonCode, SandboxError, SandboxManager, SandboxUnavailableError, agent_code
from roll_sandbox.agent.programs import StartedProgram
from roll_sandbox.agent.run import RunningProgram
from roll_sandbox.agent.termination import Terminator
from roll_sandbox.bubblewrap import BubblewrapRuntime
from roll_sandbox.spawner import SpawnerClient

pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore:The test .* is marked with")]

PIDS, FREEZER = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/freezer")
HELLO = PythonCode(source="print('hello')")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child of this process is left by a test."""
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    before = set(psutil.Process().children(recursive=True))  # other tests of the process keep some
    yield
    left = [each for each in psutil.Process().children(recursive=True) if each not in before]
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert alive == [], (gone, alive)


async def _kill_spawner(runtime: BubblewrapRuntime) -> None:
    assert runtime._spawner is not None
    os.kill(runtime._spawner._process.pid, signal.SIGKILL)
    while not runtime._spawner.is_lost:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("after", range(0, 40, 3))
async def test_sandbox_spawner_that_is_replaced_while_the_runtime_closes_is_ended(after: int) -> None:
    """Closing at each of many moments of the replacement: callers get a `SandboxError`, nothing hangs or is left."""
    runtime = BubblewrapRuntime()
    await runtime.start()
    await _kill_spawner(runtime)
    launching = [asyncio.create_task(runtime.launch(spec_for("bubblewrap"))) for _ in range(3)]
    for _ in range(after):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01 * (after // 8))
    await asyncio.wait_for(runtime.close(), 30)
    for result in await asyncio.wait_for(asyncio.gather(*launching, return_exceptions=True), 30):
        if isinstance(result, BaseException):
            assert isinstance(result, SandboxError), result
        else:
            with pytest.raises(SandboxError):
                await result.execute(HELLO)


async def test_sandbox_spawner_that_is_killed_before_the_manager_closes_leaves_none() -> None:
    sandboxes = SandboxManager("bubblewrap", spec=spec_for("bubblewrap"), warm=2)
    await sandboxes.start()
    running = [asyncio.create_task(sandboxes.execute(PythonCode(source="import time; time.sleep(30)"))) for _ in "12"]
    await asyncio.sleep(0.05)
    await _kill_spawner(sandboxes.runtime)  # type: ignore[arg-type]
    more = [asyncio.create_task(sandboxes.execute(HELLO)) for _ in "12"]
    await asyncio.sleep(0)
    await asyncio.wait_for(sandboxes.close(), 30)
    results = await asyncio.wait_for(asyncio.gather(*running, *more, return_exceptions=True), 30)
    assert all(isinstance(result, SandboxError) for result in results[:2]), results
    assert all(isinstance(result, SandboxError) or result.ok for result in results), results  # type: ignore[union-attr]


async def test_sandbox_spawner_whose_start_is_cancelled_is_ended() -> None:
    draw = random.Random(3)
    for _ in range(8):
        starting = asyncio.create_task(SpawnerClient.start())
        await asyncio.sleep(draw.uniform(0, 0.15))
        starting.cancel()
        try:
            client = await starting
        except asyncio.CancelledError:
            continue
        await client.close()


async def test_sandbox_spawner_runtime_whose_start_is_cancelled_leaves_nothing() -> None:
    draw = random.Random(4)
    for _ in range(6):
        runtime = BubblewrapRuntime()
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(draw.uniform(0, 0.4))
        starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            assert runtime._spawner is None and runtime._stderr_file is None
        else:
            await runtime.close()


async def test_sandbox_spawner_that_does_not_answer_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_sandbox.spawner.START_TIMEOUT_S", 0.3)
    monkeypatch.setattr("roll_sandbox.spawner.get_spawner_source", lambda: "import time; time.sleep(3)")
    monkeypatch.setattr("roll_sandbox.spawner.END_TIMEOUT_S", 0.1)
    with pytest.raises(SandboxUnavailableError, match=r"failed to start: it did not respond within 0\.3 s.*overloaded"):
        await SpawnerClient.start()


async def test_sandbox_spawner_that_ends_at_once_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_sandbox.spawner.get_spawner_source", lambda: "import os; os._exit(7)")
    with pytest.raises(SandboxUnavailableError, match="it exited with exit code 7"):
        await SpawnerClient.start()


async def test_sandbox_spawner_closed_runtime_refuses_a_launch_instead_of_waiting_for_ever() -> None:
    runtime = BubblewrapRuntime()
    await runtime.start()
    spawner = runtime._spawner
    assert spawner is not None
    await runtime.close()
    with pytest.raises(SandboxError, match="closed"):
        await runtime.launch(spec_for("bubblewrap"))
    with pytest.raises(SandboxError, match="not running"):
        await asyncio.wait_for(spawner.spawn(None, ["true"], [], {}, 2, 2), 5)
    await runtime.start()  # it can be started again
    await runtime.close()


async def test_sandbox_spawner_that_cannot_be_replaced_is_an_infrastructure_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = BubblewrapRuntime()
    await runtime.start()
    await _kill_spawner(runtime)
    with monkeypatch.context() as patch:
        patch.setattr("roll_sandbox.spawner.get_spawner_source", lambda: "import os; os._exit(7)")
        with pytest.raises(SandboxError, match="it exited"):
            await runtime.launch(spec_for("bubblewrap"))
    sandbox = await runtime.launch(spec_for("bubblewrap"))  # the next one is tried again
    assert (await sandbox.execute(HELLO)).ok
    await runtime.close()


async def test_sandbox_spawner_whose_zygote_was_killed_while_starting_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has a zygote")
    zygote, asked = SpawnerClient.start_zygote, 0

    async def killed_once(self: SpawnerClient, arguments: list[str], *descriptors: int) -> None:
        nonlocal asked
        asked += 1
        await zygote(self, ["/bin/false"] if asked == 1 else arguments, *descriptors)

    monkeypatch.setattr(SpawnerClient, "start_zygote", killed_once)
    runtime = BubblewrapRuntime()
    await runtime.start()
    assert asked == 2 and runtime._zygote
    sandbox = await runtime.launch(spec_for("bubblewrap"))
    assert (await sandbox.execute(HELLO)).ok
    await runtime.close()


def test_sandbox_spawner_programs_whose_last_output_reaches_the_limit_are_not_killed_again() -> None:
    """It may be read after the process was reaped: its number may be another's by then."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 2**18)
    os.write(writing, bytes(2**17))
    os.close(writing)
    os.set_blocking(reading, False)
    reporting = os.pipe()
    os.write(reporting[1], b"0 0")
    os.close(reporting[1])
    ended: list[tuple[Any, ...]] = []
    agent = SimpleNamespace(
        terminator=Terminator(),
        close_descriptor=os.close,
        unwatch=lambda _: None,
        send=lambda *_: None,
        send_end=lambda *said, **_: ended.append(said),
    )
    run = RunningProgram.__new__(RunningProgram)
    vars(run).update(
        agent=agent, channel=1, input=-1, unshown_bytes=None, killed=False, reaped=False, open={reading}, counts={}
    )
    vars(run).update(limits=[], output_left=2**16 + 1, began=0.0, cpu_used=0.0, cpu_s=None, counted_before=None)
    run.started = StartedProgram(2**22 + 1, reporting[0], {reading: "o"})  # no process can have this number
    run.report_end(0, SimpleNamespace(ru_utime=0.0, ru_stime=0.0, ru_maxrss=0))
    assert ended[0][1:4] == (0, 0, ["output"])
    assert not agent.terminator


async def _group(runtime: BubblewrapRuntime) -> Path:
    """Return the only control group of a spawner's slots that a sandbox is in, once its program has joined it."""
    assert runtime._spawner is not None
    if not runtime._spawner.facts["groups"] or not (PIDS / "cgroup.procs").exists():
        pytest.skip("no control groups of version 1 can be made here")
    name = f"roll-sandbox-{runtime._spawner._process.pid}"
    found = [Path(where) / name for where, names, _ in os.walk(PIDS) if name in names]
    while not (used := [each for each in found[0].iterdir() if each.is_dir() and len(_pids(each)) > 1]):
        await asyncio.sleep(0.01)
    (group,) = used
    return group


@pytest.mark.parametrize("zygote", [True, False])
async def test_sandbox_spawner_control_group_of_a_sandbox_is_empty_before_its_place_is_used_again(zygote: bool) -> None:
    """Also of what did not end with the sandbox's namespace: here, a process of the host that is in the group."""
    runtime = BubblewrapRuntime(zygote=zygote)
    await runtime.start()
    sandbox = await runtime.launch(spec_for("bubblewrap"))
    await sandbox.wait_until_ready()
    group = await _group(runtime)
    with subprocess.Popen(["sleep", "1000"]) as stray:
        (group / "cgroup.procs").write_text(str(stray.pid))
        await asyncio.wait_for(sandbox.close(), 10)
        assert stray.wait(0.5) == -signal.SIGKILL
    for _ in range(8):
        again = await runtime.launch(spec_for("bubblewrap"))
        assert (await again.execute(HELLO)).ok
        used = await _group(runtime)
        await again.close()
        if used == group:
            break
    else:
        pytest.fail("the place was not used again")
    await runtime.close()


async def test_sandbox_spawner_sandbox_whose_processes_do_not_end_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process outlives SIGKILL: its sandbox breaks, `close` does not wait for ever, its place is not used."""
    if not (FREEZER / "cgroup.procs").exists():
        pytest.skip("no freezer of control groups of version 1 here")
    parts = agent_code._read_sources
    short = lambda text: text.replace("_EXIT_TIMEOUT_S = 10.0", "_EXIT_TIMEOUT_S = 0.5")  # noqa: E731
    monkeypatch.setattr(agent_code, "_read_sources", lambda names: [(name, short(text)) for name, text in parts(names)])
    for made in (agent_code.get_agent_bytecode, agent_code.get_zygote_bytecode, agent_code.get_spawner_source):
        made.cache_clear()
    frozen = FREEZER / f"roll-test-{os.getpid()}"
    frozen.mkdir()
    runtime = BubblewrapRuntime()
    try:
        await runtime.start()
        sandbox = await runtime.launch(spec_for("bubblewrap"))
        job = await sandbox.start(Command(argv=("sleep", "1000")))
        group = await _group(runtime)
        while not (found := [pid for pid in _pids(group) if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]):
            await asyncio.sleep(0.01)
        (frozen / "cgroup.procs").write_text(found[0])
        (frozen / "freezer.state").write_text("FROZEN")
        job.kill()
        with pytest.raises(SandboxError, match=r"ended unexpectedly .*the processes of a program do not end"):
            await asyncio.wait_for(job.wait(), 10)
        assert sandbox.has_ended
        await asyncio.wait_for(sandbox.close(), 10)
        assert found[0] in _pids(group)
        for _ in range(6):
            other = await runtime.launch(spec_for("bubblewrap"))
            assert (await other.execute(HELLO)).ok
            await other.close()
        assert _pids(group) and (frozen / "freezer.state").read_text() == "FROZEN\n"
    finally:
        (frozen / "freezer.state").write_text("THAWED")
        await runtime.close()
        for made in (agent_code.get_agent_bytecode, agent_code.get_zygote_bytecode, agent_code.get_spawner_source):
            made.cache_clear()
        while _pids(frozen):
            await asyncio.sleep(0.01)
        frozen.rmdir()


def _pids(group: Path) -> list[str]:
    return (group / "cgroup.procs").read_text().split()
