"""Delivers a weight update to engines: each engine confirms it, fails, or times out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roll.errors import EngineDiedError, InfraError, WeightSyncError, one_line_error
from roll.protocols import InferenceEngine, SupportsPrefetch
from roll.types import WeightReceipt, WeightUpdate
from roll.weights.broadcast import build_engine_update
from roll.weights.plan import compute_total_bytes
from roll.weights.probe import find_majority_dtype
from roll.weights.quantization import find_quantized_dtype
from roll.weights.store.handle import StoreHandle

__all__ = ["Delivery", "call_with_timeout"]

T = TypeVar("T")

MIN_BYTES_PER_S = 1e8
"""Minimum tolerated rate at which an engine applies weights, from which timeouts are computed: SGLang loads them from
files."""
CANCEL_GRACE_S = 5.0
"""Time limit for the other engines to return after a broadcast has failed."""


@dataclass(slots=True)
class Delivery:
    """Delivers one weight update to engines, and records their receipts and errors."""

    policy_version: int
    timeout_s: float
    adapter: str | None = None
    receipts: dict[str, WeightReceipt] = field(default_factory=dict)
    dead_engines: dict[str, EngineDiedError] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    num_bytes: int = 0
    dtype: str = "float32"
    transport_metrics: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def copy_settings(self) -> Delivery:
        """Return a new delivery of the same version, without results, for another attempt."""
        return Delivery(policy_version=self.policy_version, timeout_s=self.timeout_s, adapter=self.adapter)

    async def prefetch(self, engines: Sequence[InferenceEngine], update: WeightUpdate) -> list[InferenceEngine]:
        """Make engines fetch an update from a store while they generate; return the engines that are alive.

        Raises:
            WeightSyncError: an engine cannot fetch the update.
        """
        handle: StoreHandle = update.handle
        begin = asyncio.get_running_loop().time()
        self.timeout_s += handle.max_fetch_s
        able = [engine for engine in engines if isinstance(engine, SupportsPrefetch)]
        calls = (
            call_with_timeout(self.timeout_s, engine, engine.prefetch_weights(update), "fetch the weights")
            for engine in able
        )
        for engine, error in zip(able, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(error, EngineDiedError):
                self.dead_engines[engine.engine_id] = error
            elif isinstance(error, Exception):
                self.errors[engine.engine_id] = error
        if self.errors:
            raise WeightSyncError("an engine cannot fetch the weights")
        self.transport_metrics = {
            **handle.compute_metrics(),
            "sync/prefetch_s": asyncio.get_running_loop().time() - begin,
        }
        return [engine for engine in engines if engine.engine_id not in self.dead_engines]

    async def deliver(self, engines: Sequence[InferenceEngine], update: WeightUpdate) -> None:
        """Send the update to all engines; return when each engine has confirmed it or failed.

        Raises:
            WeightSyncError: an engine failed during a broadcast, so the other engines cannot finish the broadcast.
        """
        self.num_bytes = compute_total_bytes(update.manifest)
        self.dtype = find_quantized_dtype(update.manifest) or find_majority_dtype(update.manifest)
        timeout_s = self.timeout_s + self.num_bytes / MIN_BYTES_PER_S
        ids = tuple(engine.engine_id for engine in engines)
        for engine in engines:
            addressed = replace(build_engine_update(update, engine.engine_id, ids), adapter=self.adapter)
            self.tasks[engine.engine_id] = asyncio.create_task(self._update(engine, addressed, timeout_s))
        together = update.transport == "broadcast"
        waiting = set(self.tasks.values())
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # The other engines wait for the failed engine in the process group, until they time out.
            if together and (self.dead_engines or self.errors):
                raise WeightSyncError("an engine failed during a broadcast")

    async def _update(self, engine: InferenceEngine, update: WeightUpdate, timeout_s: float) -> None:
        engine_id, action = engine.engine_id, f"confirm policy version {self.policy_version}"
        try:
            self.receipts[engine_id] = await call_with_timeout(timeout_s, engine, engine.update_weights(update), action)
        except EngineDiedError as error:
            self.dead_engines[engine_id] = error
        except Exception as error:
            self.errors[engine_id] = error

    async def end(self) -> None:
        """Wait until the calls to all engines have ended. Cancel late calls, and add the engines of these calls to
        `dead_engines`.
        """
        if not self.tasks:
            return
        _, late = await asyncio.wait(self.tasks.values(), timeout=CANCEL_GRACE_S)
        for engine_id, task in self.tasks.items():
            if task in late:
                task.cancel()
                cause = f"it did not end the failed weight sync of policy version {self.policy_version} in time"
                self.dead_engines[engine_id] = EngineDiedError(engine_id, cause)


async def call_with_timeout(timeout_s: float, engine: InferenceEngine, call: Coroutine[Any, Any, T], action: str) -> T:
    """Await a call to an engine, with a timeout, and return its result.

    Args:
        timeout_s: The timeout, in seconds.
        engine: The engine.
        call: The call.
        action: The action of the engine, for the message "it did not <action> within 60 s".

    Raises:
        EngineDiedError: the engine did not answer in time, or the call ended with an `InfraError`. After such an error
            the engine's weights are unknown, so the engine must be replaced like a dead one.
    """
    task = asyncio.ensure_future(call)
    try:
        # Not `asyncio.wait_for`, which waits for the canceled call to end: the call to a hung engine may never end.
        if not (await asyncio.wait({task}, timeout=timeout_s))[0]:
            raise EngineDiedError(engine.engine_id, f"it did not {action} within {timeout_s:g} s")
    finally:
        if not task.done():
            task.cancel()
    try:
        return task.result()
    except EngineDiedError:
        raise
    except InfraError as error:
        raise EngineDiedError(engine.engine_id, f"it could not {action}: {one_line_error(error)}") from error
