"""An inference engine that sends its requests to an SGLang server over HTTP.

generate, logprobs   POST /generate, tokens in and tokens out
pause, resume        POST /pause_generation (`retract`: the KV cache is computed again), /continue_generation
update_weights       weights as files ─► POST /update_weights_from_disk, which flushes the cache
                     an adapter as files ─► POST /load_lora_adapter under a new name (see `adapters`)
sleep, wake          POST /release_memory_occupation, /resume_memory_occupation
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roll.errors import DataError, InfraError, ModelError, UnsupportedError, WeightSyncError
from roll.inference.prefetching import PrefetchMixin
from roll.inference.sglang.adapters import EngineAdapters, ServedAdapter
from roll.inference.sglang.client import CONTROL_TIMEOUT_S, SGLangClient
from roll.inference.sglang.conversion import (
    build_request,
    build_scoring_request,
    get_rest,
    is_aborted,
    join_parts,
    make_aborted,
    set_version,
    to_generation,
    to_logprobs,
    to_server_id,
)
from roll.inference.sglang.launch import Server
from roll.inference.sglang.pause_queue import PauseQueue
from roll.inference.sglang.running_requests import RunningRequests
from roll.inference.sglang.server_info import check_server, fetch_info, read_kv_capacity
from roll.inference.sglang.weights import check_update, create_weights_dir, delete_files, write_weights
from roll.inference.spec import EngineSpec, reject_adapter
from roll.models.describe import describe_model
from roll.protocols import PauseMode
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

__all__ = ["SGLangEngine"]

logger = logging.getLogger(__name__)

POLL_S = 0.05
ABORT_ATTEMPTS = 40


class SGLangEngine(PrefetchMixin):
    """The `sglang` engine; implements `InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.engine_id = spec.engine_id
        self._spec = spec
        self._server: Server | None = None
        self._url = str(spec.options["url"]).rstrip("/") if spec.options.get("url") else ""
        self._client: SGLangClient | None = None
        self._weights_dir: Path | None = None
        self._adapters = EngineAdapters(spec)
        self._running = RunningRequests()
        self._kv_capacity: int | None = None
        self._vocab_size = 0
        self._closed = self._asleep = False
        self._pause_queue = PauseQueue()
        self._unusable = "has received no adapter yet" if self._adapters.enabled else ""
        """The reason why the engine has no usable weights; empty if it has."""
        self._update_lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the server, unless `inference.options.url` names one, and wait until it is ready.

        Raises:
            ModelError: The server cannot be started, ends before it is ready, or serves another model.
        """
        if not self._url:
            try:
                self._server = await asyncio.to_thread(Server, self._spec)
            except OSError as error:
                raise ModelError(
                    f"engine '{self.engine_id}': '{self._spec.options.get('python')}' cannot be started "
                    f"({error.strerror}): set inference.options.python to the Python of an environment with SGLang."
                ) from error
            self._url = self._server.url
        self._client = SGLangClient(self.engine_id, self._url, self._server)
        try:
            await self._client.wait_until_ready()
            info = await fetch_info(self._client.session, self._url, self.engine_id)
            check_server(info, self._spec, self._url)
            self._kv_capacity = read_kv_capacity(info)
            self._vocab_size = (await asyncio.to_thread(describe_model, self._spec.model_path)).vocab_size
        except BaseException:  # a canceled start must not leave a server
            await self.close()
            raise
        logger.info("engine %s: SGLang at %s serves %s", self.engine_id, self._url, self._spec.model_path)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Run one request until it finishes; an aborted request returns the tokens generated so far.

        Raises:
            DataError: The request does not fit the context or the vocabulary, or the server rejects it.
            UnsupportedError: The request has an adapter, media, choices, top-k or top-p, or the server ended it at a
                token that is not one of its stop tokens.
            EngineDiedError: The server ended.
        """
        build_request(request, self._spec.max_context, self._vocab_size)
        self._check_weights()
        parts: list[Generation] = []
        while True:
            rest = get_rest(request, parts)
            if not await self._pause_queue.wait(request.request_id):
                return join_parts([*parts, make_aborted(rest, self.engine_id)])
            served = self._adapters.get_served(request.adapter)
            body = build_request(rest, self._spec.max_context, self._vocab_size)
            reply, continues = await self._run(request.request_id, body, served)
            part = to_generation(rest, reply, self.engine_id)
            if served is not None:
                part = set_version(part, served.policy_version)
            parts.append(part)
            if not continues:
                return join_parts(parts)

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence at temperature 1; entry 0 is 0. Wait while the engine is paused.

        Raises:
            DataError: A token is outside the vocabulary, or the engine has no adapter of this name.
            UnsupportedError: A sequence has media.
        """
        if any(media):
            raise UnsupportedError("the engine sglang supports text only: use the engine vllm.")
        stamp = time.monotonic_ns()

        async def score(name: str, sequence: IntArray) -> FloatArray:
            body = build_scoring_request(name, sequence, self._vocab_size)
            while True:
                await self._pause_queue.wait(name)
                reply, continues = await self._run(name, body, self._adapters.get_served(adapter))
                if not continues:
                    return to_logprobs(reply, len(sequence), self.engine_id)

        return await asyncio.gather(*(score(f"logprobs-{stamp}-{i}", sequence) for i, sequence in enumerate(sequences)))

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately; unknown ids are ignored.

        A request that was running when the server was paused may lose the tokens that it has generated.
        """
        self._pause_queue.abort(request_ids)
        self._running.abort(request_ids)
        call, names = self._connection.call, {*request_ids}
        for _ in range(ABORT_ATTEMPTS):  # the server ignores the abort of a request that has not arrived yet
            await asyncio.gather(*(call("/abort_request", {"rid": to_server_id(name)}) for name in names))
            if not (names := self._running.select(names)):
                break
            await asyncio.sleep(POLL_S)

    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding and queue new requests. `PauseMode` defines what happens to running requests."""
        was_paused = self._pause_queue.is_paused
        self._pause_queue.pause()
        try:
            while mode == "drain" and self._running:
                await asyncio.sleep(POLL_S)
            if self._adapters.enabled:
                await self._end_running(mode)
            else:
                await self._connection.call("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})
        except BaseException:
            if not was_paused:
                self._pause_queue.resume()
            raise

    async def resume(self) -> None:
        """Resume decoding.

        Raises:
            WeightSyncError: The latest update failed midway.
        """
        self._check_weights()
        await self._connection.call("/continue_generation", {})
        self._pause_queue.resume()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Receive new weights and let the server load them from files. Running requests are paused meanwhile.

        The checksums of the receipt are those of the received bytes; the probe after a sync compares what the server
        computes with them.

        Raises:
            WeightSyncError: A tensor is missing, unknown, or has the wrong shape, or the server cannot load the files.
        """
        if update.transport == "in_process":
            raise WeightSyncError("transport in_process is not supported by the engine sglang.")
        if not self._adapters.enabled:
            reject_adapter("sglang", update.adapter)
        if self._asleep:
            raise WeightSyncError(f"engine '{self.engine_id}' is asleep: call wake() before update_weights().")
        async with self._update_lock:
            began = time.monotonic()
            if self._weights_dir is None:
                self._weights_dir = create_weights_dir(self._spec.options.get("weights_dir"), self.engine_id)
            apply = self._apply_adapter if self._adapters.enabled else self._apply_weights
            checksums = await apply(update, self._weights_dir, getattr(torch, self._spec.dtype))
            return WeightReceipt(
                engine_id=self.engine_id,
                policy_version=update.policy_version,
                adapter=update.adapter,
                checksums=checksums,
                duration_s=time.monotonic() - began,
            )

    async def sleep(self) -> None:
        """Free the device memory: drop weights and KV cache, and abort running requests.

        Raises:
            UnsupportedError: The spec does not set `sleeps`, so the server has no memory saver.
        """
        self._check_can_sleep()
        if not self._asleep:
            await self.pause("abort")
            await self._connection.call("/release_memory_occupation", {})
            self._adapters.clear()
            self._asleep, self._unusable = True, "lost its weights while asleep"

    async def wake(self) -> None:
        """Allocate device memory again after `sleep`. Requests are rejected until the next weight update."""
        self._check_can_sleep()
        await self._connection.call("/resume_memory_occupation", {})
        await self._connection.call("/continue_generation", {})
        self._asleep = False
        self._pause_queue.resume()

    def load(self) -> EngineLoad:
        """Return the engine's load, from the requests that this process has sent."""
        running = min(len(self._running), self._spec.max_num_seqs)
        return EngineLoad(
            num_running=running,
            num_waiting=len(self._running) - running + len(self._pause_queue),
            kv_used=0.0,
            capacity=self._spec.max_num_seqs,
            kv_capacity=self._kv_capacity,
        )

    async def close(self) -> None:
        """End the server that this engine started; running requests raise `EngineDiedError`."""
        was_closed, self._closed = self._closed, True
        self._pause_queue.resume()
        if was_closed:
            return
        try:
            if self._client is not None:
                await self._client.close()
        finally:
            self.delete_local_weights()
            if self._server is not None:
                await asyncio.to_thread(self._server.close)
            if self._weights_dir is not None:
                shutil.rmtree(self._weights_dir, ignore_errors=True)

    async def _apply_weights(self, update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
        """Replace the weights of the model; return the checksums of the received bytes."""
        await asyncio.to_thread(check_update, update, self._spec.model_path)
        checksums = await asyncio.to_thread(write_weights, update, directory, dtype)
        if not (was_paused := self._pause_queue.is_paused):
            await self.pause("keep")
        self._unusable = "has a mixture of old and new weights"
        body = {
            "model_path": str(directory),
            "flush_cache": True,
            "weight_version": str(update.policy_version),
            "keep_pause": True,
        }
        await self._load("/update_weights_from_disk", body, update)
        self._unusable = ""
        if not was_paused:
            await self.resume()
        return checksums

    async def _apply_adapter(self, update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
        """Add or replace an adapter; return the checksums of the received bytes. If it fails, the old one remains."""
        await asyncio.to_thread(self._adapters.check_update, update)
        checksums = await asyncio.to_thread(self._adapters.write, update, directory, dtype)
        name = self._adapters.create_name()
        try:
            await self._load("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}, update)
        finally:
            delete_files(directory)  # SGLang would load an unloaded adapter again if a request named it
        if not (was_paused := self._pause_queue.is_paused):
            await self.pause("keep")
        replaced = self._adapters.confirm_update(update, name)
        self._unusable = ""
        if not was_paused:
            await self.resume()
        for old in replaced:
            await self._connection.call("/unload_lora_adapter", {"lora_name": old})
        return checksums

    async def _load(self, path: str, body: dict[str, Any], update: WeightUpdate) -> None:
        """Let the server load an update from files."""
        status, reply = await self._connection.post(path, body, CONTROL_TIMEOUT_S)
        if status != 200 or not reply.get("success"):
            raise WeightSyncError(
                f"engine '{self.engine_id}': SGLang cannot load policy version {update.policy_version}: "
                f"{reply.get('message') or reply.get('error_message') or reply}"
            )

    async def _end_running(self, mode: PauseMode) -> None:
        """Abort all requests; those of the mode `keep` continue after the pause, with the adapter of that time."""
        if mode == "keep":
            self._running.interrupt()
        while self._running:  # a request that is sent right now does not notice the first call
            await self._connection.call("/abort_request", {"abort_all": True})
            await asyncio.sleep(POLL_S)

    async def _run(
        self, request_id: str, body: dict[str, Any], adapter: ServedAdapter | None
    ) -> tuple[dict[str, Any], bool]:
        """Run one request of `/generate`; return the reply, and whether the request continues after a pause."""
        self._check_weights()
        if adapter is not None:
            body = {**body, "lora_path": adapter.name}
        with self._running.track(request_id) as running:
            status, reply = await self._connection.post("/generate", body, None)
        if status == 200:
            return reply, running.continues and is_aborted(reply)
        message = reply.get("error", reply)
        text = message.get("message", message) if isinstance(message, dict) else message
        kind = DataError if 400 <= status < 500 else InfraError
        raise kind(f"engine '{self.engine_id}': SGLang rejected request '{body['rid']}' (HTTP {status}): {text}")

    @property
    def _connection(self) -> SGLangClient:
        if self._client is None:
            raise InfraError(f"engine '{self.engine_id}' has not been started: call start() first.")
        return self._client

    def _check_weights(self) -> None:
        if self._unusable:
            raise WeightSyncError(f"engine '{self.engine_id}' {self._unusable}: run a weight sync first.")

    def _check_can_sleep(self) -> None:
        if not self._spec.sleeps:
            raise UnsupportedError(
                f"engine '{self.engine_id}' cannot sleep: it was started without `sleeps` in its spec, which starts "
                "the server with its memory saver."
            )
