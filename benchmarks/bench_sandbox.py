"""Sandboxes: start to first output cold and from a warm pool, programs per second, many at once; the code reward.

    make bench NAME=sandbox [ARGS="--rounds 200 --concurrent 200"]

First output is measured at the caller, from the call to the first byte in its event loop. Cold: a new sandbox (control
group, user, namespaces, agent) for one program, with the manager running. As root it is a fork of a zygote, in the slot
that the last one has left; `growing` keeps all, so that each needs a new slot; `bwrap` is what others than root get.
Warm: from a pool of started sandboxes, one to keep (`create`) and one for a single program with namespaces of its own
(`execute`). On a machine with other work on it the figures are those of the machine, not of the sandbox: `--realtime`
gives the benchmark precedence where that is allowed.
"""

import argparse
import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable

import numpy as np
from _report import report

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier
from roll.types import Prompt, Rollout
from roll_sandbox import Command, Job, Limits, PythonCode, Sandbox, SandboxManager, SandboxSpec
from roll_sandbox.bubblewrap import BubblewrapRuntime
from roll_sandbox.system_plan import find_interpreter

HELLO = PythonCode(source="print('x', flush=True)")
SHELL = Command(argv=("/bin/sh", "-c", "echo x"))
TYPICAL = PythonCode(
    source="n = int(input())\nprint(sum(i * i for i in range(n)), sorted(str(i) for i in range(n))[-1])",
    stdin=b"1000\n",
)
"""A short program as code rewards see them."""
SPEC = SandboxSpec(limits=Limits(memory_bytes=128 * 2**20))


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--concurrent", type=int, default=200)
    parser.add_argument("--realtime", action="store_true", help="SCHED_FIFO for the benchmark and its sandboxes")
    arguments = parser.parse_args()
    if arguments.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    figures = asyncio.run(measure(arguments.rounds, arguments.concurrent))
    figures["realtime"] = float(arguments.realtime)
    figures["load_average"] = os.getloadavg()[0]
    report("sandbox", figures)


