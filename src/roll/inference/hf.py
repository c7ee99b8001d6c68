"""The `hf` engine: `transformers` models decoded in this process, with deterministic or continuous batching.

Data flow

    generate ─► arrivals ─(wait for more)─► wave ─(fits)─► rows of the decoder ─ step, step, … ─► result of `generate`
                                                         ▲
         abort, pause, update_weights, logprobs, sleep ──(device lock: between two steps)

The asyncio event loop owns all state of this module. The computation runs in one worker thread, one call at a time,
under the device lock. All other operations therefore run between two steps, and the event loop is free during a step.
An idle engine uses no CPU.

Invariants

- The batch of a step depends only on the order of requests, never on their arrival times. Requests are admitted in
  *waves*: when no row runs, the engine waits until no request has arrived for `SETTLE_ITERATIONS` iterations of the
  event loop. All waiting requests then form a wave, sorted by priority and arrival. Requests join in this order as soon
  as they fit; requests that arrive in the meantime belong to the next wave. Requests from tasks that were created
  together therefore form the same batches in every process. (With `options: {admission: continuous}`, requests join
  immediately, which is faster if they arrive one by one. With the CPU kernels that we measured, a row's result does not
  depend on the rest of its batch, so tokens are the same in this mode too; waves do not rely on this.)
- A request's tokens depend on the weights, its prompt, its seed, and the other rows of its batch.
- Each token has the policy version of the weights that generated it. With `pause("keep")`, `update_weights` and
  `resume`, the weights change between two tokens of a request, whose cache is kept.
- An error in the worker thread ends the engine: all waiting and later requests raise `EngineDiedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roll.errors import EngineDiedError, RollError, UserError, WeightSyncError
from roll.inference.hf_requests import (
    Arrivals,
    BatchRow,
    RequestQueue,
    check_adapter,
    check_options,
    check_request,
    create_row,
)
from roll.inference.hf_thread import WorkerThread, build_decoder
from roll.inference.prefetching import PrefetchMixin
from roll.inference.spec import EngineSpec, reject_adapter
from roll.protocols import PauseMode
from roll.running import run_detached, run_in_thread
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

if TYPE_CHECKING:
    from roll.inference.hf_decoder import Decoder

__all__ = ["HFEngine", "get_partial_tokens"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0
"""Time limit of the current step when the engine is closed."""
HANG_MESSAGE = (
    "Engine %s hangs in a computation. Its thread cannot be killed, so its memory is not freed until this process "
    "exits. Engines in other processes (inference.engine=vllm, or Ray) can be killed."
)


class HFEngine(PrefetchMixin):
    """The `hf` engine; implements `InferenceEngine`. The module's docstring lists its guarantees."""

    def __init__(self, spec: EngineSpec) -> None:
        """Store the spec; nothing is loaded until `start`.

        Raises:
            ConfigError: the spec has an option that this engine does not support.
        """
        check_options(spec)
        self.engine_id = spec.engine_id
        self._spec = spec
        self._decoder: Decoder | None = None
        self._executor: WorkerThread | None = None
        self._server: asyncio.Task[None] | None = None
        self._device = asyncio.Lock()
        self._changed = asyncio.Event()
        self._queue = RequestQueue()
        self._futures: dict[str, asyncio.Future[Generation]] = {}
        self._arrivals = Arrivals()
        self._num_steps = 0
        self._paused = self._draining = False
        self._unsynced = "" if spec.lora is None else "no adapter has arrived yet"
        self._death = ""
        """Why the weights must not be used, and why the engine ended; empty if neither applies."""
        self._log_handler: logging.Handler | None = None

    async def start(self) -> None:
        """Load the model in the worker thread. If this call is canceled, the thread is abandoned.

        Raises:
            ModelError: the model cannot be loaded, or this engine cannot decode it.
        """
        if self._spec.log_path is not None:
            self._spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_handler = logging.FileHandler(self._spec.log_path)
            self._log_handler.addFilter(lambda record: record.name.startswith("roll.inference.hf"))
            logging.getLogger("roll.inference").addHandler(self._log_handler)
        started = time.perf_counter()
        self._executor = WorkerThread(f"roll-{self.engine_id}")
        try:
            self._decoder = await run_detached(self._executor.submit(build_decoder, self._spec))
        except BaseException:
            self._executor.shutdown(wait=False)
            self._executor = None
            self._close_log()
            raise
        logger.info("Engine %s is ready after %.1f s.", self.engine_id, time.perf_counter() - started)
        self._server = asyncio.create_task(self._serve(), name=f"serve {self.engine_id}")

    async def close(self) -> None:
        """Stop the engine; waiting requests raise `EngineDiedError`.

        A thread cannot be killed, so a step that exceeds `CLOSE_TIMEOUT_S` is abandoned and keeps its memory.
        """
        self._mark_dead("it was closed")
        self.delete_local_weights()
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if self._server is not None:
            self._server.cancel()  # it ends with the current step
        try:
            await asyncio.wait_for(self._device.acquire(), CLOSE_TIMEOUT_S)
            await asyncio.gather(*filter(None, [self._server]), return_exceptions=True)
            if self._decoder is not None:
                executor.submit(self._decoder.close)
            executor.shutdown(wait=True)
            self._device.release()
            self._decoder = None
        except TimeoutError:
            logger.error(HANG_MESSAGE, self.engine_id)
        finally:  # even if this call is canceled: close is not called again
            executor.shutdown(wait=False)
            self._close_log()

    def load(self) -> EngineLoad:
        """Return the current load."""
        decoder = self._decoder
        return EngineLoad(
            num_running=len(decoder.rows) if decoder else 0,
            num_waiting=len(self._queue),
            kv_used=decoder.cache_usage if decoder else 0.0,
            capacity=self._spec.max_num_seqs,
            kv_capacity=decoder.capacity_tokens if decoder else None,
            num_steps=self._num_steps,
        )

    # ---- requests

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request until it finishes; see `InferenceEngine.generate`.

        Raises:
            UnsupportedError: the request names an adapter but the engine has none, or has unsupported media.
            DataError: the engine has no adapter of this name.
            UserError: the request is empty or too long, has tokens outside the vocabulary, or its id is in use.
            EngineDiedError: the engine has died.
            WeightSyncError: no weights have arrived since the engine woke up or a sync failed.
        """
        decoder = self._get_decoder()
        check_request(request, self._spec.max_context, decoder.vocab_size)
        check_adapter(request.request_id, request.adapter, decoder.adapters)
        row = create_row(request, self._arrivals.add(), self._spec.seed)
        if request.media:
            with self._arrivals.expect_request():
                await run_in_thread(decoder.check_media, request)
            self._get_decoder(synced=False)  # the engine may have died in the meantime
        if request.request_id in self._futures:
            raise UserError(f"request id {request.request_id} is already in use: use a unique id for every request.")
        future = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._queue.add(row)
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDiedError):  # shielded: otherwise the row would keep decoding
                await asyncio.shield(self.abort([request.request_id]))
            raise

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        """Compute the log-probs of each sequence separately, with the current weights."""
        self._get_decoder()
        async with self._device:
            return await self._run_in_executor(self._get_decoder().logprobs, sequences, media, adapter)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests after the current step; they return their tokens so far."""
        if any(name in self._futures for name in request_ids):
            async with self._device:
                await self._abort(set(request_ids))

    # ---- control

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding. Earlier requests finish (`drain`), end (`abort`) or freeze (`keep`); new requests wait."""
        self._get_decoder(synced=mode == "drain")
        if mode == "drain":
            self._queue.begin_wave()
            self._paused, self._draining = False, True
            self._changed.set()
            await asyncio.gather(*map(_wait_until_done, list(self._futures.values())))
            if not self._draining:  # resumed in the meantime
                return
            self._draining = False
        self._paused = True
        async with self._device:  # wait for the current step
            if mode == "abort":
                await self._abort(set(self._futures))

    async def resume(self) -> None:
        """Resume decoding."""
        self._get_decoder()
        self._paused = self._draining = False
        self._changed.set()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Fetch and apply new weights between two steps; see `hf_weights.apply_update`.

        Raises:
            WeightSyncError: the update failed. Without a named adapter, requests fail until a later update succeeds.
        """
        started, adapters = time.perf_counter(), self._get_decoder(synced=False).adapters
        if adapters is None:
            reject_adapter("hf", update.adapter)
        async with self._device:
            decoder = self._get_decoder(synced=False)
            if decoder.is_released:
                raise WeightSyncError(f"engine '{self.engine_id}' is asleep: call wake() before update_weights().")
            if update.adapter is None:  # stays set if it fails; named adapters are replaced entirely or not at all
                self._unsynced = f"the sync of policy version {update.policy_version} failed"
            checksums = await self._run_in_executor(decoder.update_weights, update, ends_engine=False)
            self._unsynced = ""
        self._changed.set()
        return WeightReceipt(
            engine_id=self.engine_id,
            policy_version=update.policy_version,
            checksums=checksums,
            duration_s=time.perf_counter() - started,
            adapter=update.adapter,
        )

    async def sleep(self) -> None:
        """Free weights and cache. Running requests recompute their cache and continue after the next sync."""
        self._get_decoder(synced=False)
        async with self._device:
            decoder = self._get_decoder(synced=False)
            if not decoder.is_released:
                self._unsynced = "it was asleep"
                self._queue.requeue(await self._run_in_executor(decoder.release))

    async def wake(self) -> None:
        """Allocate the memory again; `update_weights` must be called next."""
        async with self._device:
            await self._run_in_executor(self._get_decoder(synced=False).allocate_weights)

    # ---- the loop

    async def _serve(self) -> None:
        try:
            while True:
                if not self._can_run():
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                if not (self._get_decoder().rows or self._queue.num_in_wave):
                    await self._arrivals.wait_until_they_stop()
                async with self._device:
                    if self._can_run():  # checked again: the engine may have been paused while it waited for the lock
                        await self._run_step()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("Engine %s died.", self.engine_id)
            self._mark_dead(f"{type(error).__name__}: {error}")

    def _can_run(self) -> bool:
        if self._paused or self._unsynced or self._death:
            return False
        decoder = self._get_decoder()
        return bool(decoder.rows or self._queue.num_in_wave or (len(self._queue) and not self._draining))

    async def _run_step(self) -> None:
        """Admit waiting rows, generate one token for each row, and return the results of finished requests."""
        decoder = self._get_decoder()
        if not self._draining and (self._is_continuous or not (decoder.rows or self._queue.num_in_wave)):
            self._queue.begin_wave()
        joining = self._queue.pop_admissible(decoder.can_join)
        if joining:
            await self._run_in_executor(decoder.admit, joining)
        self._resolve_requests(await self._run_in_executor(decoder.step))

    @property
    def _is_continuous(self) -> bool:
        return self._spec.options.get("admission", "wave") == "continuous"

    async def _run_in_executor(self, function: Callable[..., T], *args: Any, ends_engine: bool = True) -> T:
        """Run a function in the worker thread. The caller must hold the device lock.

        With `ends_engine`, an unexpected exception ends the engine, even if it was caused by a single request.
        """
        if self._executor is None:
            raise EngineDiedError(self.engine_id, self._death or "it was not started")
        work = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        try:
            found = await asyncio.shield(work)
            self._num_steps += 1
            return found
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)  # never two computations at a time
            raise
        except RollError:
            raise
        except Exception as error:
            if ends_engine and self._decoder is not None:
                self._mark_dead(f"{type(error).__name__}: {error}")
                raise EngineDiedError(self.engine_id, self._death) from error
            raise

    async def _abort(self, request_ids: set[str]) -> None:
        """Remove requests, and complete them with their tokens so far. The caller must hold the device lock."""
        decoder = self._get_decoder(synced=False)
        running = [row for row in decoder.rows if row.request.request_id in request_ids]
        if running:
            await self._run_in_executor(decoder.abort_rows, running)
        self._resolve_requests([*running, *self._queue.remove(request_ids)], aborted=True)

    def _resolve_requests(self, rows: Iterable[BatchRow], aborted: bool = False) -> None:
        for row in rows:
            future = self._futures.pop(row.request.request_id)
            if not future.done():
                future.set_result(row.build_result(self.engine_id, aborted))

    def _mark_dead(self, cause: str) -> None:
        """Mark the engine as dead and fail all waiting requests."""
        self._death = self._death or cause
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(EngineDiedError(self.engine_id, self._death))
                future.exception()  # mark it as retrieved: its caller may have been canceled
        self._queue = RequestQueue()

    def _close_log(self) -> None:
        handler, self._log_handler = self._log_handler, None
        if handler is not None:
            logging.getLogger("roll.inference").removeHandler(handler)
            handler.close()

    def _get_decoder(self, synced: bool = True) -> Decoder:
        if self._death or self._decoder is None:
            raise EngineDiedError(self.engine_id, self._death or "it was not started")
        if synced and self._unsynced:
            raise WeightSyncError(
                f"engine '{self.engine_id}' has no usable weights ({self._unsynced}): call update_weights() first."
            )
        return self._decoder


async def _wait_until_done(future: asyncio.Future[Generation]) -> None:
    """Wait for a future without raising its error."""
    await asyncio.wait([future])


def get_partial_tokens(engine: HFEngine, request_id: str) -> IntArray:
    """Return the tokens [T] that were generated so far for a request, for streaming; empty before its first step."""
    rows = engine._decoder.rows if engine._decoder else ()
    tokens = [row.tokens[row.prompt_length : row.length] for row in rows if row.request.request_id == request_id]
    return (tokens[0] if tokens else np.empty(0)).astype(np.int32)
