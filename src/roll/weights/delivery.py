"""Delivery of one offer of weights to engines: each engine confirms it, fails, or times out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from roll.errors import EngineDiedError, WeightSyncError
from roll.protocols import InferenceEngine
from roll.types import WeightReceipt, WeightUpdate
from roll.weights.broadcast import address_offer
from roll.weights.plan import total_bytes
from roll.weights.probe import majority_dtype
from roll.weights.quantization import quantized_dtype

__all__ = ["Delivery", "call_with_timeout"]

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
"""Time that the other engines have to notice a failed broadcast."""


@dataclass(slots=True)
class Delivery:
    """The delivery of one offer to some engines."""

    policy_version: int
    timeout_s: float
    adapter: str | None = None
    receipts: dict[str, WeightReceipt] = field(default_factory=dict)
    dead: dict[str, EngineDiedError] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    num_bytes: int = 0
    dtype: str = "float32"
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def deliver(self, engines: Sequence[InferenceEngine], update: WeightUpdate) -> None:
        """Deliver the offer to all engines; return when each has confirmed or failed.

        Raises:
            WeightSyncError: one engine of a broadcast failed, which fails the others too, because they receive
                together.
        """
        self.num_bytes = total_bytes(update.manifest)
        self.dtype = quantized_dtype(update.manifest) or majority_dtype(update.manifest)
        ids = tuple(engine.engine_id for engine in engines)
        for engine in engines:
            offer = replace(address_offer(update, engine.engine_id, ids), adapter=self.adapter)
            self.tasks[engine.engine_id] = asyncio.create_task(self._update(engine, offer))
        together = update.transport == "broadcast"
        waiting = set(self.tasks.values())
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if together and (self.dead or self.errors):
                raise WeightSyncError("an engine failed during a broadcast")

    async def _update(self, engine: InferenceEngine, offer: WeightUpdate) -> None:
        engine_id, deed = engine.engine_id, f"confirm policy version {self.policy_version}"
        try:
            self.receipts[engine_id] = await call_with_timeout(
                self.timeout_s, engine, engine.update_weights(offer), deed
            )
        except EngineDiedError as error:
            self.dead[engine_id] = error
        except Exception as error:
            self.errors[engine_id] = error

    async def end(self) -> None:
        """Wait for every engine's task to end; one that does not end in time is canceled and its engine counts as
        dead.
        """
        if not self.tasks:
            return
        _, late = await asyncio.wait(self.tasks.values(), timeout=CANCEL_GRACE_S)
        for engine_id, task in self.tasks.items():
            if task in late:
                task.cancel()
                cause = f"it did not let go of the weight sync of policy version {self.policy_version}"
                self.dead[engine_id] = EngineDiedError(engine_id, cause)


async def call_with_timeout(limit_s: float, engine: InferenceEngine, call: Coroutine[Any, Any, T], deed: str) -> T:
    """Await a call; an engine that does not answer counts as dead, even if the call itself cannot be canceled."""
    task = asyncio.ensure_future(call)
    try:
        if not (await asyncio.wait({task}, timeout=limit_s))[0]:
            raise EngineDiedError(engine.engine_id, f"it did not {deed} within {limit_s:g} s")
    finally:
        if not task.done():
            task.cancel()
    return task.result()
