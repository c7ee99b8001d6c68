"""Inference engines as Ray actors.

    controller ──► RayEngine (this process) ──► EngineActor (its own process) ──► the engine of its spec

A `RayEngine` implements the engines' protocol; an actor's death becomes `EngineDiedError`, whatever its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from roll.cluster.actor_log import log_into_the_run
from roll.cluster.ray_answers import answer
from roll.errors import EngineDiedError
from roll.inference import ENGINES, EngineSpec, build_engine, resolve_engine_kind
from roll.protocols import PauseMode, SupportsReadback
from roll.types import (
    EngineLoad,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    SequenceMedia,
    WeightReceipt,
    WeightUpdate,
)

__all__ = ["EngineActor", "RayEngine"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
REPORT_EVERY_S = 0.2
"""Interval of reports of a busy engine's load."""


class EngineActor:
    """Runs one engine on its own event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        log_into_the_run()
        self._engine = build_engine(spec)

    async def start(self) -> int:
        """Load the model; return the process id."""
        import os

        await self._engine.start()
        return os.getpid()

    async def generate(self, request: GenerationRequest) -> tuple[Generation, EngineLoad]:
        """Run a request; return the generation and the engine's load at its end."""
        return await self._engine.generate(request), self._engine.load()

    async def load(self) -> EngineLoad:
        """Return the engine's load."""
        return self._engine.load()

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Return the checksums that the engine computes with, or `None` if it cannot read its weights back."""
        return await self._engine.applied_checksums() if isinstance(self._engine, SupportsReadback) else None

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call any other method of the engine."""
        return await getattr(self._engine, name)(*arguments)


class RayEngine:
    """The controller's end of an engine; implements `InferenceEngine`."""

    def __init__(self, spec: EngineSpec, options: dict[str, Any]) -> None:
        self.engine_id = spec.engine_id
        self.pid: int | None = None
        self._spec = spec
        self._running = 0
        self._reported = EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=spec.max_num_seqs)
        self._reports: asyncio.Task[None] | None = None
        # A registered name may be known only to the controller; an import path is valid in every process.
        named = replace(spec, kind=ENGINES.path(resolve_engine_kind(spec.kind)))
        actor: Any = ray.remote(EngineActor).options(max_restarts=0, max_concurrency=4096, **options)
        self._actor: Any = actor.remote(named)

    async def _await(self, reference: Any) -> Any:
        return await answer(reference, lambda: EngineDiedError(self.engine_id, "its process ended"))

    async def start(self) -> None:
        """See `InferenceEngine`, also for all methods below."""
        self.pid = await self._await(self._actor.start.remote())
        logger.info("engine %s runs in process %s", self.engine_id, self.pid)

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
        """Poll the engine's load while it has requests."""
        with contextlib.suppress(EngineDiedError):  # waiting requests raise it themselves
            while self._running:
                self._reported = await self._await(self._actor.load.remote())
                await asyncio.sleep(REPORT_EVERY_S)

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        return await self._await(self._actor.call.remote("logprobs", list(sequences), list(media)))

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._await(self._actor.call.remote("abort", list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        await self._await(self._actor.call.remote("pause", mode))

    async def resume(self) -> None:
        await self._await(self._actor.call.remote("resume"))

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return await self._await(self._actor.call.remote("update_weights", update))

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return await self._await(self._actor.applied_checksums.remote())

    async def sleep(self) -> None:
        await self._await(self._actor.call.remote("sleep"))

    async def wake(self) -> None:
        await self._await(self._actor.call.remote("wake"))

    def load(self) -> EngineLoad:
        """Return the load: this controller's requests, with the engine's last report of its cache and steps.

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
        """Close the engine if it has started, then kill its process and the processes that it started."""
        if self._reports is not None:
            self._reports.cancel()
        try:
            if self.pid is not None:
                with contextlib.suppress(EngineDiedError, TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await self._await(self._actor.call.remote("close"))
        finally:
            ray.kill(self._actor, no_restart=True)
