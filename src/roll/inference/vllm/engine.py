"""vLLM's AsyncLLM behind ROLL's engine protocol; the same code on CPU and on accelerators.

Data flow:  generate() ─► AsyncLLM (this process) ─ zmq ─► EngineCore (child process, with the worker in it, or with one
            worker process per device under tensor parallelism) ─ tokens, log-probs, weight version ─► Generation

Invariants
- Every accepted request ends exactly once: with a Generation (whole, or partial and `abort`), or with an error.
- A token's policy version is that of the weights that generated it: weights change only while the scheduler is paused.
- After an update no KV cache of older weights is used: the prefix cache is dropped, and running requests are computed
  again under the new weights when decoding resumes, keeping the tokens they have.
- A failed update leaves the engine paused until another one succeeds: no token is generated with mixed weights.
- The engine's processes end with this one, however it ends (`child`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
import uuid
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from roll.errors import EngineDiedError, InfraError, ModelError, UnsupportedError, WeightSyncError
from roll.inference.spec import EngineSpec, refuse_adapter, refuse_media
from roll.inference.vllm.conversion import (
    INITIAL_VERSION,
    check_fits,
    check_tokens,
    sampling_params,
    scoring_params,
    to_generation,
    to_logprobs,
)
from roll.inference.vllm.launch import Launch, end_launch, launch
from roll.inference.vllm.prefork import take
from roll.protocols import PauseMode
from roll.running import run_in_thread
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

if TYPE_CHECKING:
    import psutil
    from vllm import RequestOutput, SamplingParams

__all__ = ["VLLMEngine"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

DEATH_POLL_S = 0.25
_PAUSE_MODES = {"keep": "keep", "abort": "abort", "drain": "wait"}


class VLLMEngine:
    """The `vllm` engine. See `roll.protocols.InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine_id = spec.engine_id
        self._spec = spec
        self._launch: Launch | None = None
        self._running: dict[str, int] = {}
        """The number of running calls by request id."""
        self._paused = False
        self._closed = False
        self._mixed = False
        """Whether an update changed some weights and did not finish."""
        self._asleep = False
        self._unsynced = False
        """Whether the engine has slept and no weights have arrived since."""
        self._resume_after_update = False
        """Whether the update paused the engine, not the caller."""
        self._update_lock = asyncio.Lock()
        self._routed_layers: list[int] = []
        """The layers with routers, if their choices are recorded."""

    async def start(self) -> None:
        """Load the model; if canceled, kill the processes that were started for it.

        Raises:
            ModelError: vLLM rejects the model or these settings.
            EngineDiedError: vLLM's process ended while it loaded.
        """
        ahead = take(self._spec.num_threads) if self._spec.log_path is not None else None
        name = uuid.uuid4().hex if ahead is None else ahead.name
        work = asyncio.ensure_future(run_in_thread(launch, self._spec, name, ahead))
        try:
            self._launch = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(end_launch, name)
            work.add_done_callback(_forget)
            raise
        await self._call(self._llm.update_weight_version(str(INITIAL_VERSION)))
        for traces in await self._call(self._llm.collective_rpc("roll_traces")):
            self._launch.adopt(set(traces["processes"]) - {os.getpid()}, traces["files"])
        if self._spec.records_experts:
            await self._record_experts()
        logger.info("engine %s: vLLM serves %s", self.engine_id, self._spec.model_path)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request to its end; an aborted request returns its partial tokens.

        Raises:
            UnsupportedError: the request names an adapter or has media.
            DataError: the request does not fit the context, or has tokens outside the vocabulary.
            EngineDiedError: the engine has died.
        """
        refuse_adapter("vllm", request.adapter)
        refuse_media("vllm", request.media)
        check_tokens(f"request {request.request_id}", request.token_ids, self._started.vocab_size)
        check_fits(request, self._spec.max_context)
        output = await self._run(request.request_id, request.token_ids, sampling_params(request), request.priority)
        experts = await self._experts_of(request, output) if self._routed_layers else None
        return to_generation(request, output, self.engine_id, experts)

    async def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence at temperature 1; entry 0 is 0. Wait while the engine is paused."""
        refuse_media("vllm", *media)
        for index, sequence in enumerate(sequences):
            check_tokens(f"sequence {index}", sequence, self._started.vocab_size)
        stamp = time.monotonic_ns()
        with self._started.stats.steps.pause_recording():
            outputs = await asyncio.gather(
                *(self._run(f"logprobs-{stamp}-{i}", seq, scoring_params()) for i, seq in enumerate(sequences))
            )
        return [to_logprobs(output) for output in outputs]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests now; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._running]
        if known:
            await self._guard(self._llm.abort(known))

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests that arrive in the meantime wait."""
        await self._call(self._llm.pause_generation(mode=_PAUSE_MODES[mode], clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        """Resume decoding.

        Raises:
            WeightSyncError: the latest update failed midway, so the weights are a mixture of old and new ones.
        """
        if self._mixed:
            raise WeightSyncError(
                f"engine {self.engine_id} holds weights of an update that broke off: sync again first."
            )
        await self._call(self._llm.resume_generation())
        self._paused = False
        self._started.stats.steps.begin()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Fetch and apply new weights in every worker. Running requests are paused in the meantime.

        Raises:
            WeightSyncError: names a tensor that is missing, unknown, of another shape, or was not applied.
        """
        refuse_adapter("vllm", update.adapter)
        if update.transport == "in_process":
            raise WeightSyncError(
                "transport in_process cannot reach the vllm engine, whose workers are processes of their own: "
                "set weight_sync.transport to shared_memory or broadcast."
            )
        if self._asleep:
            raise WeightSyncError(f"engine {self.engine_id} sleeps: call wake() before update_weights().")
        async with self._update_lock:
            began = time.monotonic()
            if not self._paused:
                await self.pause("keep")
                self._resume_after_update = True
            was_mixed, self._mixed = self._mixed, True
            replies = await self._call(self._llm.collective_rpc("roll_update_weights", args=(pickle.dumps(update),)))
            errors = [reply["error"] for reply in replies if "error" in reply]
            if errors:
                self._mixed = was_mixed or not all(reply.get("intact", False) for reply in replies)
                if not self._mixed:
                    await self._end_update()
                raise WeightSyncError(errors[0])
            checksums = _agreed_checksums([reply["checksums"] for reply in replies], update.policy_version)
            await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
            await self._call(self._llm.update_weight_version(str(update.policy_version)))
            self._mixed = self._unsynced = False
            await self._end_update()
            return WeightReceipt(
                engine_id=self.engine_id,
                policy_version=update.policy_version,
                checksums=checksums,
                duration_s=time.monotonic() - began,
            )

    async def sleep(self) -> None:
        """Free the device's memory: weights and KV cache are dropped, running requests aborted.

        Raises:
            UnsupportedError: the engine runs on a CPU, or its spec does not set `sleeps`.
        """
        self._check_can_sleep()
        if not self._asleep:
            self._asleep = self._unsynced = True
            await self._call(self._llm.sleep(level=2, mode="abort"))

    async def wake(self) -> None:
        """Allocate the memory again; requests are rejected until the next update, because the weights are undefined."""
        self._check_can_sleep()
        await self._call(self._llm.wake_up())
        self._asleep = self._paused = False

    def load(self) -> EngineLoad:
        """Return the current load, from vLLM's own counts after its latest step."""
        num_requests = sum(self._running.values())
        stats = self._started.stats
        num_running = min(stats.num_running, num_requests)
        return EngineLoad(
            num_running=num_running,
            num_waiting=num_requests - num_running,
            kv_used=stats.kv_used if num_requests else 0.0,
            capacity=self._spec.max_num_seqs,
            num_steps=stats.num_steps,
        )

    def take_steps(self) -> list[EngineStepSpan]:
        """Return the engine's step timings since the last call."""
        return self._started.stats.steps.take()

    async def close(self) -> None:
        """End the engine's processes; requests that still run fail with `EngineDiedError`."""
        if self._closed:
            return
        self._closed = True
        if self._launch is None:
            return
        try:
            with suppress(Exception):  # a dead engine cannot abort, and its requests have failed already
                await self._llm.abort(list(self._running))
            await asyncio.sleep(0)  # lets aborted requests return before their queues are closed
        finally:  # also if this is canceled: close is not called again
            await asyncio.to_thread(self._launch.shutdown)

    async def _end_update(self) -> None:
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()

    async def _record_experts(self) -> None:
        """Make the workers record routing: vLLM itself does it on a device, but not on a CPU.

        Raises:
            ModelError: the model has no routers, or they do not report their choices.
        """
        call = self._llm.collective_rpc("roll_record_experts", args=(self._spec.max_num_seqs, not self._started.cpu))
        replies = await self._call(call)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            raise ModelError(
                f"training.router_replay is 'engine', and the vllm engine cannot give it for "
                f"'{self._spec.model_path}': {errors[0]}; set it to none, or inference.engine=hf"
            )
        self._routed_layers = replies[0]["layers"]

    async def _experts_of(self, request: GenerationRequest, output: RequestOutput) -> Any:
        """Return the experts chosen for the first n tokens of a request, shape [n, layers, k]."""
        if self._started.cpu:
            call = self._llm.collective_rpc("roll_take_experts", args=(request.request_id,))
            if (found := (await self._call(call))[0]) is None:
                return None
            dtype, shape, data = found
            return np.frombuffer(data, dtype).reshape(shape)
        routed = output.outputs[0].routed_experts
        return None if routed is None else np.asarray(routed)[:, self._routed_layers].astype(np.int16)

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The processes that serve this engine, for monitoring and measurements."""
        return self._started.processes

    @property
    def _started(self) -> Launch:
        if self._launch is None:
            raise InfraError(f"engine {self.engine_id} is used before start()")
        return self._launch

    @property
    def _llm(self) -> Any:
        return self._started.llm

    async def _run(
        self, request_id: str, token_ids: IntArray, params: SamplingParams, priority: int = 0
    ) -> RequestOutput:
        """Run one request through vLLM, with its errors converted to ROLL's."""
        from vllm.inputs.engine import tokens_input

        self._check_alive()
        if self._unsynced:
            raise WeightSyncError(f"engine {self.engine_id} has slept: sync its weights before it answers.")
        if not self._running:
            self._started.stats.steps.begin()
        self._running[request_id] = self._running.get(request_id, 0) + 1
        try:
            prompt = tokens_input(token_ids.tolist())
            final = None
            async for output in self._llm.generate(prompt, params, request_id, priority=priority):
                final = output
        except Exception as error:
            raise self._as_ours(error) from error
        finally:
            self._running[request_id] -= 1
            if not self._running[request_id]:
                del self._running[request_id]
        if self._closed:
            raise self._died("it was closed")
        assert final is not None
        return final

    async def _guard(self, call: Awaitable[T]) -> T:
        """Await a call, with its errors converted to ROLL's."""
        try:
            return await call
        except Exception as error:
            raise self._as_ours(error) from error

    async def _call(self, call: Awaitable[T]) -> T:
        """Await a call to EngineCore and watch its process: vLLM never completes the call of a dead process."""
        task = asyncio.ensure_future(self._guard(call))
        try:
            while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
                self._check_alive()
            return task.result()
        finally:
            task.cancel()

    def _check_alive(self) -> None:
        if self._closed:
            raise self._died("it was closed")
        if self._llm.errored:
            raise self._died()

    def _as_ours(self, error: Exception) -> Exception:
        if self._closed:
            return self._died("it was closed")
        if self._llm.errored:
            return self._died()
        return InfraError(f"engine {self.engine_id}: {type(error).__name__}: {error}")

    def _died(self, cause: str = "") -> EngineDiedError:
        return EngineDiedError(self.engine_id, cause or self._started.cause_of_death())

    def _check_can_sleep(self) -> None:
        if self._started.cpu:
            raise UnsupportedError(f"engine {self.engine_id}: vLLM cannot sleep on a CPU; its memory stays taken.")
        if not self._spec.sleeps:
            raise UnsupportedError(f"engine {self.engine_id} was not built to sleep.")


def _forget(work: asyncio.Future[Launch]) -> None:
    """Shut down a launch that finished although its caller was canceled."""
    if not work.cancelled() and work.exception() is None:
        work.result().shutdown()


def _agreed_checksums(replies: list[dict[str, int]], policy_version: int) -> dict[str, int]:
    """Return the checksums that all workers of the engine agree on."""
    first = replies[0]
    for name, checksum in first.items():
        if any(other.get(name) != checksum for other in replies[1:]):
            raise WeightSyncError(
                f"weight sync of policy version {policy_version}: workers of one engine received different bytes "
                f"for '{name}'."
            )
    return first
