"""vLLM's AsyncLLM behind ROLL's engine protocol; the same code runs on CPUs and accelerators.

Data flow:  generate() ─► AsyncLLM (this process) ─ zmq ─► EngineCore (child process, with the worker in it, or with one
            worker process per device under tensor parallelism) ─ tokens, log-probs, weight version ─► Generation

Invariants
- Every accepted request ends exactly once: with a complete Generation, a partial Generation (`abort`), or an error.
- A token has the policy version of the weights that generated it: weights change only while the scheduler is paused.
- After an update, no KV cache of older weights is used: the prefix cache is dropped. When decoding resumes, running
  requests keep their tokens and recompute their keys and values with the new weights.
- After a failed update, the engine stays paused until another update succeeds: no token is generated with mixed
  weights.
- The engine's processes end with this process, however it ends (`child`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
import uuid
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from roll.errors import EngineDiedError, InfraError, UnsupportedError, WeightSyncError
from roll.inference.prefetching import PrefetchMixin
from roll.inference.request_checks import check_length, check_tokens
from roll.inference.spec import EngineSpec
from roll.inference.vllm.adapters import EngineAdapters
from roll.inference.vllm.conversion import (
    INITIAL_VERSION,
    build_sampling_params,
    build_scoring_params,
    merge_checksums,
    to_generation,
    to_logprobs,
)
from roll.inference.vllm.experts import ExpertReader
from roll.inference.vllm.launch import VLLMServer, cancel_launch, launch, shut_down_abandoned
from roll.inference.vllm.media import build_prompt, check_expanded
from roll.inference.vllm.prefork import claim_process
from roll.models.multimodal import MediaInputs
from roll.protocols import PauseMode
from roll.running import run_in_thread
from roll.types import (
    EngineLoad,
    EngineStepSpan,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    MediaSpan,
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
_Media: TypeAlias = Sequence[MediaSpan]

DEATH_POLL_S = 0.25
_PAUSE_MODES = {"keep": "keep", "abort": "abort", "drain": "wait"}


class VLLMEngine(PrefetchMixin):
    """The `vllm` engine; implements `InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine_id = spec.engine_id
        self._spec = spec
        self._launch: VLLMServer | None = None
        self._running: dict[str, int] = {}
        """The number of running calls, by request id."""
        self._paused = self._closed = self._asleep = self._mixed = False
        """`_mixed` is True if an update changed some weights and did not finish."""
        self._adapters = EngineAdapters(spec)
        self._unsynced = "" if spec.lora is None else "has received no adapter yet"
        """Why the engine has no usable weights; empty if it has."""
        self._resume_after_update = False
        """True if the engine was paused by the update instead of the caller."""
        self._update_lock = asyncio.Lock()
        self._media: MediaInputs | None = None
        self._experts: ExpertReader | None = None

    async def start(self) -> None:
        """Load the model; if the call is canceled, kill the processes that it started.

        Raises:
            ModelError: vLLM rejects the model or the settings.
            EngineDiedError: vLLM's process ended while it loaded.
        """
        # A preforked process was started without stdout, so it can be used only for an engine with a log file.
        preforked = claim_process(self._spec.num_threads) if self._spec.log_path is not None else None
        name = uuid.uuid4().hex if preforked is None else preforked.name
        work = asyncio.ensure_future(run_in_thread(launch, self._spec, name, preforked))
        try:
            # Shielded: the thread cannot be canceled, but it fails as soon as `cancel_launch` has killed its processes.
            self._launch = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(cancel_launch, name)
            work.add_done_callback(shut_down_abandoned)
            raise
        await self._rpc(self._llm.update_weight_version(str(INITIAL_VERSION)))
        for resources in await self._call_workers("roll_list_resources"):
            self._launch.add_resources(set(resources["processes"]) - {os.getpid()}, resources["files"])
        if self._spec.records_experts:
            self._experts = ExpertReader(self._spec, self._call_workers, cpu=self._server.cpu)
            await self._experts.start()
        self._media = self._spec.open_media()
        logger.info("engine %s: vLLM serves %s", self.engine_id, self._spec.model_path)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request until it finishes; an aborted request returns the tokens generated so far.

        Raises:
            UnsupportedError: the request names an adapter but the engine has none, or has unsupported media.
            DataError: the request does not fit the context, has tokens outside the vocabulary, or names an unknown
                adapter.
            EngineDiedError: the engine has died.
        """
        check_tokens(f"request {request.request_id}", request.token_ids, self._server.vocab_size)
        check_length(request, self._spec.max_context)
        params = build_sampling_params(request, () if self._media is None else self._media.processor.replaced_tokens)
        output = await self._run_request(
            request.request_id, request.token_ids, params, request.media, request.priority, request.adapter
        )
        experts = None if self._experts is None else await self._experts.read(request, output)
        get_version = partial(self._adapters.get_version, request.adapter)
        return to_generation(request, output, self.engine_id, experts, get_version)

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence at temperature 1; entry 0 is 0. Wait while the engine is paused."""
        for index, sequence in enumerate(sequences):
            check_tokens(f"sequence {index}", sequence, self._server.vocab_size)
        stamp = time.monotonic_ns()
        with self._server.stats.steps.pause_recording():
            given = enumerate(zip(sequences, media or [()] * len(sequences), strict=True))
            params = build_scoring_params()
            asked = (
                self._run_request(f"logprobs-{stamp}-{i}", seq, params, spans, adapter=adapter)
                for i, (seq, spans) in given
            )
            return [to_logprobs(output) for output in await asyncio.gather(*asked)]

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._running]
        if known:
            await self._convert_errors(self._llm.abort(known))

    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding and queue new requests. `PauseMode` defines what happens to running requests."""
        await self._rpc(self._llm.pause_generation(mode=_PAUSE_MODES[mode], clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        """Resume decoding.

        Raises:
            WeightSyncError: the latest update failed midway, so the weights are a mixture of old and new ones.
        """
        if self._mixed:
            raise WeightSyncError(
                f"engine '{self.engine_id}' has a mixture of old and new weights: run another weight sync first."
            )
        await self._rpc(self._llm.resume_generation())
        self._paused = False
        self._server.stats.steps.begin()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Receive and apply new weights in every worker. Running requests are paused during the update.

        Raises:
            WeightSyncError: a tensor is missing, unknown, has the wrong shape, or was not applied.
        """
        target = self._adapters.build_target(update.adapter)
        if update.transport == "in_process":
            raise WeightSyncError(
                "transport in_process is not supported by the vllm engine, because its workers run in other "
                "processes: set weight_sync.transport to shared_memory, broadcast or store."
            )
        if self._asleep:
            raise WeightSyncError(f"engine '{self.engine_id}' is asleep: call wake() before update_weights().")
        async with self._update_lock:
            began = time.monotonic()
            if not self._paused:
                await self.pause("keep")
                self._resume_after_update = True
            # Set before the call: if the workers die or the call is canceled, it is unknown which weights have changed.
            was_mixed, self._mixed = self._mixed, True
            replies = await self._call_workers("roll_update_weights", pickle.dumps((update, target)))
            if errors := [reply["error"] for reply in replies if "error" in reply]:
                self._mixed = was_mixed or not all(reply.get("intact", False) for reply in replies)
                if not self._mixed:
                    await self._end_update()
                raise WeightSyncError(errors[0])
            checksums = merge_checksums([reply["checksums"] for reply in replies], update.policy_version)
            # Cached keys and values belong to the old weights; running requests keep their tokens and recompute them.
            await self._rpc(self._llm.reset_prefix_cache(reset_running_requests=True))
            if self._media is not None:
                await self._rpc(self._llm.reset_encoder_cache())  # it holds features of the old vision tower
            version = self._adapters.confirm_update(update, target)
            await self._rpc(self._llm.update_weight_version(version))
            self._mixed, self._unsynced = False, ""
            await self._end_update()
            return WeightReceipt(
                engine_id=self.engine_id,
                policy_version=update.policy_version,
                checksums=checksums,
                duration_s=time.monotonic() - began,
                adapter=update.adapter,
            )

    async def applied_checksums(self) -> Mapping[str, int] | None:
        """Return the checksums of quantized weights and scales; other weights are packed and cannot be read back."""
        can_read = self._spec.quantization != "none" and self._spec.tensor_parallel == 1
        return (await self._call_workers("roll_read_checksums"))[0] if can_read else None

    async def sleep(self) -> None:
        """Free the device memory: drop weights and KV cache, and abort running requests.

        Raises:
            UnsupportedError: the engine runs on a CPU, or its spec does not set `sleeps`.
        """
        self._check_can_sleep()
        if not self._asleep:
            self._asleep, self._unsynced = True, "lost its weights while asleep"
            # Updates that contain only an adapter need the frozen weights, which level 1 keeps in host memory.
            await self._rpc(self._llm.sleep(level=2 if self._spec.lora is None else 1, mode="abort"))

    async def wake(self) -> None:
        """Allocate device memory again after `sleep`. Requests are rejected until the next weight update."""
        self._check_can_sleep()
        await self._rpc(self._llm.wake_up())
        self._asleep = self._paused = False

    def load(self) -> EngineLoad:
        """Return the engine's load: its requests, and the statistics of vLLM's latest step."""
        num_requests = sum(self._running.values())
        stats = self._server.stats
        return EngineLoad(  # vLLM's counts are from its latest step, ours is current
            num_running=min(stats.num_running, num_requests),
            num_waiting=max(0, num_requests - stats.num_running),
            kv_used=stats.kv_used if num_requests else 0.0,
            capacity=self._spec.max_num_seqs,
            kv_capacity=stats.kv_capacity,
            num_steps=stats.num_steps,
            num_preempted=stats.num_preempted,
        )

    def take_steps(self) -> list[EngineStepSpan]:
        """Return the spans of the engine's steps since the last call."""
        return self._server.stats.steps.take()

    async def close(self) -> None:
        """End the engine's processes; running requests raise `EngineDiedError`."""
        was_closed, self._closed = self._closed, True
        if was_closed or self._launch is None:
            return
        try:
            with suppress(Exception):  # a dead engine cannot abort requests, and they have already failed
                await self._llm.abort(list(self._running))
            await asyncio.sleep(0)  # lets aborted requests return before their queues are closed
        finally:  # even if this call is canceled: close is not called again
            self.delete_local_weights()
            await asyncio.to_thread(self._launch.shutdown)

    async def _end_update(self) -> None:
        if self._resume_after_update:
            self._resume_after_update = False
            await self.resume()

    async def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, and return the replies."""
        return await self._rpc(self._llm.collective_rpc(method, args=arguments))

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The processes of this engine, for monitoring and measurements."""
        return self._server.processes

    @property
    def _server(self) -> VLLMServer:
        if self._launch is None:
            raise InfraError(f"engine '{self.engine_id}' has not been started: call start() first.")
        return self._launch

    @property
    def _llm(self) -> Any:
        return self._server.llm

    async def _run_request(
        self,
        request_id: str,
        token_ids: IntArray,
        params: SamplingParams,
        media: _Media = (),
        priority: int = 0,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Run one request in vLLM, and convert vLLM's errors to ROLL's."""
        prompt = await build_prompt(self._llm, self._convert_errors, self._media, token_ids, media)
        self._check_alive()
        if self._unsynced:
            raise WeightSyncError(f"engine '{self.engine_id}' {self._unsynced}: run a weight sync first.")
        lora = self._adapters.build_request(adapter)
        if not self._running:
            self._server.stats.steps.begin()
        self._running[request_id] = self._running.get(request_id, 0) + 1
        try:
            final = None
            async for output in self._llm.generate(prompt, params, request_id, priority=priority, lora_request=lora):
                final = output
        except Exception as error:
            raise self._convert_error(error) from error
        finally:
            self._running[request_id] -= 1
            if not self._running[request_id]:
                del self._running[request_id]
        if self._closed:  # vLLM returns the partial output of a request that `close` aborted
            raise self._build_death_error()
        assert final is not None
        if media:
            check_expanded(final.prompt_token_ids, token_ids, f"engine '{self.engine_id}', request {request_id}")
        return final

    async def _convert_errors(self, call: Awaitable[T]) -> T:
        """Await a call to vLLM, and convert its errors to ROLL's."""
        try:
            return await call
        except Exception as error:
            raise self._convert_error(error) from error

    async def _rpc(self, call: Awaitable[T]) -> T:
        """Await a call to EngineCore; raise `EngineDiedError` if its process dies."""
        task = asyncio.ensure_future(self._convert_errors(call))
        try:
            # vLLM never completes a call to a dead process, so the process is polled.
            while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
                self._check_alive()
            return task.result()
        finally:
            task.cancel()

    def _check_alive(self) -> None:
        if self._closed or self._llm.errored:
            raise self._build_death_error()

    def _convert_error(self, error: Exception) -> Exception:
        # Calls to a dead process fail with various errors, which all mean that the engine died.
        if self._closed or self._llm.errored:
            return self._build_death_error()
        return InfraError(f"engine '{self.engine_id}': a call to vLLM failed: {type(error).__name__}: {error}")

    def _build_death_error(self) -> EngineDiedError:
        return EngineDiedError(self.engine_id, "it was closed" if self._closed else self._server.find_cause_of_death())

    def _check_can_sleep(self) -> None:
        if self._server.cpu:
            raise UnsupportedError(f"engine '{self.engine_id}' cannot sleep: on a CPU, vLLM cannot free its memory.")
        if not self._spec.sleeps:
            raise UnsupportedError(f"engine '{self.engine_id}' cannot sleep: set `sleeps` in its EngineSpec.")
