"""The controller's end of a weight sync: push to every engine, check every receipt, read back, probe.

Data flow:

    trainer.send_weights ─ offer ─► Delivery ─ update_weights ─► engines (all at once)
              │                        ▲── receipts ──────────────┘
              └── checksums ──► compare ──► read back ──► probe ──► SyncReport

Invariants:
    - One sync at a time; a push and the push to a replaced engine wait for each other.
    - `push` returns only if every engine that is alive holds every tensor as the trainer sent it, as far as this can be
      verified (docs/weight-sync.md); otherwise it raises `WeightSyncError` with the names of engine and tensor.
    - Engines are paused only while tensors arrive and are read back. A probe is a request like any other: it runs after
      they resume, because a paused engine would not answer it.
    - An engine that dies or does not answer never fails the others. It is reported before they resume, so that the
      caller can replace it. It may hold a mixture of weights, and gets no further calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from roll.config.operations import WeightSyncConfig
from roll.errors import EngineDiedError, WeightSyncError
from roll.protocols import InferenceEngine, SupportsReadback, TrainerGroup
from roll.rollout.engine_group import EngineGroup
from roll.types import IntArray
from roll.weights.delivery import Delivery, call_with_timeout
from roll.weights.probe import NOISE, ProbeGauge, ProbeResult, probe_batch
from roll.weights.report import SyncReport, checksum_problem, receipt_problem

__all__ = ["SyncReport", "WeightSync"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

SYNC_TIMEOUT_S = 300.0


class WeightSync:
    """Keeps engines on the trainer's weights.

    Args:
        trainer: The trainer.
        engines: The engines of the run; sleeping ones get no weights.
        config: The settings of transport and probe.
        probe: Token sequences [L], the same for the whole run; if empty, there is no probe.
        transport: The transport for `auto`: the fastest one that reaches every engine, from the cluster.
        at_hand: A context in which the trainer's weights are on its device.
        timeout_s: The timeout for one engine to fetch and confirm, and to answer the probe.
    """

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        config: WeightSyncConfig,
        *,
        probe: Sequence[IntArray] = (),
        transport: str = "in_process",
        weights_on_device: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        timeout_s: float = SYNC_TIMEOUT_S,
    ) -> None:
        self.transport = transport if config.transport == "auto" else config.transport
        self.versions: dict[str | None, int] = {}
        """The version of the last push of each adapter, and of the policy's own weights (`None`)."""
        self._adapter: str | None = None
        """The adapter of the last push."""
        self._trainer = trainer
        self._engines = engines
        self._config = config
        self._weights_on_device = weights_on_device
        self._timeout_s = timeout_s
        self._sequences = [sequence for sequence in probe if len(sequence) > 1]
        self._probe_gauge: ProbeGauge | None = None
        self._probed: dict[str, Mapping[str, int]] = {}
        self._num_pushes = 0
        self._lock = asyncio.Lock()
        self._unchanged = asyncio.Event()
        self._unchanged.set()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Run the body, which changes the trainer's weights, while no new engine is synced.

        An engine that joins in the meantime waits for the next `push`, or for the end of the body. After an update that
        failed or was canceled it waits for the next `push` only: the trainer's weights are then unknown and may still
        change.
        """
        self._unchanged.clear()
        try:
            async with self._lock:
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
        pause_generation: AbstractAsyncContextManager[object] | None = None,
        on_dead: Callable[[Collection[str]], object] | None = None,
    ) -> SyncReport:
        """Send the trainer's weights to every engine that is awake, and verify that they arrived.

        Args:
            policy_version: The version of the weights.
            adapter: The adapter whose weights the trainer holds, where engines answer with several
                (`GenerationRequest.adapter`). These weights are confirmed, but neither read back nor probed, because
                engines score with the policy's own.
            still: A context that is active while weights arrive and are read back, and left before engines are probed.
            on_dead: A function called once for each engine that died or did not answer, if possible while the others
                are still paused: the engine must be replaced and get `push_to` before it serves. Its weights may be a
                mixture.

        Returns:
            The report.

        Raises:
            WeightSyncError: a tensor did not arrive as sent, an engine does not hold it, or the probe shows that an
                engine does not compute with it; names the engine, and the tensor where it is known.
        """
        async with self._lock:
            every = self._config.probe_every_num_steps
            due = every > 0 and self._num_pushes % every == 0
            self._num_pushes += adapter is None
            self._adapter = adapter
            self.versions[adapter] = policy_version
            async with self._weights_on_device():
                report = await self._sync(tuple(self._engines.awake()), policy_version, due, pause_generation, on_dead)
            self._unchanged.set()
            return report

    @asynccontextmanager
    async def pause_pushes(self) -> AsyncIterator[None]:
        """Run the body while no weights are being sent to any engine."""
        async with self._lock:
            yield

    async def push_to(self, engine: InferenceEngine) -> SyncReport:
        """Send the weights of the last push, which the trainer must still hold, to one new engine.

        Raises:
            EngineDiedError: the engine died again.
            WeightSyncError: as in `push`, or there was no push yet, or pushes were of several adapters.
        """
        async with self._weights_fixed():
            if not self.versions:
                raise WeightSyncError(f"engine {engine.engine_id} cannot be synced: no weights were pushed yet.")
            if len(self.versions) > 1:
                held = "the policy" if self._adapter is None else f"adapter '{self._adapter}'"
                raise WeightSyncError(
                    f"engine {engine.engine_id} cannot be synced: {len(self.versions)} sets of weights were pushed; "
                    f"the trainer holds only the weights of {held}. Resume the run, which pushes all of them."
                )
            self._probed.pop(engine.engine_id, None)
            if self._probe_gauge is not None:
                self._probe_gauge.forget(engine.engine_id)
            probed = self._config.probe_every_num_steps > 0
            async with self._weights_on_device():
                report = await self._sync((engine,), self.versions[self._adapter], probed)
            if report.dead:
                raise report.dead[engine.engine_id]
            return report

    @asynccontextmanager
    async def _weights_fixed(self) -> AsyncIterator[None]:
        """Run the body while the trainer's weights do not change and are not sent elsewhere."""
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
        probed: bool,
        pause_generation: AbstractAsyncContextManager[object] | None = None,
        on_dead: Callable[[Collection[str]], object] | None = None,
    ) -> SyncReport:
        tell = on_dead or (lambda dead: None)
        clock = asyncio.get_running_loop().time
        async with pause_generation or nullcontext():
            begin = clock()
            delivery, sent, dead = await self._transfer(engines, version)
            for engine_id, receipt in delivery.receipts.items():
                self._require(receipt_problem(receipt, version, sent, self._adapter), engine_id, version)
            arrived = clock()
            alive = [engine for engine in engines if engine.engine_id in delivery.receipts]
            num_read_back = 0 if self._adapter is not None else await self._read_back(alive, sent, version, dead)
            dequantize_stream = clock()
            told = tuple(dead)
            tell(told)
        alive = [engine for engine in alive if engine.engine_id not in dead]
        results: dict[str, ProbeResult] = {}
        if probed and self._sequences and alive and self._adapter is None:
            results = await self._probe(alive, sent, version, delivery.dtype, dead)
            tell(dead.keys() - set(told))
        for error in dead.values():
            logger.warning("weight sync of policy version %d: %s", version, error)
        return SyncReport(
            policy_version=version,
            transport=self.transport,
            seconds=arrived - begin,
            num_bytes=delivery.num_bytes,
            num_tensors=len(sent),
            engines=tuple(engine.engine_id for engine in alive if engine.engine_id not in dead),
            dead=dead,
            num_read_back=num_read_back,
            readback_s=dequantize_stream - arrived,
            probe=results,
            probe_s=clock() - dequantize_stream,
            adapter=self._adapter,
        )

    async def _transfer(
        self, engines: Sequence[InferenceEngine], version: int
    ) -> tuple[Delivery, Mapping[str, int], dict[str, EngineDiedError]]:
        """Send until all remaining engines have the weights: a death fails a broadcast for the others, so it is
        repeated.
        """
        dead: dict[str, EngineDiedError] = {}
        left = list(engines)
        delivery = Delivery(policy_version=version, timeout_s=self._timeout_s, adapter=self._adapter)
        while left:  # with no engine, for example while all of them sleep, a broadcast would wait for one
            failure: WeightSyncError | None = None
            sent: Mapping[str, int] = {}
            try:
                sent = await self._trainer.send_weights(
                    version, self.transport, lambda update, to=delivery, some=tuple(left): to.deliver(some, update)
                )
            except WeightSyncError as error:
                failure = error
            finally:
                await delivery.end()
            dead |= delivery.dead
            if failure is None and not delivery.errors:
                return delivery, sent, dead
            if not delivery.dead or self.transport != "broadcast":
                raise _combine_errors(version, failure, delivery.errors)
            left = [engine for engine in left if engine.engine_id not in dead]
            delivery = Delivery(policy_version=version, timeout_s=self._timeout_s, adapter=self._adapter)
        return delivery, {}, dead

    async def _read_back(
        self,
        engines: Sequence[InferenceEngine],
        sent: Mapping[str, int],
        version: int,
        dead: dict[str, EngineDiedError],
    ) -> int:
        able = [engine for engine in engines if isinstance(engine, SupportsReadback)]
        asked = {
            engine.engine_id: call_with_timeout(
                self._timeout_s, engine, engine.applied_checksums(), "say which weights it holds"
            )
            for engine in able
        }
        count = 0
        for engine_id, held in (await _await_all(asked, dead)).items():
            if held is not None:
                count += len(held)
                self._require(
                    checksum_problem(held, sent, "computes with other bytes than it received for"), engine_id, version
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
        deed = "answer the probe of a weight sync"

        async def ask() -> dict[str, Any]:
            asked = {
                engine.engine_id: call_with_timeout(self._timeout_s, engine, engine.logprobs(self._sequences), deed)
                for engine in engines
            }
            return await _await_all(asked, dead)

        scored = self._trainer.forward(probe_batch(self._sequences), ["logprobs"])
        if self.transport == "broadcast":
            trainer, answers = await asyncio.gather(scored, ask())
        else:  # on one host both may need the same cores, and are faster in turn: 0.34 s instead of 0.47 s on two cores
            trainer = await scored
            answers = await ask()
        if self._probe_gauge is None:
            self._probe_gauge = ProbeGauge(NOISE.get(dtype, NOISE["bfloat16"]), self._config.probe_tolerance)
        results: dict[str, ProbeResult] = {}
        for engine_id, logprobs in answers.items():
            before = self._probed.get(engine_id, {})
            changed = sum(before.get(name) != checksum for name, checksum in sent.items())
            result = self._probe_gauge.judge(
                engine_id, logprobs, trainer["logprobs"], weights_changed=2 * changed > len(sent)
            )
            self._require(_advice(result, engine_id), engine_id, version)
            results[engine_id] = result
            self._probed[engine_id] = sent
        return results

    def _require(self, problem: str, engine_id: str, version: int) -> None:
        if problem:
            raise WeightSyncError(
                f"weight sync of policy version {version} over {self.transport}, engine {engine_id}: {problem}."
            )


async def _await_all(asked: Mapping[str, Awaitable[Any]], dead: dict[str, EngineDiedError]) -> dict[str, Any]:
    """Await all calls at once; record engines that die in `dead`, raise other errors."""
    answers = await asyncio.gather(*asked.values(), return_exceptions=True)
    found: dict[str, Any] = {}
    for engine_id, answer in zip(asked, answers, strict=True):
        if isinstance(answer, EngineDiedError):
            dead[engine_id] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[engine_id] = answer
    return found


def _combine_errors(version: int, failure: WeightSyncError | None, errors: Mapping[str, Exception]) -> Exception:
    """Combine all errors into one; an engine's own error comes first, because it names the tensor."""
    if not errors:
        assert failure is not None, "something failed"
        return failure
    told = "; ".join(f"engine {engine_id}: {error}" for engine_id, error in errors.items())
    combined = WeightSyncError(f"weight sync of policy version {version} failed: {told}")
    combined.__cause__ = next(iter(errors.values()))
    return combined


def _advice(result: ProbeResult, engine_id: str) -> str:
    if not result.problem:
        return ""
    return (
        f"every tensor arrived as sent, but its {result.problem} (largest difference {result.max_abs:.2g}). A tensor "
        "was received and is not what the engine computes with, or engine and trainer compute differently: compare how "
        "the engine loads and names the layers, and both sides' dtype and attention. If the difference is sound, set "
        "weight_sync.probe_tolerance"
    )
