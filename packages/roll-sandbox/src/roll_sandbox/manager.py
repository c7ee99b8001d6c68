"""`SandboxManager`: runs single programs in sandboxes, and creates sandboxes to keep; some are started in advance.

    execute(program) ──► an idle sandbox of this spec, or a new one ──► new namespaces and files ──► idle again
    create(spec)     ──► an unused idle sandbox of this spec, or a new one; the caller closes it
    every second     ──► start or close idle sandboxes of each spec, by a forecast of requests (`forecast.py`)

Invariants:
    - at most `max_sandboxes` are in use at the same time; further calls wait;
    - no program sees data of another program;
    - a sandbox that broke, ran out of memory or ran `MAX_RUNS_PER_SANDBOX` programs is not used again;
    - `close` leaves no process, mount, control group or file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType

from roll_sandbox.agent_sandbox import Job, Sandbox
from roll_sandbox.errors import RollSandboxError, SandboxError
from roll_sandbox.forecast import compute_max_idle, compute_target_idle, scale_to_total
from roll_sandbox.machine import count_cores, read_free_memory_bytes
from roll_sandbox.pools import REFILL_DELAY_S, Pool, PoolReport, make_pool_key
from roll_sandbox.runtime import Runtime
from roll_sandbox.runtimes import make_runtime
from roll_sandbox.types import ExecutionResult, Outcome, Program, SandboxSpec, Snapshot

__all__ = ["MAX_RUNS_PER_SANDBOX", "SandboxManager"]

MAX_RUNS_PER_SANDBOX = 1000
LAUNCH_ATTEMPTS = 2
FORECAST_WINDOW_S = 1.0
"""Seconds between two resizes of the pools."""
MAX_POOLS = 256
"""Maximum number of pools; beyond it, empty pools are dropped."""


class SandboxManager:
    """Runs programs in sandboxes, and creates sandboxes: `async with SandboxManager() as sandboxes: ...`

    Args:
        runtime: a runtime, or its name (`bubblewrap`, `docker`, `subprocess`).
        spec: default spec of `execute` and `create`, and the spec of the sandboxes that are started in advance.
        warm: number of idle sandboxes to keep per spec. With 0, every sandbox is started on request. If `None`, the
            number follows a forecast from recent requests, and is initially one sandbox of `spec` per core.
        max_sandboxes: maximum number of sandboxes in use at the same time, and also of idle sandboxes, over all specs.
    """

    def __init__(
        self,
        runtime: str | Runtime = "bubblewrap",
        *,
        spec: SandboxSpec | None = None,
        warm: int | None = None,
        max_sandboxes: int = 512,
    ) -> None:
        self.runtime: Runtime = make_runtime(runtime) if isinstance(runtime, str) else runtime
        """The isolation runtime."""
        self._spec = spec or SandboxSpec()
        self._warm = warm
        self._cores = count_cores()
        self._slots = asyncio.Semaphore(max_sandboxes)
        self._refilling = asyncio.Semaphore(self._cores)
        self._max_idle = max_sandboxes
        self._pools: dict[SandboxSpec, Pool] = {}
        self._resize_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._is_open = False

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
            SandboxUnavailableError: this machine cannot start sandboxes; the message states the reason and a remedy.
        """
        await self.runtime.start()
        self._is_open = True
        try:
            pool = self._get_pool(self.runtime.resolve(self._spec))
            pool.target = self._cores if self._warm is None else self._warm
            await asyncio.gather(*(self._start_idle_sandbox(pool) for _ in range(pool.target)))
        except BaseException:
            await self.close()
            raise
        if self._warm is None:
            pool.demand = replace(pool.demand, burst=float(pool.target))
            self._resize_task = asyncio.create_task(self._resize_pools())

    async def execute(self, program: Program, *, spec: SandboxSpec | None = None) -> ExecutionResult:
        """Run one program in its own clean environment, and return its result.

        Raises:
            SandboxError: the sandbox failed, and the program is not the cause; a retry may succeed.
            UntrustedCodeError: the runtime has no isolation, and the spec is `untrusted`.
            OversizedUploadError: the program's files or input do not fit into the sandbox.
        """
        async with self.run_interactive(program, spec=spec) as job:
            return await job.wait()

    @asynccontextmanager
    async def run_interactive(self, program: Program, *, spec: SandboxSpec | None = None) -> AsyncIterator[Job]:
        """Start an interactive program, like `execute`, and yield its job; the program is killed when the block ends.

        Raises:
            See `execute`.
        """
        spec = self.runtime.resolve(spec or self._spec)
        async with self._slots:
            sandbox, runs = await self._acquire(spec, fresh=False)
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
                keep = reusable and result.outcome is not Outcome.MEMORY and runs + 1 < MAX_RUNS_PER_SANDBOX
            except SandboxError:
                self._counts["broken"] += 1
                raise
            finally:
                pool = self._get_pool(spec)
                if keep and self._is_open and not sandbox.has_ended and len(pool.idle) < self._compute_max_idle(pool):
                    pool.idle.append((sandbox, runs + 1))
                    await self._close_excess_idle()
                else:
                    await sandbox.close()
                    self._schedule_refill(pool)

    async def create(self, spec: SandboxSpec | None = None, *, snapshot: Snapshot | None = None) -> Sandbox:
        """Create a sandbox with the files of `snapshot`, if given; the caller must close it.

        Raises:
            SandboxError: the sandbox did not start.
            UntrustedCodeError: see `execute`.
        """
        spec = self.runtime.resolve(spec or self._spec)
        await self._slots.acquire()
        try:
            sandbox, _ = await self._acquire(spec, fresh=True)
        except BaseException:
            self._slots.release()
            raise
        sandbox.on_close(self._slots.release)
        self._schedule_refill(self._get_pool(spec))
        if snapshot is not None:
            try:
                await sandbox.restore(snapshot)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _acquire(self, spec: SandboxSpec, *, fresh: bool) -> tuple[Sandbox, int]:
        """Return a sandbox and the number of programs that it has run. Use an idle sandbox if possible (if `fresh` is
        true, one that has not run a program); otherwise start a new sandbox.
        """
        if not self._is_open:
            raise SandboxError("the sandbox manager was not started, or is closed")
        pool = self._get_pool(spec)
        del self._pools[pool.key]
        self._pools[pool.key] = pool  # keeps the most recently requested pool last
        return pool.pop_idle(fresh=fresh) or (await self._launch(spec), 0)

    def _get_pool(self, spec: SandboxSpec) -> Pool:
        key = make_pool_key(spec)
        if key not in self._pools:
            # Specs come from clients, which could otherwise fill the memory with empty pools.
            if len(self._pools) >= MAX_POOLS:
                self._pools = {key: pool for key, pool in self._pools.items() if pool.idle or pool.starting}
            self._pools[key] = Pool(key, self._warm or 0, self._cores)
        return self._pools[key]

    def _compute_max_idle(self, pool: Pool) -> int:
        """Return the maximum number of idle sandboxes of a pool if used sandboxes are returned to it; further sandboxes
        are closed. With a forecast, this may be more than the pool's target.
        """
        return pool.target if self._warm is not None else max(pool.target, self._cores)

    async def _launch(self, spec: SandboxSpec) -> Sandbox:
        for attempt in range(LAUNCH_ATTEMPTS):
            try:
                sandbox = await self.runtime.launch(spec)
            except (SandboxError, OSError) as error:
                self._counts["failed_starts"] += 1
                if isinstance(error, OSError):  # of this process, perhaps its limit on open files
                    raise SandboxError(f"cannot start a sandbox: {error}") from error
                if attempt + 1 == LAUNCH_ATTEMPTS:
                    raise
            else:
                self._counts["started"] += 1
                return sandbox
        raise AssertionError("unreachable")

    def _schedule_refill(self, pool: Pool) -> None:
        """Start the missing idle sandboxes of a pool, in the background."""
        for _ in range(pool.num_missing if self._is_open else 0):
            pool.starting += 1
            task = asyncio.create_task(self._refill_after_delay(pool))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _refill_after_delay(self, pool: Pool) -> None:
        try:
            await asyncio.sleep(REFILL_DELAY_S)
            async with self._refilling:
                if len(pool.idle) < pool.target:
                    await self._start_idle_sandbox(pool)
        except RollSandboxError:  # the next request reports the error
            if self._warm is None:
                pool.reset_forecast()
        finally:
            pool.starting -= 1

    async def _start_idle_sandbox(self, pool: Pool) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sandbox = await self._launch(pool.key)
        try:
            await sandbox.wait_until_ready()
        except BaseException:
            await sandbox.close()
            raise
        pool.record_start(loop.time() - began)
        if self._is_open and len(pool.idle) < pool.target:
            pool.idle.insert(0, (sandbox, 0))
            await self._close_excess_idle()
        else:
            await sandbox.close()

    async def _close_excess_idle(self) -> None:
        """Close idle sandboxes until all pools together have at most `max_sandboxes`, starting with the least recently
        requested pool.
        """
        while sum(len(pool.idle) for pool in self._pools.values()) > self._max_idle:
            pool = next(pool for pool in self._pools.values() if pool.idle)
            sandbox, _ = pool.idle.pop(0)
            await sandbox.close()

    async def _resize_pools(self) -> None:
        """Resize the pools according to the forecast after each window, until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(FORECAST_WINDOW_S)
            for sandbox in self._resize_once(loop.time() - began):
                with contextlib.suppress(SandboxError):
                    await sandbox.close()

    def _resize_once(self, window_s: float) -> list[Sandbox]:
        """Set each pool's target after a window of `window_s`, start the missing sandboxes in the background, and
        return the surplus sandboxes, which the caller must close.
        """
        pools = self._pools
        for pool in pools.values():
            pool.end_window(window_s)
        max_idle = compute_max_idle(
            free_bytes=read_free_memory_bytes(),
            num_idle=sum(len(pool.idle) for pool in pools.values()),
            num_cores=self._cores,
            start_s=max((pool.start_s for pool in pools.values()), default=1.0),
            maximum=self._max_idle,
        )
        targets = {key: compute_target_idle(pool.demand, pool.lead_time_s, max_idle) for key, pool in pools.items()}
        gone: list[Sandbox] = []
        for key, number in scale_to_total(targets, max_idle).items():
            pools[key].target = number
            gone += pools[key].remove_surplus()
            self._schedule_refill(pools[key])
            if pools[key].is_unused:
                del pools[key]
        return gone

    def pools(self) -> list[PoolReport]:
        """Return a report of each pool, most recently requested last."""
        return [pool.make_report() for pool in self._pools.values()]

    def health(self) -> dict[str, int]:
        """Return the number of idle sandboxes, and the totals `started`, `failed_starts`, `broken` and `programs`."""
        counts = {name: self._counts[name] for name in ("started", "failed_starts", "broken", "programs")}
        return {"idle": sum(len(pool.idle) for pool in self._pools.values()), **counts}

    async def close(self) -> None:
        """End every sandbox, including sandboxes that callers still use. Calling it twice is safe."""
        self._is_open = False
        # Tasks are canceled first: a task that is starting a sandbox would add it to a pool that was already emptied.
        tasks = [*self._tasks, *([self._resize_task] if self._resize_task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle = [sandbox for pool in self._pools.values() for sandbox, _ in pool.idle]
        self._pools.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in idle))
        await self.runtime.close()
