"""Small engines for scheduler tests: a token per tick, with everything that can go wrong, under virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.errors import EngineDiedError
from roll.types import EngineLoad, Generation, GenerationRequest


@dataclass(eq=False)
class Request:
    request: GenerationRequest
    num_tokens: int
    future: asyncio.Future[Generation]
    versions: list[int] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class TickingEngine:
    """Serves all its requests at once, up to its capacity; the others wait in order."""

    def __init__(self, engine_id: str, *, tick_s: float, capacity: int, length: Callable[[GenerationRequest], int]):
        self.engine_id = engine_id
        self.tick_s, self.capacity, self.length = tick_s, capacity, length
        self.version = 0
        self.live: dict[str, Request] = {}
        self.running: set[str] = set()
        self.paused = self.dead = False
        self.drained: asyncio.Event | None = None
        self.num_refused = 0
        """Requests that came after its death."""
        self.updating = False
        """Weights change right now."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.num_refused += self.dead
        self._check()
        assert not self.updating, "a request goes out while engines get new weights"
        assert request.request_id not in self.live, f"{request.request_id} is at {self.engine_id} already"
        own = Request(request, min(self.length(request), request.sampling.max_new_tokens), asyncio.Future())
        self.live[request.request_id] = own
        self._start()
        return await asyncio.shield(own.future)  # like a remote one, it goes on when its caller is gone: until `abort`

    def _start(self) -> None:
        for own in self.live.values():
            if self.paused or len(self.running) >= self.capacity:
                return
            name = own.request.request_id
            if name not in self.running and not own.future.done():
                self.running.add(name)
                own.timer = asyncio.get_running_loop().call_later(self.tick_s, self._tick, own)

    def _tick(self, own: Request) -> None:
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
            if self.drained is not None and not self.live:
                self.drained.set()
            self._start()

    async def abort(self, request_ids: Collection[str]) -> None:
        self._check()
        for name in request_ids:
            if name in self.live:
                self._finish(self.live[name], "abort")

    async def pause(self, mode: str) -> None:
        self._check()
        if mode == "drain" and self.live:
            self.drained = asyncio.Event()
            await self.drained.wait()
            self.drained = None
        self.paused = True
        for own in list(self.live.values()):
            if mode == "abort":
                self._finish(own, "abort")
            elif own.timer is not None:
                own.timer.cancel()
        self.running.clear()

    async def resume(self) -> None:
        self._check()
        self.paused = False
        self._start()

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=len(self.live) - len(self.running),
            kv_used=min(1.0, len(self.live) / (2 * self.capacity)),
            capacity=self.capacity,
        )

    def die(self) -> None:
        self.dead = True
        for own in list(self.live.values()):
            if not own.future.done():
                own.future.set_exception(EngineDiedError(self.engine_id, "killed"))
                own.future.exception()
            if own.timer is not None:
                own.timer.cancel()
        if self.drained is not None:
            self.drained.set()

    def _check(self) -> None:
        if self.dead:
            raise EngineDiedError(self.engine_id, "killed")


class TickingEngines:
    """A group of them; a replaced one comes back after a while, at the first version."""

    def __init__(self, engines: Sequence[TickingEngine], chance: random.Random) -> None:
        self._engines = list(engines)
        self.all = list(engines)
        """Also those that were replaced."""
        self._chance = chance

    @property
    def engines(self) -> Sequence[TickingEngine]:
        return self._engines

    async def replace(self, engine_id: str) -> TickingEngine:
        await asyncio.sleep(self._chance.uniform(0, 5))
        index = next(i for i, engine in enumerate(self._engines) if engine.engine_id == engine_id)
        old = self._engines[index]
        fresh = TickingEngine(engine_id, tick_s=old.tick_s, capacity=old.capacity, length=old.length)
        self._engines[index] = fresh
        self.all.append(fresh)
        return fresh
