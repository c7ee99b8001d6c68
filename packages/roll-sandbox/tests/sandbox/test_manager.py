"""Pools, limits on their number, and what a manager says when something is missing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from sandbox.conftest import LIMITS, agents, missing, spec_for
from sandbox.hostile import HOSTILE

from roll_sandbox import (
    Limits,
    Mount,
    Outcome,
    PythonCode,
    SandboxError,
    SandboxManager,
    SandboxSpec,
    SandboxUnavailableError,
    UntrustedCodeError,
)
from roll_sandbox.errors import ConfigError, UserError
from roll_sandbox.types import Limit

HELLO = PythonCode(source="print('hello')")


def manager(**settings: object) -> SandboxManager:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    return SandboxManager("bubblewrap", **{"spec": spec_for("bubblewrap"), "warm": 0, **settings})


def groups_and_directories(spawner: int) -> set[str]:
    """What the spawner with this pid has on the host while it runs."""
    # not `rglob`: groups of others may come and go meanwhile, which `os.walk` takes as it is
    name = f"roll-sandbox-{spawner}"
    found = {os.path.join(where, name) for where, names, _ in os.walk("/sys/fs/cgroup") if name in names}
    return found | {str(path) for path in Path("/tmp").glob(f"roll-sandbox-{spawner}")}


async def test_sandbox_manager_a_warm_sandbox_is_used_again() -> None:
    async with manager(warm=1) as sandboxes:
        for _ in range(5):
            assert (await sandboxes.execute(HELLO)).stdout == b"hello\n"
        assert sandboxes.health() == {"idle": 1, "started": 1, "failed_starts": 0, "broken": 0, "programs": 5}


async def test_sandbox_manager_pools_do_not_share_sandboxes() -> None:
    async with manager(warm=1) as sandboxes:
        await sandboxes.execute(HELLO)
        await sandboxes.execute(HELLO, spec=spec_for("bubblewrap", pool="checker"))
        assert sandboxes.health()["started"] == 2


async def test_sandbox_manager_a_created_sandbox_is_never_one_that_ran_a_program() -> None:
    async with manager(warm=1) as sandboxes:
        await sandboxes.execute(HELLO)
        async with await sandboxes.create():
            assert sandboxes.health()["started"] >= 2


async def test_sandbox_manager_at_most_max_sandboxes_exist_and_others_wait() -> None:
    async with manager(max_sandboxes=2) as sandboxes:
        first, second = await sandboxes.create(), await sandboxes.create()
        waiting = asyncio.create_task(sandboxes.create())
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        await first.close()
        third = await waiting
        await asyncio.gather(second.close(), third.close())


async def test_sandbox_manager_idle_ones_of_many_kinds_are_bounded_and_the_oldest_kind_goes_first() -> None:
    async with manager(warm=1, max_sandboxes=2) as sandboxes:
        for pool in "abcd":
            await sandboxes.execute(HELLO, spec=spec_for("bubblewrap", pool=pool))
        assert sandboxes.health()["idle"] == 2
        before = sandboxes.health()["started"]
        await sandboxes.execute(HELLO, spec=spec_for("bubblewrap", pool="d"))
        assert sandboxes.health()["started"] == before  # the latest kind was kept


async def test_sandbox_manager_an_image_is_refused_where_there_are_none() -> None:
    async with manager() as sandboxes:
        with pytest.raises(SandboxUnavailableError, match="image 'busybox'"):
            await sandboxes.execute(HELLO, spec=spec_for("bubblewrap", image="busybox"))


async def test_sandbox_manager_preloaded_modules_are_there_already() -> None:
    async with manager(warm=1, spec=spec_for("bubblewrap", preload=("decimal",))) as sandboxes:
        result = await sandboxes.execute(PythonCode(source="import sys; print('decimal' in sys.modules)"))
        assert result.stdout == b"True\n"


async def test_sandbox_manager_mounts_can_be_read_and_imported_from_but_not_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # what a mount shows must be readable for every user
    (tmp_path / "helper.py").write_text("VALUE = 7")
    spec = spec_for("bubblewrap", mounts=(Mount(source=str(tmp_path), target="/data"),), python_path=("/data",))
    source = "import helper; print(helper.VALUE)\ntry: open('/data/x', 'w')\nexcept OSError as e: print(e.strerror)"
    async with manager(spec=spec) as sandboxes:
        result = await sandboxes.execute(PythonCode(source=source))
    assert result.stdout == b"7\nRead-only file system\n"


async def test_sandbox_manager_a_missing_mount_is_named() -> None:
    async with manager() as sandboxes:
        with pytest.raises(SandboxUnavailableError, match="/no/such"):
            await sandboxes.execute(HELLO, spec=spec_for("bubblewrap", mounts=(Mount(source="/no/such", target="/x"),)))


async def test_sandbox_manager_without_bubblewrap_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        await SandboxManager("bubblewrap").start()


async def test_sandbox_manager_an_unknown_runtime_is_named() -> None:
    with pytest.raises(ConfigError, match="bubblewrap"):
        SandboxManager("bubblewrapp")


async def test_sandbox_manager_the_subprocess_runtime_refuses_untrusted_code() -> None:
    async with SandboxManager("subprocess", warm=0) as sandboxes:
        with pytest.raises(UntrustedCodeError, match="untrusted"):
            await sandboxes.execute(HELLO)
        assert issubclass(UntrustedCodeError, UserError)


async def test_sandbox_manager_a_closed_manager_says_so() -> None:
    sandboxes = manager()
    with pytest.raises(SandboxError, match="not started"):
        await sandboxes.execute(HELLO)
    assert issubclass(SandboxError, RuntimeError) and not issubclass(SandboxError, UserError)


def test_sandbox_manager_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_bytes must be positive, got 0"):
        Limits(memory_bytes=0)


async def test_sandbox_manager_without_control_groups_limits_hold_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a host gives no groups, the agent watches memory and the kernel counts processes per user."""
    from roll_sandbox import agent_code

    text = agent_code.get_spawner_source().replace("return bases if set(", "return {} if set(")
    assert text != agent_code.get_spawner_source()
    monkeypatch.setattr("roll_sandbox.spawner.get_spawner_source", lambda: text)
    async with manager() as sandboxes:
        assert sandboxes.runtime._spawner.facts["groups"] is False
        memory = await sandboxes.execute(PythonCode(source="x = []\nwhile True: x.append(bytearray(2**20))"))
        assert memory.outcome is Outcome.MEMORY
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        processes = await sandboxes.execute(PythonCode(source=bomb, wall_s=1.0))
        assert processes.outcome in (Outcome.WALL_TIME, Outcome.MEMORY)
        assert Limit.PROCESSES in processes.limits_hit
        for name in ("CPU time of children that no process waits for", "CPU time without a timer", "file locks"):
            hostile = next(each for each in HOSTILE if each.name == name)
            assert (await sandboxes.execute(hostile.program)).outcome in hostile.outcomes, name
        assert (await sandboxes.execute(HELLO)).ok


