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
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from roll.errors import (
    EngineDiedError,
    InfraError,
    UnsupportedError,
    WeightSyncError,
    one_line_error,
)
from roll.inference.prefetching import PrefetchMixin
from roll.inference.sglang.adapters import EngineAdapters, ServedAdapter, unload_left_adapters
from roll.inference.sglang.client import SGLangClient
from roll.inference.sglang.conversion import (
    build_request,
    build_scoring_request,
    get_rest,
    is_aborted,
    join_parts,
    make_aborted,
    set_version,
    to_error,
    to_generation,
    to_logprobs,
)
from roll.inference.sglang.launch import Server, build_arguments, find_free_port
from roll.inference.sglang.pause_queue import PauseQueue
from roll.inference.sglang.running_requests import RunningRequests
from roll.inference.sglang.server_info import check_server, fetch_info, read_kv_capacity
from roll.inference.sglang.weights import check_update, create_weights_dir, write_weights
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
        self._update_lock, self._pause_lock = asyncio.Lock(), asyncio.Lock()
        self._resumes_after_update = False
        """True if an update has paused the engine, so that this or the next update resumes it."""

    async def start(self) -> None:
        """Start the server, unless `inference.options.url` names one, and wait until it is ready.

        Raises:
            ModelError: The server cannot be started, ends before it is ready, or serves another model.
        """
        try:
            if not self._url:
                port = find_free_port()
                arguments = await asyncio.to_thread(build_arguments, self._spec, port)
                self._check_not_closed()
                # Not in a thread, which would start a server even after this call is canceled.
                self._server = Server(self._spec, arguments, port)
                self._url = self._server.url
            self._client = SGLangClient(self.engine_id, self._url, self._server)
            await self._client.wait_until_ready()
            info = await fetch_info(self._client.session, self._url, self.engine_id)
            check_server(info, self._spec, self._url)
            if self._adapters.enabled and self._server is None:
                await unload_left_adapters(self._client)
            self._kv_capacity = read_kv_capacity(info)
            self._vocab_size = (await asyncio.to_thread(describe_model, self._spec.model_path)).vocab_size
            self._check_not_closed()
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
            EngineDiedError: The server ended, or lost the request's adapter.
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
            if not continues or part.finish_reason != "abort":
                return join_parts(parts)

    async def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), *, adapter: str | None = None
    ) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence at temperature 1; entry 0 is 0. Wait while the engine is paused.

        Raises:
            DataError: A sequence is too long or has a token outside the vocabulary, or the engine has no adapter of
                this name.
            UnsupportedError: A sequence has media.
        """
        if any(media):
            raise UnsupportedError("the engine sglang supports text only: use the engine vllm.")
        stamp = time.monotonic_ns()
        limits = self._spec.max_context, self._vocab_size
        bodies = [build_scoring_request(f"{i}", tokens, *limits) for i, tokens in enumerate(sequences)]

        async def score(name: str, body: dict[str, Any]) -> FloatArray:
            while True:
                if await self._pause_queue.wait(name):  # a pause ends generations only
                    reply, continues = await self._run(name, body, self._adapters.get_served(adapter))
                    if not continues and not (self._pause_queue.is_paused and is_aborted(reply)):
                        return to_logprobs(reply, len(body["input_ids"]), self.engine_id)

        return await asyncio.gather(*(score(f"logprobs-{stamp}-{i}", body) for i, body in enumerate(bodies)))

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort requests immediately; unknown ids are ignored.

        A request that was running when the server was paused may lose the tokens that it has generated.
        """
        self._pause_queue.abort(request_ids)
        await self._running.abort(self._connection, request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Pause decoding and queue new requests. `PauseMode` defines what happens to running requests."""
        async with self._pause_lock:
            await self._pause(mode)

    async def resume(self) -> None:
        """Resume decoding.

        Raises:
            WeightSyncError: The latest update failed midway.
        """
        async with self._pause_lock:
            await self._resume()

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
            self._check_not_closed()
            options = self._spec.options
            self._weights_dir = self._weights_dir or create_weights_dir(options.get("weights_dir"), self.engine_id)
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
        _check_can_sleep(self._spec)
        if not self._asleep:
            await self.pause("abort")
            await self._connection.call("/release_memory_occupation", {})
            self._adapters.clear()
            self._asleep, self._unusable = True, "lost its weights while asleep"

    async def wake(self) -> None:
        """Allocate device memory again after `sleep`. Requests are rejected until the next weight update."""
        _check_can_sleep(self._spec)
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
        finally:  # even if this call is canceled: close is not called again
            self.delete_local_weights()
            if self._weights_dir is not None:
                shutil.rmtree(self._weights_dir, ignore_errors=True)

    async def _apply_weights(self, update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
        """Replace the weights of the model; return the checksums of the received bytes."""
        await asyncio.to_thread(check_update, update, self._spec.model_path)
        checksums = await asyncio.to_thread(write_weights, update, directory, dtype)
        async with self._pause_for_update():
            body = {"model_path": str(directory), "flush_cache": True, "keep_pause": True}
            body["weight_version"] = str(update.policy_version)
            try:
                await self._connection.load("/update_weights_from_disk", body, update.policy_version)
            except BaseException:
                self._unusable = "has a mixture of old and new weights"
                raise
            self._unusable = ""
        return checksums

    async def _apply_adapter(self, update: WeightUpdate, directory: Path, dtype: torch.dtype) -> Mapping[str, int]:
        """Add or replace an adapter; return the checksums of the received bytes. If it fails, the old one remains."""
        await asyncio.to_thread(self._adapters.check_update, update)
        # Those of failed updates: with too many adapters, the server unloads those that no request has used for long.
        await self._adapters.unload_unused(self._connection)
        name = self._adapters.create_name()
        files = directory / name
        try:
            checksums = await asyncio.to_thread(self._adapters.write, update, files, dtype)
            await self._connection.load(
                "/load_lora_adapter", {"lora_name": name, "lora_path": str(files)}, update.policy_version
            )
        finally:  # SGLang would load an unloaded adapter again if a request named it
            shutil.rmtree(files, ignore_errors=True)
        async with self._pause_for_update():
            self._adapters.confirm_update(update, name)
            self._unusable = ""
        try:
            await self._adapters.unload_unused(self._connection)
        except InfraError as error:  # the new adapter is in use; the next update unloads the old one
            if isinstance(error, EngineDiedError):
                raise
            logger.warning("%s", one_line_error(error))
        return checksums

    async def _pause(self, mode: PauseMode) -> None:
        was_paused = self._pause_queue.is_paused
        self._pause_queue.pause()
        self._resumes_after_update = False
        try:
            while mode == "drain" and self._running:
                await asyncio.sleep(POLL_S)
            if self._adapters.enabled:
                await self._running.end_all(self._connection, interrupt=mode == "keep")
            else:
                await self._connection.call("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})
            if mode == "abort":
                self._pause_queue.abort()
        except BaseException:
            if not was_paused:
                self._pause_queue.resume()
            raise

    @asynccontextmanager
    async def _pause_for_update(self) -> AsyncIterator[None]:
        """Pause the engine, if it is not paused yet. After a failure it stays paused until the next update."""
        async with self._pause_lock:
            if not self._pause_queue.is_paused:
                await self._pause("keep")
                self._resumes_after_update = True
            yield
            if self._resumes_after_update:
                await self._resume()

    async def _resume(self) -> None:
        self._check_weights()
        await self._connection.call("/continue_generation", {})
        self._resumes_after_update = False
        self._pause_queue.resume()

    async def _run(
        self, request_id: str, body: dict[str, Any], adapter: ServedAdapter | None
    ) -> tuple[dict[str, Any], bool]:
        """Run one request of `/generate`; return the reply, and whether the request continues after a pause."""
        self._check_weights()
        if adapter is not None:
            body = {**body, "lora_path": adapter.name}
        status, reply, continues = await self._running.send(self._connection, request_id, body)
        if status == 200:
            return reply, continues
        raise to_error(status, reply, body, request_id, self.engine_id)

    @property
    def _connection(self) -> SGLangClient:
        if self._client is None:
            raise InfraError(f"engine '{self.engine_id}' has not been started: call start() first.")
        return self._client

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineDiedError(self.engine_id, "it was closed")

    def _check_weights(self) -> None:
        self._check_not_closed()
        if self._unusable:
            raise WeightSyncError(f"engine '{self.engine_id}' {self._unusable}: run a weight sync first.")


def _check_can_sleep(spec: EngineSpec) -> None:
    if not spec.sleeps:
        raise UnsupportedError(
            f"engine '{spec.engine_id}' cannot sleep: it was started without `sleeps` in its spec, which starts the "
            "server with its memory saver."
        )
