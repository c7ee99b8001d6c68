"""SandboxManager: sandboxes for one program and forget it, and sandboxes to keep; some of them started in advance.

    execute(program) ──► an idle sandbox of this spec, or a new one ──► its own namespaces and files ──► idle again
    create(spec)     ──► an idle sandbox of this spec that ran nothing yet, or a new one; the caller closes it

Invariants: at most `max_sandboxes` exist at once, further calls wait; what a program leaves behind never meets another
program; a sandbox that broke, ran out of memory or served `RUNS_PER_SANDBOX` programs is not used again; `close` leaves
no process, mount, group or file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from roll.registry import Registry
from roll.sandbox.agent_sandbox import Job, Sandbox
from roll.sandbox.errors import SandboxError
from roll.sandbox.runtime import Runtime
from roll.sandbox.types import ExecutionResult, Outcome, Program, SandboxSpec, Snapshot

__all__ = ["RUNS_PER_SANDBOX", "RUNTIMES", "SandboxManager"]

RUNTIMES: Registry[type[Runtime]] = Registry(
    "sandbox runtime",
    {
        "bubblewrap": "roll.sandbox.bubblewrap:BubblewrapRuntime",
        "docker": "roll.sandbox.docker:DockerRuntime",
        "subprocess": "roll.sandbox.subprocess_runtime:SubprocessRuntime",
    },
)

RUNS_PER_SANDBOX = 1000
LAUNCH_ATTEMPTS = 2
REFILL_AFTER_S = 0.01
"""The sandbox that was just taken goes first: starting another would compete with its program for the cores."""


class SandboxManager:
    """See the module. `async with SandboxManager() as sandboxes: ...`

    Args:
        runtime: its name (`bubblewrap`, `docker`, `subprocess`) or the runtime itself.
        spec: the kind of sandbox where a call names none; the kind that is started in advance.
        warm: how many idle sandboxes to keep, per spec; 0 starts each when it is asked for.
        max_sandboxes: how many may be in use at once, and how many may be idle, of all specs together.
    """

    def __init__(
        self,
        runtime: str | Runtime = "bubblewrap",
        *,
        spec: SandboxSpec | None = None,
        warm: int | None = None,
        max_sandboxes: int = 512,
    ) -> None:
        self.runtime: Runtime = RUNTIMES.get(runtime)() if isinstance(runtime, str) else runtime
        """What isolates."""
        self._spec = spec or SandboxSpec()
        self._warm = (os.cpu_count() or 1) if warm is None else warm
        self._places = asyncio.Semaphore(max_sandboxes)
        self._max_idle = max_sandboxes
        self._idle: defaultdict[SandboxSpec, list[tuple[Sandbox, int]]] = defaultdict(list)
        self._starting: Counter[SandboxSpec] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._open = False

    async def __aenter__(self) -> SandboxManager:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the runtime and the first idle sandboxes.

        Raises:
            SandboxUnavailableError: this machine cannot; the message says why and what to do.
        """
        await self.runtime.start()
        self._open = True
        try:
            spec = self.runtime.resolve(self._spec)
            await asyncio.gather(*(self._fill(spec) for _ in range(self._warm)))
        except BaseException:
            await self.close()
            raise

    async def execute(self, program: Program, *, spec: SandboxSpec | None = None) -> ExecutionResult:
        """Run one program where nothing else runs or ran.

        Raises:
            SandboxError: the sandbox broke: not the program's doing; may be tried again.
            UntrustedCodeError: the runtime has no isolation and the spec says `untrusted`.
            OversizedUploadError: the program's files or input do not fit into such a sandbox.
        """
        async with self.running(program, spec=spec) as job:
            return await job.wait()

    @asynccontextmanager
    async def running(self, program: Program, *, spec: SandboxSpec | None = None) -> AsyncIterator[Job]:
        """The same for a program to talk to: it runs until it ends by itself, or the block does.

        Raises:
            As `execute`.
        """
        spec = self.runtime.resolve(spec or self._spec)
        async with self._places:
            sandbox, runs = await self._take(spec, fresh=False)
            reusable = self.runtime.fresh_programs
            keep = False
            try:
                job = await sandbox.start_fresh(program)
                try:
                    yield job
                finally:
                    if not job.done():
                        job.kill()
                result = await job.wait()
                self._counts["programs"] += 1
                keep = reusable and result.outcome is not Outcome.MEMORY and runs + 1 < RUNS_PER_SANDBOX
            except SandboxError:
                self._counts["broken"] += 1
                raise
            finally:
                if keep and self._open and not sandbox.broken and len(self._idle[spec]) < self._warm:
                    self._idle[spec].append((sandbox, runs + 1))
                    await self._trim()
                else:
                    await sandbox.close()
                    self._refill(spec)

    async def create(self, spec: SandboxSpec | None = None, *, snapshot: Snapshot | None = None) -> Sandbox:
        """A sandbox of one's own, with the files of `snapshot` if given. Close it.

        Raises:
            SandboxError: it did not start.
            UntrustedCodeError: see `execute`.
        """
        spec = self.runtime.resolve(spec or self._spec)
        await self._places.acquire()
        try:
            sandbox, _ = await self._take(spec, fresh=True)
        except BaseException:
            self._places.release()
            raise
        sandbox.on_close(self._places.release)
        self._refill(spec)
        if snapshot is not None:
            try:
                await sandbox.restore(snapshot)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _take(self, spec: SandboxSpec, *, fresh: bool) -> tuple[Sandbox, int]:
        """An idle sandbox (unused, if `fresh`), or a new one."""
        if not self._open:
            raise SandboxError("the sandbox manager was not started, or is closed")
        idle = self._idle[spec] = self._idle.pop(spec, [])  # the kind that was wanted last is the last one
        for index in range(len(idle) - 1, -1, -1):
            if idle[index][0].broken:
                del idle[index]
            elif not fresh or idle[index][1] == 0:
                return idle.pop(index)
        return await self._launch(spec), 0

    async def _launch(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(LAUNCH_ATTEMPTS):
            try:
                sandbox = await self.runtime.launch(spec)
            except SandboxError:
                self._counts["failed_starts"] += 1
                if attempt + 1 == LAUNCH_ATTEMPTS:
                    raise
            else:
                self._counts["started"] += 1
                return sandbox
        raise AssertionError("unreachable")

    def _refill(self, spec: SandboxSpec) -> None:
        """In the background, bring the idle ones of this spec back to their number."""
        if self._open and len(self._idle[spec]) + self._starting[spec] < self._warm:
            self._starting[spec] += 1
            task = asyncio.create_task(self._fill_quietly(spec))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fill_quietly(self, spec: SandboxSpec) -> None:
        try:
            await asyncio.sleep(REFILL_AFTER_S)
            with contextlib.suppress(SandboxError):  # whoever needs the next one is told
                await self._fill(spec)
        finally:
            self._starting[spec] -= 1

    async def _fill(self, spec: SandboxSpec) -> None:
        sandbox = await self._launch(spec)
        try:
            await sandbox.ready()
        except BaseException:
            await sandbox.close()
            raise
        if self._open and len(self._idle[spec]) < self._warm:
            self._idle[spec].insert(0, (sandbox, 0))
            await self._trim()
        else:
            await sandbox.close()

    async def _trim(self) -> None:
        """Close idle ones beyond the bound, of the kind first that was wanted least lately."""
        while sum(map(len, self._idle.values())) > self._max_idle:
            spec = next(iter(self._idle))
            if self._idle[spec]:
                sandbox, _ = self._idle[spec].pop(0)
                await sandbox.close()
            else:
                del self._idle[spec]

    def health(self) -> dict[str, int]:
        """Counts: `idle` now; since the start `started`, `failed_starts`, `broken` sandboxes and `programs` run."""
        counts = {name: self._counts[name] for name in ("started", "failed_starts", "broken", "programs")}
        return {"idle": sum(map(len, self._idle.values())), **counts}

    async def close(self) -> None:
        """End every sandbox, also those that callers have; may be called twice."""
        self._open = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        idle = [sandbox for entries in self._idle.values() for sandbox, _ in entries]
        self._idle.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in idle))
        await self.runtime.close()
