"""Inference engines as Ray actors.

    controller ──► RayEngine (this process) ──► EngineActor (its own process) ──► the engine of its spec

A `RayEngine` implements `InferenceEngine`. If an actor dies for any reason, its calls raise `EngineDiedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import ray

from roll.cluster.actor_log import redirect_to_run_log
from roll.cluster.ray_answers import await_result
from roll.errors import EngineDiedError
from roll.inference import ENGINES, EngineSpec, build_engine, resolve_engine_kind
from roll.inference.step_log import MAX_SPANS
from roll.protocols import PauseMode, SupportsAdapterScoring, SupportsPrefetch, SupportsReadback
from roll.types import (
    EngineLoad,
    EngineStepSpan,
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
REPORT_INTERVAL_S = 0.2
"""Interval at which the load of a busy engine is polled."""


class EngineActor:
    """Runs one engine on its own event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        redirect_to_run_log()
        self._engine = build_engine(spec)

    async def start(self) -> int:
        """Load the model and return the process ID."""
        import os

        await self._engine.start()
        return os.getpid()

    async def generate(self, request: GenerationRequest) -> tuple[Generation, EngineLoad, list[EngineStepSpan]]:
        """Run a request; return the generation, the engine's load after it, and the steps since the last request."""
        generation = await self._engine.generate(request)
        steps: list[EngineStepSpan] = self._engine.take_steps() if hasattr(self._engine, "take_steps") else []
        return generation, self._engine.load(), steps

    async def load(self) -> EngineLoad:
        """Return the engine's load."""
        return self._engine.load()

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia, adapter: str | None
    ) -> list[FloatArray]:
        """Score sequences; only engines with adapters accept the name of one."""
        if adapter is None:
            return await self._engine.logprobs(sequences, media)
        return await cast(SupportsAdapterScoring, self._engine).logprobs(sequences, media, adapter=adapter)

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Return the checksums of the weights in use; `None` if the engine cannot read its weights back."""
        return await self._engine.applied_checksums() if isinstance(self._engine, SupportsReadback) else None

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        """Fetch new weights while requests run, if the engine supports this."""
        if isinstance(self._engine, SupportsPrefetch):
            await self._engine.prefetch_weights(update)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call any other method of the engine."""
        return await getattr(self._engine, name)(*arguments)


class RayEngine:
    """The controller's handle to an engine in an actor; implements `InferenceEngine`."""

    def __init__(self, spec: EngineSpec, options: dict[str, Any]) -> None:
        self.engine_id = spec.engine_id
        self.pid: int | None = None
        self._spec = spec
        self._running = 0
        # No steps instead of an unknown number, so that an actor that never reports is detected as hanging.
        self._reported = EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=spec.max_num_seqs, num_steps=0)
        self._reports: asyncio.Task[None] | None = None
        self._steps: deque[EngineStepSpan] = deque(maxlen=MAX_SPANS)
        # Only the controller may know a registered name, but an import path is valid in every process.
        named = replace(spec, kind=ENGINES.path(resolve_engine_kind(spec.kind)))
        actor: Any = ray.remote(EngineActor).options(max_restarts=0, max_concurrency=4096, **options)
        self._actor: Any = actor.remote(named)

    async def _await(self, reference: Any) -> Any:
        return await await_result(reference, lambda: EngineDiedError(self.engine_id, "its process ended"))

    async def start(self) -> None:
        """See `InferenceEngine.start`."""
        self.pid = await self._await(self._actor.start.remote())
        logger.info("engine %s runs in process %s", self.engine_id, self.pid)

    async def generate(self, request: GenerationRequest) -> Generation:
        self._running += 1
        if self._reports is None or self._reports.done():
            self._reports = asyncio.create_task(self._poll_load(), name=f"load-{self.engine_id}")
        try:
            generation, self._reported, steps = await self._await(self._actor.generate.remote(request))
            self._steps.extend(steps)
            return generation
        finally:
            self._running -= 1

    async def _poll_load(self) -> None:
        """Poll the engine's load, and store it, while the engine has requests."""
        # Routing calls `load` for every request, so it must not wait for the actor: reports are fetched in advance.
        with contextlib.suppress(EngineDiedError):  # the waiting requests raise it
            while self._running:
                self._reported = await self._await(self._actor.load.remote())
                await asyncio.sleep(REPORT_INTERVAL_S)

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        return await self._await(self._actor.logprobs.remote(list(sequences), list(media), adapter))

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._await(self._actor.call.remote("abort", list(request_ids)))

    async def pause(self, mode: PauseMode) -> None:
        await self._await(self._actor.call.remote("pause", mode))

    async def resume(self) -> None:
        await self._await(self._actor.call.remote("resume"))

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        return await self._await(self._actor.call.remote("update_weights", update))

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        await self._await(self._actor.prefetch_weights.remote(update))

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return await self._await(self._actor.applied_checksums.remote())

    async def sleep(self) -> None:
        await self._await(self._actor.call.remote("sleep"))

    async def wake(self) -> None:
        await self._await(self._actor.call.remote("wake"))

    def load(self) -> EngineLoad:
        """Return the load: the requests of this controller, and the cache and steps that the engine last reported.

        While requests run, the report is at most `REPORT_INTERVAL_S` plus one round trip old; afterwards it is the load
        at the end of the latest request.
        """
        capacity = self._spec.max_num_seqs
        return EngineLoad(
            num_running=min(self._running, capacity),
            num_waiting=max(0, self._running - capacity),
            kv_used=self._reported.kv_used if self._running else 0.0,
            capacity=capacity,
            kv_capacity=self._reported.kv_capacity,
            num_steps=self._reported.num_steps,
            num_preempted=self._reported.num_preempted,
        )

    def take_steps(self) -> list[EngineStepSpan]:
        """Return the spans of the engine's steps since the last call, up to the end of the latest request."""
        taken = list(self._steps)
        self._steps.clear()
        return taken

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