async def test_sandbox_manager_a_killed_spawner_is_replaced() -> None:
    async with manager(warm=1) as sandboxes:
        kept = await sandboxes.create()
        os.kill(sandboxes.runtime._spawner._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await kept.execute(PythonCode(source="import time; time.sleep(100)"))
        for _ in range(50):  # until its death is noticed, work may still fail: never silently
            try:
                result = await sandboxes.execute(HELLO)
                break
            except SandboxError:
                await asyncio.sleep(0.02)
        assert result.stdout == b"hello\n"


HOST = """
import asyncio, sys
from roll_sandbox import *
async def main():
    async with SandboxManager("bubblewrap", warm=2) as sandboxes:
        sandbox = await sandboxes.create()
        job = await sandbox.start(PythonCode(source="import time; time.sleep(1000)", wall_s=1000))
        program = PythonCode(source="import time; time.sleep(1000)", wall_s=1000)
        running = asyncio.create_task(sandboxes.execute(program))
        print("running", flush=True)
        await running
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_sandbox_manager_nothing_outlives_a_killed_training(number: int) -> None:
    if reason := missing("bubblewrap"):
        pytest.skip(reason)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOST)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"running\n"
        (spawner,) = psutil.Process(process.pid).children()
        below = [spawner, *spawner.children(recursive=True)]
        assert len(below) >= 5
        assert groups_and_directories(spawner.pid) or os.geteuid() != 0
        process.send_signal(number)
        process.wait(20)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
    give_up = time.monotonic() + 10
    while groups_and_directories(spawner.pid) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert groups_and_directories(spawner.pid) == set()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _leaks_after(num_executions: int) -> None:
    mounts, files = Path("/proc/self/mounts").read_text(), os.listdir("/tmp")
    descriptors = _descriptors()
    programs = [
        PythonCode(
            source="import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)\nprint(1)"
        ),
        PythonCode(source="open('/tmp/x', 'w').write('x' * 100000); print(1)", stdin=b"x" * 1000),
        PythonCode(source="import os; os.kill(os.getpid(), 9)"),
        PythonCode(source="while True: print(1)", output_bytes=1000),
    ]
    async with manager(warm=2, spec=SandboxSpec(limits=LIMITS)) as sandboxes:
        await asyncio.gather(*(sandboxes.execute(HELLO) for _ in range(2)))
        warm_descriptors, pid = _descriptors(), sandboxes.runtime._spawner._process.pid
        spawner_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        gate = asyncio.Semaphore(2)

        async def one(index: int) -> None:
            async with gate:
                await sandboxes.execute(programs[index % len(programs)])

        for start in range(0, num_executions, 500):
            await asyncio.gather(*(one(index) for index in range(start, min(start + 500, num_executions))))
        await asyncio.gather(*sandboxes._tasks)
        assert len(agents(sandboxes)) == sandboxes.health()["idle"]
        assert all(len(agent.children(recursive=True)) <= 2 for agent in agents(sandboxes))  # one child that waits
        assert _descriptors() <= warm_descriptors
        assert len(os.listdir(f"/proc/{pid}/fd")) <= spawner_descriptors
        assert sandboxes.health()["programs"] == num_executions + 2
    assert _descriptors() <= descriptors
    assert groups_and_directories(pid) == set()
    assert Path("/proc/self/mounts").read_text() == mounts
    own = f"roll-sandbox-files-{os.getpid()}-"
    assert [name for name in os.listdir("/tmp") if name not in files and name.startswith(own)] == []
    assert not psutil.pid_exists(pid)


async def test_sandbox_manager_two_hundred_executions_leak_nothing() -> None:
    await _leaks_after(200)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_sandbox_manager_ten_thousand_executions_leak_nothing() -> None:
    await _leaks_after(10_000)


async def test_sandbox_manager_fifty_sandboxes_live_at_once() -> None:
    async with manager() as sandboxes:
        kept = await asyncio.gather(*(sandboxes.create() for _ in range(50)))
        results = await asyncio.gather(
            *(each.execute(PythonCode(source=f"print({index})")) for index, each in enumerate(kept))
        )
        assert [result.stdout for result in results] == [f"{index}\n".encode() for index in range(50)]
        await asyncio.gather(*(each.close() for each in kept))


def test_sandbox_manager_importing_the_room_is_light() -> None:
    code = "import sys, roll_sandbox; print({'torch', 'pydantic', 'numpy', 'ray', 'docker'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
