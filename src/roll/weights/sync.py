"""Weight sync, the controller's end: push to every engine, check every receipt, read back, probe.

Data flow:

    trainer.send_weights ─ update ─► Delivery ─ update_weights ─► engines (all at once)
              │                         ▲── receipts ──────────────┘
              └── checksums ──► compare ──► read back ──► probe ──► SyncReport

Invariants:
    - One sync runs at a time: `push` and `push_to` wait for each other.
    - `push` returns only if every live engine has every tensor as the trainer sent it, as far as this can be verified
      (docs/weight-sync.md). Otherwise, it raises `WeightSyncError` with the names of the engine and the tensor.
    - Engines are paused only while tensors arrive and are read back. With the transport `store`, they fetch the weights
      before they are paused. The probe runs after they resume, because it is an ordinary request, which a paused engine
      would not answer.
    - If an engine dies or does not respond, the sync of the other engines still succeeds. The dead engine is reported
      before the other engines resume, so that the caller can replace it. It may contain a mixture of old and new
      weights, and receives no further calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from roll.config.operations import WeightSyncConfig
from roll.errors import EngineDiedError, WeightSyncError
from roll.protocols import InferenceEngine, SupportsReadback, TrainerGroup
from roll.rollout.engine_group import EngineGroup
from roll.types import IntArray, SequenceMedia, WeightStore
from roll.weights.delivery import Delivery, call_with_timeout
from roll.weights.probe import ProbeChecker, ProbeResult, build_probe_batch, get_noise_bounds
from roll.weights.report import SyncReport, find_checksum_problem, find_receipt_problem
from roll.weights.transfer import transfer_weights

__all__ = ["SyncReport", "WeightSync"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

SYNC_TIMEOUT_S = 300.0


class WeightSync:
    """Syncs the trainer's weights to the engines, and verifies that they arrived.

    Args:
        trainer: The trainer.
        engines: The engines of the run; sleeping engines are skipped.
        config: The settings of the transport and the probe.
        probe: Token sequences [L], which are the same for the whole run; if empty, engines are not probed.
        probe_media: Media spans of each sequence; empty if no sequence has media.
        transport: The transport for `auto`: the fastest transport that reaches every engine.
        store: The file store, if the configured transport is `store`.
        computes_in_8_bits: True if the engines compute in the 8-bit format of the sent weights.
        weights_on_device: A context manager within which the trainer's weights are on its device.
        timeout_s: Time limit for an engine to answer the probe. To receive and confirm the weights, an engine also has
            the time for their bytes at `delivery.MIN_BYTES_PER_S`.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        config: WeightSyncConfig,
        *,
        probe: Sequence[IntArray] = (),
        probe_media: SequenceMedia = (),
        transport: str = "in_process",
        store: WeightStore | None = None,
        computes_in_8_bits: bool = False,
        weights_on_device: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        timeout_s: float = SYNC_TIMEOUT_S,
    ) -> None:
        self.transport = transport if config.transport == "auto" else config.transport
        self.versions: dict[str | None, int] = {}
        """The version of the last push, by adapter; `None` is the key of the policy."""
        self._adapter: str | None = None
        """The adapter of the last push."""
        self._trainer = trainer
        self._engines = engines
        self._config = config
        self._store = store
        self._computes_in_8_bits = computes_in_8_bits
        self._weights_on_device = weights_on_device
        self._timeout_s = timeout_s
        kept = [index for index, sequence in enumerate(probe) if len(sequence) > 1]
        self._sequences = [probe[index] for index in kept]
        self._media = [probe_media[index] for index in kept] if any(probe_media) else []
        self._probe_checker: ProbeChecker | None = None
        self._probed: dict[str, Mapping[str, int]] = {}
        self._num_pushes = 0
        self._lock = asyncio.Lock()
        self._unchanged = asyncio.Event()
        self._unchanged.set()

    @asynccontextmanager
    async def begin_update(self) -> AsyncIterator[None]:
        """Block `push_to` during a `with` block that changes the trainer's weights. An engine that joins in the
        meantime waits for the end of the block or for the next `push`. If the block fails or is canceled, the engine
        waits for the next `push`, because the trainer's weights are unknown and may still change.
        """
        self._unchanged.clear()
        try:
            async with self._lock:  # wait for a running sync, which reads the weights
                pass
        except BaseException:
            self._unchanged.set()  # nothing has changed yet
            raise
        yield
        self._unchanged.set()

    async def push(
        self,
        policy_version: int,
        *,
        adapter: str | None = None,
        pause_generation: AbstractAsyncContextManager[Any] | None = None,
        on_dead: Callable[[Collection[str]], object] | None = None,
    ) -> SyncReport:
        """Send the trainer's weights to every engine that is awake, and verify that they arrived.

        Args:
            policy_version: The version of the weights.
            adapter: The trainer's current adapter, if engines serve several adapters (`GenerationRequest.adapter`). Its
                weights are confirmed, but neither read back nor probed, because engines compute log-probs with the
                policy's weights.
            pause_generation: A context manager that is active while weights are received and read back. It ends before
                the probe.
            on_dead: A function called with the IDs of engines that died or did not respond, if possible while the other
                engines are still paused. The weights of these engines may be a mixture of old and new weights. The
                engines must be replaced, and the new engines synced with `push_to`, before they serve requests.

        Returns:
            The report.

        Raises:
            WeightSyncError: a tensor was received with incorrect content, an engine does not have it, or the probe
                shows that an engine does not use it. The message names the engine and, if known, the tensor.
        """
        async with self._lock:
            every = self._config.probe_every_num_steps
            due = every > 0 and self._num_pushes % every == 0
            self._num_pushes += adapter is None
            self._adapter = adapter
            self.versions[adapter] = policy_version
            self._discard_removed_engines()
            async with self._weights_on_device():
                report = await self._sync(
                    tuple(self._engines.list_awake()), policy_version, due, pause_generation, on_dead
                )
            self._unchanged.set()
            return report

    @asynccontextmanager
    async def pause_pushes(self) -> AsyncIterator[None]:
        """Wait for a running sync, and block further syncs in the `with` block."""
        async with self._lock:
            yield

    async def push_to(self, engine: InferenceEngine) -> SyncReport:
        """Send the weights of the last push to one new engine. The trainer must still have these weights.

        Raises:
            EngineDiedError: the engine died during the sync.
            WeightSyncError: see `push`. Also raised if no weights have been pushed yet, or if weights of several
                adapters have been pushed.
        """
        async with self._lock_weights():
            if not self.versions:
                raise WeightSyncError(f"engine '{engine.engine_id}' cannot be synced: no weights were pushed yet.")
            if len(self.versions) > 1:
                held = "the policy" if self._adapter is None else f"adapter '{self._adapter}'"
                raise WeightSyncError(
                    f"engine '{engine.engine_id}' needs the weights of {len(self.versions)} models, but the trainer "
                    f"has only the weights of {held}. Resume the run to push the weights of all models."
                )
            self._probed.pop(engine.engine_id, None)
            if self._probe_checker is not None:
                self._probe_checker.discard_logprobs(engine.engine_id)
            probed = self._config.probe_every_num_steps > 0
            async with self._weights_on_device():
                report = await self._sync((engine,), self.versions[self._adapter], probed)
            if report.dead_engines:
                raise report.dead_engines[engine.engine_id]
            return report

    def _discard_removed_engines(self) -> None:
        """Discard the probe results of engines that are no longer in the group; engine ids are not used again."""
        for engine_id in self._probed.keys() - {engine.engine_id for engine in self._engines.engines}:
            del self._probed[engine_id]
            if self._probe_checker is not None:
                self._probe_checker.discard_logprobs(engine_id)

    @asynccontextmanager
    async def _lock_weights(self) -> AsyncIterator[None]:
        """Wait until no sync runs and the weights do not change; block syncs and weight changes in the `with` block."""
        while True:
            await self._unchanged.wait()
            async with self._lock:
                if self._unchanged.is_set():  # an update may have started since the wait ended
                    yield
                    return

    async def _sync(
        self,
        engines: Sequence[InferenceEngine],
        version: int,
        run_probe: bool,
        pause_generation: AbstractAsyncContextManager[Any] | None = None,
        on_dead: Callable[[Collection[str]], object] | None = None,
    ) -> SyncReport:
        report_dead = on_dead or (lambda dead: None)
        clock = asyncio.get_running_loop().time
        begin = pause_begin = clock()
        async with AsyncExitStack() as paused:

            async def pause() -> None:
                nonlocal begin, pause_begin
                await paused.enter_async_context(pause_generation or nullcontext())
                pause_begin = clock()
                if self._store is None:
                    begin = pause_begin

            delivery = Delivery(policy_version=version, timeout_s=self._timeout_s, adapter=self._adapter)
            delivery, sent, dead = await transfer_weights(
                self._trainer, engines, delivery, self.transport, self._store, pause
            )
            for engine_id, receipt in delivery.receipts.items():
                self._raise_if_problem(find_receipt_problem(receipt, version, sent, self._adapter), engine_id, version)
            arrived = clock()
            alive = [engine for engine in engines if engine.engine_id in delivery.receipts]
            num_read_back = 0 if self._adapter is not None else await self._read_back(alive, sent, version, dead)
            verified = clock()
            # Reported while the others are paused, so that no request goes to an engine with a mixture of weights.
            reported = tuple(dead)
            report_dead(reported)
        alive = [engine for engine in alive if engine.engine_id not in dead]
        results: dict[str, ProbeResult] = {}
        if run_probe and self._sequences and alive and self._adapter is None:
            results = await self._probe(alive, sent, version, delivery.dtype, dead)
            report_dead(dead.keys() - set(reported))
        for error in dead.values():
            logger.warning("weight sync of policy version %d: %s", version, error)
        return SyncReport(
            policy_version=version,
            transport=self.transport,
            seconds=arrived - begin,
            num_bytes=delivery.num_bytes,
            num_tensors=len(sent),
            engines=tuple(engine.engine_id for engine in alive if engine.engine_id not in dead),
            dead_engines=dead,
            num_read_back=num_read_back,
            readback_s=verified - arrived,
            probe=results,
            probe_s=clock() - verified,
            adapter=self._adapter,
            pause_s=verified - pause_begin if engines else 0.0,
            transport_metrics=delivery.transport_metrics,
        )

    async def _read_back(
        self,
        engines: Sequence[InferenceEngine],
        sent: Mapping[str, int],
        version: int,
        dead: dict[str, EngineDiedError],
    ) -> int:
        able = [engine for engine in engines if isinstance(engine, SupportsReadback)]
        calls = {
            engine.engine_id: call_with_timeout(
                self._timeout_s, engine, engine.applied_checksums(), "return the checksums of its weights"
            )
            for engine in able
        }
        count = 0
        for engine_id, held in (await _await_all(calls, dead)).items():
            if held is not None:
                count += len(held)
                self._raise_if_problem(
                    find_checksum_problem(held, sent, "uses different bytes than it received for"),
                    engine_id,
                    version,
                )
        return count

    async def _probe(
        self,
        engines: Sequence[InferenceEngine],
        sent: Mapping[str, int],
        version: int,
        dtype: str,
        dead: dict[str, EngineDiedError],
    ) -> dict[str, ProbeResult]:
        action = "answer the probe of a weight sync"

        async def request_logprobs() -> dict[str, Any]:
            calls = {
                engine.engine_id: call_with_timeout(
                    self._timeout_s, engine, engine.logprobs(self._sequences, self._media), action
                )
                for engine in engines
            }
            return await _await_all(calls, dead)

        scored = self._trainer.forward(build_probe_batch(self._sequences, self._media), ["logprobs"])
        if self.transport == "broadcast":
            trainer, answers = await asyncio.gather(scored, request_logprobs())
        else:  # one after the other: on the same cores this takes 0.34 s instead of 0.47 s (measured on two cores)
            trainer = await scored
            answers = await request_logprobs()
        if not all(np.isfinite(logprobs[1:]).all() for logprobs in trainer["logprobs"]):
            raise WeightSyncError(
                f"weight sync of policy version {version}: the trainer's own log-probs are not finite, so the policy's "
                "weights have NaN or infinite values: resume from an earlier checkpoint with a lower "
                "training.learning_rate."
            )
        if self._probe_checker is None:
            bounds = get_noise_bounds(dtype, computes_in_8_bits=self._computes_in_8_bits)
            self._probe_checker = ProbeChecker(bounds, self._config.probe_tolerance)
        results: dict[str, ProbeResult] = {}
        for engine_id, logprobs in answers.items():
            before = self._probed.get(engine_id, {})
            changed = sum(before.get(name) != checksum for name, checksum in sent.items())
            result = self._probe_checker.check(
                engine_id, logprobs, trainer["logprobs"], weights_changed=2 * changed > len(sent)
            )
            self._raise_if_problem(_format_advice(result, engine_id), engine_id, version)
            results[engine_id] = result
            self._probed[engine_id] = sent
        return results

    def _raise_if_problem(self, problem: str, engine_id: str, version: int) -> None:
        if problem:
            raise WeightSyncError(
                f"weight sync of policy version {version} over {self.transport}, engine '{engine_id}': {problem}."
            )


async def _await_all(calls: Mapping[str, Awaitable[Any]], dead: dict[str, EngineDiedError]) -> dict[str, Any]:
    """Await all calls at once. Return the results by engine; add engines that died to `dead`; raise other errors."""
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    results: dict[str, Any] = {}
    for engine_id, answer in zip(calls, answers, strict=True):
        if isinstance(answer, EngineDiedError):
            dead[engine_id] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            results[engine_id] = answer
    return results


def _format_advice(result: ProbeResult, engine_id: str) -> str:
    if not result.problem:
        return ""
    return (
        f"every tensor arrived as sent, but its {result.problem} (largest difference {result.max_abs:.2g}). It "
        "does not compute with a tensor that it received, or engine and trainer compute differently: compare the "
        "names of layers, dtype and attention of engine and trainer. If the difference is expected, raise "
        "weight_sync.probe_tolerance"
    )