async def measure(rounds: int, concurrent: int) -> dict[str, float]:
    """All figures, by name."""
    figures = bare_python(rounds)
    async with SandboxManager(spec=SPEC, warm=0, max_sandboxes=concurrent + 8) as cold:
        figures |= await first_output("cold_python", rounds, lambda: cold.create(), HELLO)
        figures |= await first_output("cold_shell", rounds, lambda: cold.create(), SHELL)
        figures |= await at_once(cold, concurrent)
    async with SandboxManager(spec=SPEC, warm=0, max_sandboxes=rounds + 8) as cold:
        figures |= await growing(cold, rounds // 2)
    async with SandboxManager(BubblewrapRuntime(zygote=False), spec=SPEC, warm=0) as cold:
        figures |= await first_output("cold_bwrap_python", rounds // 2, lambda: cold.create(), HELLO)
        figures |= await first_output("cold_bwrap_shell", rounds // 2, lambda: cold.create(), SHELL)
    async with SandboxManager(spec=SPEC, warm=8) as warm:
        figures |= await first_output("warm_python", rounds, lambda: _refilled(warm), HELLO)
        figures |= await first_output("warm_shell", rounds, lambda: _refilled(warm), SHELL)
        figures |= await single_programs(warm, rounds)
    return figures | await code_reward(rounds)


def bare_python(rounds: int) -> dict[str, float]:
    """The same interpreter without any sandbox, for comparison: most of a cold start is its start."""
    durations = []
    for _ in range(rounds):
        begin = time.perf_counter()
        arguments = [str(find_interpreter()), "-I", "-S", "-c", "print('x')"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.read(1) == b"x"
            durations.append(time.perf_counter() - begin)
    return _percentiles("bare_python", durations)


async def _refilled(manager: SandboxManager) -> Sandbox:
    """From a pool that has had the time to fill up again."""
    while manager.health()["idle"] < 8:
        await asyncio.sleep(0.002)
    begin = time.perf_counter()
    sandbox = await manager.create()
    sandbox_waits[id(sandbox)] = begin
    return sandbox


sandbox_waits: dict[int, float] = {}
"""When the wait for the pool was over."""


async def first_output(
    name: str, rounds: int, create: Callable[[], Awaitable[Sandbox]], program: PythonCode | Command
) -> dict[str, float]:
    """From asking for a sandbox to the first byte of a program in it."""
    durations = []
    for _ in range(rounds):
        begin = time.perf_counter()
        sandbox = await create()
        begin = sandbox_waits.pop(id(sandbox), begin)
        durations.append(await _first_byte(await sandbox.start(program)) - begin)
        await sandbox.close()
    return _percentiles(name, durations)


async def growing(manager: SandboxManager, rounds: int) -> dict[str, float]:
    """First output where every sandbox is kept."""
    durations, kept = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        kept.append(await manager.create())
        durations.append(await _first_byte(await kept[-1].start(HELLO)) - begin)
    await asyncio.gather(*(sandbox.close() for sandbox in kept))
    return _percentiles("cold_growing_python", durations)


async def _first_byte(job: Job) -> float:
    moment = 0.0
    async for _ in job.stream():
        moment = time.perf_counter()
        break
    result = await job.wait()
    assert result.ok, result
    return moment


async def single_programs(manager: SandboxManager, rounds: int) -> dict[str, float]:
    """`execute` from a warm pool: the whole call, one after the other; then as many as there are cores."""
    durations = []
    for _ in range(rounds):
        begin = time.perf_counter()
        assert (await manager.execute(HELLO)).ok
        durations.append(time.perf_counter() - begin)
    gate = asyncio.Semaphore(2 * (os.cpu_count() or 1))

    async def one() -> None:
        async with gate:
            assert (await manager.execute(TYPICAL)).ok

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(5 * rounds)))
    rate = 5 * rounds / (time.perf_counter() - begin)
    return {**_percentiles("warm_execute", durations), "programs_per_s": rate}


async def at_once(manager: SandboxManager, concurrent: int) -> dict[str, float]:
    """Start many, use each while all are there, end them."""
    begin = time.perf_counter()
    sandboxes = await asyncio.gather(*(manager.create() for _ in range(concurrent)))
    results = await asyncio.gather(*(sandbox.execute(HELLO) for sandbox in sandboxes))
    held = sum(result.ok for result in results)
    took = time.perf_counter() - begin
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    return {"concurrent": float(concurrent), "concurrent_ok": float(held), "concurrent_start_s": took}


async def code_reward(rounds: int) -> dict[str, float]:
    """Answers per second through the whole code reward: one case, ten cases, and a `check` in a sandbox of its own."""
    figures: dict[str, float] = {}
    one = {"stdin": "1000\n", "stdout": str(sum(i * i for i in range(1000))) + " 999"}
    check = "def check(candidate):\n    assert [candidate(n) for n in range(5)] == [0, 1, 4, 9, 16]"
    async with CodeSandboxes(SandboxConfig()) as boxes:
        verifier = CodeVerifier(CodeReward(type="code"), boxes)
        for name, code, tests, entry, num_cases in (
            ("one_case", TYPICAL.source, [one], None, 1),
            ("ten_cases", TYPICAL.source, [one] * 10, None, 10),
            ("check", "def f(x):\n    return x * x", check, "f", 1),
        ):
            answers = [_answer(f"{name}/{i}", code, tests, entry) for i in range(rounds)]
            assert (await verifier.judge(answers[0])).correct
            begin = time.perf_counter()
            judgements = await asyncio.gather(*map(verifier.judge, answers))
            took = time.perf_counter() - begin
            assert all(judgement.correct for judgement in judgements)
            figures[f"code_{name}_answers_per_s"] = rounds / took
            figures[f"code_{name}_cases_per_s"] = num_cases * rounds / took
    return figures


def _answer(uid: str, code: str, tests: object, entry: str | None) -> Rollout:
    nothing = np.zeros(0, np.int32)
    metadata = {"tests": tests, "entry_point": entry}
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid=uid, domain="bench", messages=(), metadata=metadata),
        prompt_token_ids=nothing,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        policy_versions=nothing,
        finish_reason="stop",
        text=f"```python\n{code}\n```",
    )


def _percentiles(name: str, durations: list[float]) -> dict[str, float]:
    ordered = sorted(durations)
    at = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{key}_ms": 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * q))] for key, q in at.items()}


if __name__ == "__main__":
    main()
