"""Sandboxes through a service, beside those of this process: start to first output, starts per second, many at once.

    make bench NAME=sandbox-service [ARGS="--rounds 200 --concurrent 1000"]

A real `roll sandbox serve` with a SQLite database, one client in this process. Rounds of both sides alternate, so that
what else the machine does meets both. Cold: `create` and the first byte of a program in it, nothing started in advance.
Warm: a sandbox that the client holds (`execute` of a manager with an idle one). Concurrent starts are those of ROCK's
published load test, whose P50 and P99 at 1,000 are 4.93 s and 8.69 s on a cluster.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import psutil
from _report import report

from roll_sandbox import Job, Limits, PythonCode, SandboxManager, SandboxSpec, connect

HELLO = PythonCode(source="print('x', flush=True)")
SPEC = SandboxSpec(limits=Limits(memory_bytes=128 * 2**20, wall_s=120.0))
ROLL_SANDBOX = [sys.executable, "-c", "from roll_rl import main; main()", "sandbox"]


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--starts", type=int, default=1000, help="for starts per second")
    parser.add_argument("--concurrent", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, served(directory) as (url, token, pid):
        figures = asyncio.run(measure(url, token, pid, arguments))
    report("sandbox_service", {**figures, "load_average": os.getloadavg()[0]})


@contextlib.contextmanager
def served(directory: str) -> Iterator[tuple[str, str, int]]:
    """A service without anything started in advance: its address, a token, its process."""
    database = ["--database", f"sqlite:///{directory}/sandboxes.db"]
    made = subprocess.run([*ROLL_SANDBOX, "token", "create", "bench", *database], check=True, capture_output=True)
    serve = ["serve", "--port", "0", "--warm", "0", "--max-sandboxes", "4096", "--owner-sandboxes", "4096", *database]
    with subprocess.Popen([*ROLL_SANDBOX, *serve], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], made.stdout.decode().strip(), process.pid
        finally:
            process.terminate()


async def measure(url: str, token: str, pid: int, arguments: argparse.Namespace) -> dict[str, float]:
    """All figures, by name."""
    rounds = arguments.rounds
    async with (
        SandboxManager(spec=SPEC, warm=1) as local,
        connect(url, token, spec=SPEC, warm=1) as remote,
        connect(url, token, spec=SPEC, warm=0, max_sandboxes=4096) as cold,
        SandboxManager(spec=SPEC, warm=0) as local_cold,
    ):
        durations: dict[str, list[float]] = {"local_warm": [], "warm": [], "local_cold": [], "cold": []}
        for _ in range(rounds):
            durations["local_warm"].append(await warm_start(local))
            durations["warm"].append(await warm_start(remote))
            durations["local_cold"].append(await cold_start(local_cold))
            durations["cold"].append(await cold_start(cold))
        figures = {}
        for name, values in durations.items():
            figures |= percentiles(name, values)
        figures |= await starts(cold, arguments.starts)
        return figures | await at_once(cold, arguments.concurrent, pid)


async def warm_start(manager: SandboxManager) -> float:
    """To the first byte, in an idle sandbox."""
    begin = time.perf_counter()
    async with manager.run_interactive(HELLO) as job:
        return await first_byte(job) - begin


async def cold_start(manager: SandboxManager) -> float:
    """To the first byte, in a new one."""
    begin = time.perf_counter()
    async with await manager.create() as sandbox:
        return await first_byte(await sandbox.start(HELLO)) - begin


async def first_byte(job: Job) -> float:
    """The moment of it."""
    moment = 0.0
    async for _ in job.stream():
        moment = time.perf_counter()
        break
    assert (await job.wait()).ok
    return moment


async def starts(manager: SandboxManager, number: int) -> dict[str, float]:
    """A program each in a new sandbox, 16 at a time."""
    gate = asyncio.Semaphore(16)

    async def one() -> None:
        async with gate:
            await cold_start(manager)

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(number)))
    return {"starts_per_s": number / (time.perf_counter() - begin)}


async def at_once(manager: SandboxManager, number: int, pid: int) -> dict[str, float]:
    """All asked for in one moment, all kept; memory of the service and of all that it started, for each."""
    before = memory_bytes(pid)
    begin = time.perf_counter()
    kept, durations = [], []

    async def one() -> None:
        sandbox = await manager.create()
        kept.append(sandbox)
        durations.append(await first_byte(await sandbox.start(HELLO)) - begin)

    await asyncio.gather(*(one() for _ in range(number)))
    held = (memory_bytes(pid) - before) / number
    assert len(kept) == number
    await asyncio.gather(*(sandbox.close() for sandbox in kept))
    return {**percentiles("concurrent", durations), "concurrent": float(number), "idle_bytes_each": held}


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


def percentiles(name: str, durations: list[float]) -> dict[str, float]:
    """Seconds."""
    return {f"{name}_p50_s": float(np.percentile(durations, 50)), f"{name}_p99_s": float(np.percentile(durations, 99))}


if __name__ == "__main__":
    main()
