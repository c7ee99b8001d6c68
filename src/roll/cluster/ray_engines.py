"""Inference engines as Ray actors.

    controller ──► RayEngine (this process) ──► EngineActor (its own process) ──► the engine of its spec

A `RayEngine` speaks the engines' protocol; an actor's death becomes `EngineDiedError`, whatever killed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from roll.cluster.actor_log import log_into_the_run
from roll.errors import EngineDiedError
from roll.inference import EngineSpec, build_engine
from roll.protocols import InferenceEngine, PauseMode, SupportsReadback
from roll.types import (
    EngineLoad,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    WeightReceipt,
    WeightUpdate,
)

__all__ = ["EngineActor", "RayEngine", "RayEngineGroup"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
REPORT_EVERY_S = 0.2
"""Between two reports of a busy engine's load."""


class EngineActor:
    """Runs one engine on its own event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        log_into_the_run()
        self._engine = build_engine(spec)

    async def start(self) -> int:
        """Load the model; returns the process id."""
        import os

        await self._engine.start()
        return os.getpid()

    async def generate(self, request: GenerationRequest) -> tuple[Generation, EngineLoad]:
        """As the engine's, and its load at the end of the request."""
        return await self._engine.generate(request), self._engine.load()

    async def load(self) -> EngineLoad:
        """As the engine's; so for all that follow."""
        return self._engine.load()

    async def logprobs(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return await self._engine.logprobs(sequences)

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._engine.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return await self._engine.update_weights(update)

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return await self._engine.applied_checksums() if isinstance(self._engine, SupportsReadback) else None

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        await self._engine.close()


class RayEngine:
    """The controller's end of an engine; implements `InferenceEngine`."""

    def __init__(self, spec: EngineSpec, options: dict[str, Any]) -> None:
        self.engine_id = spec.engine_id
        self.pid: int | None = None
        self._spec = spec
        self._running = 0
        self._reported = EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=spec.max_num_seqs)
        self._reports: asyncio.Task[None] | None = None
        self._actor: Any = ray.remote(EngineActor).options(max_restarts=0, max_concurrency=4096, **options).remote(spec)

    async def _await(self, reference: Any) -> Any:
        try:
            return await reference
        except (RayActorError, ActorDiedError, ActorUnavailableError) as error:
            raise EngineDiedError(self.engine_id, f"its process ended ({type(error).__name__})") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
                raise cause from error
            raise

    async def start(self) -> None:
        """See `InferenceEngine`; so for all that follow."""
        self.pid = await self._await(self._actor.start.remote())

    async def generate(self, request: GenerationRequest) -> Generation:
        self._running += 1
        if self._reports is None or self._reports.done():
            self._reports = asyncio.create_task(self._follow(), name=f"load-{self.engine_id}")
        try:
            generation, self._reported = await self._await(self._actor.generate.remote(request))
            return generation
        finally:
            self._running -= 1

    async def _follow(self) -> None:
        """While it has requests, ask the engine every now and then what it does."""
        with contextlib.suppress(EngineDiedError):  # those who wait for it hear of that
            while self._running:
                self._reported = await self._await(self._actor.load.remote())
                await asyncio.sleep(REPORT_EVERY_S)

    async def logprobs(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return await self._await(self._actor.logprobs.remote(list(sequences)))

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._await(self._actor.abort.remote(list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        await self._await(self._actor.pause.remote(mode))

    async def resume(self) -> None:
        await self._await(self._actor.resume.remote())

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return await self._await(self._actor.update_weights.remote(update))

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return await self._await(self._actor.applied_checksums.remote())

    async def sleep(self) -> None:
        await self._await(self._actor.sleep.remote())

    async def wake(self) -> None:
        await self._await(self._actor.wake.remote())

    def load(self) -> EngineLoad:
        """What this controller has given it, and what the engine's own scheduler said last of its cache and steps.

        A report is at most `REPORT_EVERY_S` and a round trip old, and as of the end of the latest request.
        """
        capacity = self._spec.max_num_seqs
        return EngineLoad(
            num_running=min(self._running, capacity),
            num_waiting=max(0, self._running - capacity),
            kv_used=self._reported.kv_used if self._running else 0.0,
            capacity=capacity,
            num_steps=self._reported.num_steps or 0,
        )

    async def close(self) -> None:
        """Let the engine end itself, then end its process."""
        if self._reports is not None:
            self._reports.cancel()
        with contextlib.suppress(EngineDiedError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._await(self._actor.close.remote())
        ray.kill(self._actor, no_restart=True)


class RayEngineGroup:
    """All engines; implements `EngineGroup`."""

    def __init__(self, seated: Sequence[tuple[EngineSpec, dict[str, Any]]]) -> None:
        self._seated = {spec.engine_id: (spec, options) for spec, options in seated}
        self._engines = [RayEngine(spec, options) for spec, options in seated]

    @classmethod
    async def start(cls, seated: Sequence[tuple[EngineSpec, dict[str, Any]]]) -> RayEngineGroup:
        """Start all engines at once."""
        group = cls(seated)
        try:
            await asyncio.gather(*(engine.start() for engine in group._engines))
        except BaseException:
            await group.close()
            raise
        return group

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """In the order of their specs."""
        return tuple(self._engines)

    async def replace(self, engine_id: str) -> InferenceEngine:
        """See `EngineGroup.replace`."""
        index = next(i for i, engine in enumerate(self._engines) if engine.engine_id == engine_id)
        await self._engines[index].close()
        fresh = RayEngine(*self._seated[engine_id])
        try:
            await fresh.start()
        except BaseException:
            await fresh.close()
            raise
        self._engines[index] = fresh
        logger.warning("engine %s was replaced by process %s", engine_id, fresh.pid)
        return fresh

    async def close(self) -> None:
        """End every engine."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
