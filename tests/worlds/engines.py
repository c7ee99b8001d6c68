"""Small engines for scheduler tests: a token per tick, with everything that can go wrong, under virtual time.

    call ──(on its way)──► engine: takes effect ──(on its way back)──► answer

Every call takes its time in both directions, and goes on when its caller is gone, like one to another process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from roll.errors import EngineDiedError
from roll.rollout.engine_group import EngineGroup
from roll.types import EngineLoad, Generation, GenerationRequest, WeightReceipt, WeightUpdate
from roll.weights.sync import SYNC_TIMEOUT_S

T = TypeVar("T")
CALLS = ("start", "generate", "abort", "pause", "resume", "update_weights", "applied_checksums", "sleep", "wake")


@dataclass(eq=False)
class Request:
    request: GenerationRequest
    num_tokens: int
    future: asyncio.Future[Generation]
    versions: list[int] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An engine dies or hangs the first time that it is asked for this."""

    call: str
    hangs: bool


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How a weight update arrives at an engine."""

    seconds: float = 0.0
    is_damaged: bool = False


class TickingEngine:
    """Serves all its requests at once, up to its capacity; the others wait in order.

    Args:
        engine_id: its name.
        tick_s: of a token.
        capacity: requests at once.
        length: tokens of a request's answer.
        lag: draws how long a call is on its way, in each direction.
        fault: what will go wrong.
        transfer: draws how the next weight update of an engine arrives.
        violations: gets what must never happen, in words.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        tick_s: float,
        capacity: int,
        length: Callable[[GenerationRequest], int],
        lag: Callable[[], float] = lambda: 0.0,
        fault: Fault | None = None,
        transfer: Callable[[str], Transfer] = lambda engine_id: Transfer(),
        violations: list[str] | None = None,
    ):
        self.engine_id = engine_id
        self.tick_s, self.capacity, self.length = tick_s, capacity, length
        self.lag, self.fault, self.transfer = lag, fault, transfer
        self.violations = [] if violations is None else violations
        self.version = 0
        self.live: dict[str, Request] = {}
        self.running: set[str] = set()
        self.paused = self.asleep = self.unsynced = self.dead = self.hung = False
        self.lets_go = True
        """Whether those who wait for a hung engine hear of its end."""
        self.num_ticks = 0
        self.num_refused = 0
        """Requests that came after its death."""
        self.num_offers = 0
        """Weight updates under way, from the call to its answer."""
        self._updating = self._damaged = False
        self.is_late = False
        """Whether it takes longer for a weight update than anybody waits."""
        self._released = asyncio.Event()
        self._drained: asyncio.Event | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    def copy(self, engine_id: str, fault: Fault | None = None) -> TickingEngine:
        """Build another engine of the same kind."""
        return type(self)(
            engine_id,
            tick_s=self.tick_s,
            capacity=self.capacity,
            length=self.length,
            lag=self.lag,
            fault=fault,
            transfer=self.transfer,
            violations=self.violations,
        )

    @property
    def holds_memory(self) -> bool:
        """Whether the engine occupies its devices; a hung one does until it is closed, if that can end it."""
        return not (self.dead or self.asleep or (self.hung and not self.lets_go))

    # ---- calls

    async def start(self) -> None:
        await self._remote("start", self._nothing)

    async def generate(self, request: GenerationRequest) -> Generation:
        if self.num_offers and not self.dead and not self.hung:
            self.violations.append(f"{request.request_id} goes out while {self.engine_id} gets new weights")
        self.num_refused += self.dead
        return await self._remote("generate", lambda: self._generate(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._remote("abort", lambda: self._abort(request_ids))

    async def pause(self, mode: str) -> None:
        await self._remote("pause", lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._remote("resume", self._resume)

    async def sleep(self) -> None:
        await self._remote("sleep", lambda: self._rest(asleep=True))

    async def wake(self) -> None:
        await self._remote("wake", lambda: self._rest(asleep=False))

    async def _rest(self, *, asleep: bool) -> None:
        if asleep and self.live:
            self.violations.append(f"{self.engine_id} is put to sleep with requests")
        self.asleep = asleep
        self.unsynced = True

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.num_offers += 1
        try:
            return await self._remote("update_weights", lambda: self._update(update))
        finally:
            self.num_offers -= 1

    async def applied_checksums(self) -> Mapping[str, int]:
        return await self._remote("applied_checksums", self._applied)

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=len(self.live) - len(self.running),
            kv_used=min(1.0, len(self.live) / (2 * self.capacity)),
            capacity=self.capacity,
            num_steps=self.num_ticks,
        )

    async def _remote(self, name: str, effect: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.create_task(self._served(name, effect), name=f"{self.engine_id}.{name}")
        self._serving.add(task)
        task.add_done_callback(self._end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self.hung and not self.lets_go:  # like a thread, which nobody can end
                await self._released.wait()
            raise

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._serving.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _served(self, name: str, effect: Callable[[], Awaitable[T]]) -> T:
        await self._travel()
        if self.fault is not None and self.fault.call == name:
            self.hang() if self.fault.hangs else self.die()
            self.fault = None
        await self._alive()
        result = await effect()
        await self._travel()
        await self._alive()
        return result

    async def _travel(self) -> None:
        lag = self.lag()
        if lag:
            await asyncio.sleep(lag)

    async def _alive(self) -> None:
        """A dead engine says so; from a hung one comes nothing."""
        if self.hung:
            await self._released.wait()
        if self.dead:
            raise EngineDiedError(self.engine_id, "killed")

    # ---- what they do

    async def _nothing(self) -> None:
        return None

    async def _generate(self, request: GenerationRequest) -> Generation:
        if request.request_id in self.live:
            self.violations.append(f"{request.request_id} is at {self.engine_id} already")
        if self.unsynced:
            self.violations.append(f"{request.request_id} is at {self.engine_id}, which slept and has no weights")
        if self._damaged:
            self.violations.append(f"{request.request_id} is at {self.engine_id}, whose weights arrived damaged")
        own = Request(request, min(self.length(request), request.sampling.max_new_tokens), asyncio.Future())
        self.live[request.request_id] = own
        self._start()
        return await own.future

    async def _abort(self, request_ids: Collection[str]) -> None:
        for name in request_ids:
            if name in self.live:
                self._finish(self.live[name], "abort")

    async def _pause(self, mode: str) -> None:
        if mode == "drain" and self.live:
            self._drained = asyncio.Event()
            await self._drained.wait()
            self._drained = None
        self.paused = True
        for own in list(self.live.values()):
            if mode == "abort":
                self._finish(own, "abort")
            elif own.timer is not None:
                own.timer.cancel()
        self.running.clear()

    async def _resume(self) -> None:
        self.paused = False
        self._start()

    async def _update(self, update: WeightUpdate) -> WeightReceipt:
        if self.asleep:
            self.violations.append(f"{self.engine_id} gets new weights while it sleeps")
        if self.running:
            self.violations.append(f"{self.engine_id} gets new weights while it decodes {sorted(self.running)}")
        self._updating = True
        await self._travel()
        transfer = self.transfer(self.engine_id)
        self.is_late = transfer.seconds > SYNC_TIMEOUT_S
        await asyncio.sleep(transfer.seconds)
        self.version, self._updating, self.unsynced = update.policy_version, False, False
        self._damaged = transfer.is_damaged
        checksum = -1 if transfer.is_damaged else update.policy_version
        return WeightReceipt(engine_id=self.engine_id, policy_version=self.version, checksums={"w": checksum})

    async def _applied(self) -> Mapping[str, int]:
        return {"w": self.version}

    def _start(self) -> None:
        for own in self.live.values():
            if self.paused or self.hung or len(self.running) >= self.capacity:
                return
            name = own.request.request_id
            if name not in self.running and not own.future.done():
                self.running.add(name)
                own.timer = asyncio.get_running_loop().call_later(self.tick_s, self._tick, own)

    def _tick(self, own: Request) -> None:
        if self._updating:
            self.violations.append(f"{self.engine_id} decodes while its weights change")
        if self._damaged:
            self.violations.append(f"{self.engine_id} decodes with damaged weights")
        self.num_ticks += 1
        own.versions.append(self.version)
        if len(own.versions) >= own.num_tokens:
            self._finish(own, "stop")
        else:
            own.timer = asyncio.get_running_loop().call_later(self.tick_s, self._tick, own)

    def _finish(self, own: Request, reason: str) -> None:
        if not own.future.done():
            count = len(own.versions)
            own.future.set_result(
                Generation(
                    request_id=own.request.request_id,
                    token_ids=np.ones(count, np.int32),
                    logprobs=np.zeros(count, np.float32),
                    policy_versions=np.array(own.versions, np.int32),
                    finish_reason=reason,  # type: ignore[arg-type]
                    engine_id=self.engine_id,
                )
            )
        self._leave(own)

    def _leave(self, own: Request) -> None:
        if own.timer is not None:
            own.timer.cancel()
        if self.live.get(own.request.request_id) is own:
            del self.live[own.request.request_id]
            self.running.discard(own.request.request_id)
            if self._drained is not None and not self.live:
                self._drained.set()
            self._start()

    # ---- what goes wrong

    def hang(self) -> None:
        """Nothing happens any more, and nobody hears why."""
        self.hung = True
        self._stop()

    def die(self) -> None:
        """Its process ends; those who wait for a hung one hear of it only if it lets go."""
        self.dead = True
        self._stop()
        if not self.hung or self.lets_go:
            self.release()

    def release(self) -> None:
        """Everyone who waits hears of its death."""
        self.dead = True
        for own in self.live.values():
            if not own.future.done():
                own.future.set_exception(EngineDiedError(self.engine_id, "killed"))
                own.future.exception()
        if self._drained is not None:
            self._drained.set()
        self._released.set()

    def _stop(self) -> None:
        for own in self.live.values():
            if own.timer is not None:
                own.timer.cancel()
        self.running.clear()


class TickingEngines(EngineGroup):
    """A group of them; a replaced one comes back after a while, at the first version.

    Args:
        engines: of the start.
        chance: draws how long a replacement takes.
        fault: of a fresh engine.
    """

    def __init__(
        self,
        engines: Sequence[TickingEngine],
        chance: random.Random,
        fault: Callable[[str], Fault | None] = lambda engine_id: None,
    ) -> None:
        self._engines = list(engines)
        self.all = list(engines)
        """Also those that were replaced, and those that start."""
        self._chance = chance
        self._fault = fault
        self._starting: dict[str, TickingEngine] = {}
        self._makers: dict[str, Callable[[], TickingEngine]] = {}
        """Of members that have not started yet."""
        self.stop_s: Callable[[], float] = lambda: 0.0
        """Draws how long it takes to close an engine."""
        self.is_used_by_trainer: Callable[[str], bool] = lambda engine_id: False
        """Whether a trainer occupies the devices of an engine."""
        self.is_gone: Callable[[str], bool] = lambda engine_id: False
        """Whether the node of an engine is gone, so that no other can be started there."""
        self.away: set[str] = set()
        """Engines that were put to sleep or suspended alone."""

    @property
    def engines(self) -> Sequence[TickingEngine]:
        return self._engines

    async def replace(self, engine_id: str) -> TickingEngine:
        if engine_id in self._makers:
            added = self._makers[engine_id]()
            self.all.append(added)
            await added.start()
            if self.is_gone(engine_id):
                raise EngineDiedError(engine_id, "its node is gone")
            del self._makers[engine_id]
            self._engines.append(added)
            return added
        old = next(engine for engine in self._engines if engine.engine_id == engine_id)
        if engine_id in self._starting and not self._starting[engine_id].hung:
            old.violations.append(f"{engine_id} is replaced twice at once")
        self._check_devices(engine_id, "started", old.violations)
        if engine_id in self.away:
            old.violations.append(f"{engine_id} is started although it was put to sleep or suspended")
        if not (old.dead or old.hung or old.is_late):
            old.violations.append(f"{engine_id} is replaced although it works")
        fresh = self._starting[engine_id] = old.copy(engine_id, self._fault(engine_id))
        try:
            await asyncio.sleep(self._chance.uniform(0, 5))
            old.die()
            fresh.lets_go = self._chance.random() < 0.5
            if self.is_gone(engine_id):
                raise EngineDiedError(engine_id, "its node is gone")
            self.all.append(fresh)
            try:
                await fresh.start()
            except BaseException:
                fresh.release()
                raise
            self._engines[self._engines.index(old)] = fresh
            return fresh
        finally:
            if self._starting.get(engine_id) is fresh:
                del self._starting[engine_id]

    def like(self, engine_id: str) -> TickingEngine:
        """Make a further engine of the kind that there was first."""
        return self.all[0].copy(engine_id)

    async def wake(self, engine: Any) -> None:
        self._check_devices(engine.engine_id, "woken", engine.violations)
        await super().wake(engine)

    def _check_devices(self, engine_id: str, change: str, violations: list[str]) -> None:
        if self.is_used_by_trainer(engine_id):
            violations.append(f"{engine_id} is {change} although a trainer uses its devices")

    def add(self, engine_id: str, factory: Callable[[], Any]) -> None:
        assert engine_id not in self._makers and all(each.engine_id != engine_id for each in self._engines)
        self._makers[engine_id] = factory

    async def retire(self, engine_id: str) -> None:
        self._makers.pop(engine_id, None)
        for engine in [each for each in self._engines if each.engine_id == engine_id]:
            if engine.live and not (engine.dead or engine.hung):
                engine.violations.append(f"{engine_id} is retired with requests")
            self._engines.remove(engine)
            engine.die()

    async def stop(self, engine_id: str) -> None:
        await asyncio.sleep(self.stop_s())
        for engine in self._engines:
            if engine.engine_id == engine_id:
                engine.die()

    async def close(self) -> None:
        for engine in self.all:
            engine.release()
