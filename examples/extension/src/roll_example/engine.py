"""Your own engine: `transformers`, token by token, without a KV cache.

    roll train examples/quickstart.yaml inference.engine=examples/extension/src/roll_example/engine.py:PlainEngine

The engine is slow, but has every method that a run needs: see `roll.protocols.InferenceEngine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from roll.errors import UnsupportedError
from roll.inference import EngineCapabilities, EngineSpec
from roll.models import load_causal_lm
from roll.types import EngineLoad, Generation, GenerationRequest, SamplingParams, WeightReceipt, WeightUpdate
from roll.weights import open_update


class PlainEngine:
    """An engine that computes one token of one request at a time, in a separate thread."""

    capabilities = EngineCapabilities(shares_process=True, quantized_sync=False)

    def __init__(self, spec: EngineSpec) -> None:
        self.engine_id = spec.engine_id
        self._spec = spec
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.engine_id)
        self._decodes = asyncio.Event()
        self._decodes.set()
        self._aborted: dict[str, bool] = {}
        self._idle = asyncio.Condition()
        self._policy_version = self._num_steps = 0

    async def _compute(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def start(self) -> None:
        """Load the model."""
        self._model = await self._compute(self._load)

    def _load(self) -> Any:
        # ROLL's loader has a lock, because `transformers` cannot load two models in one process at the same time.
        return load_causal_lm(self._spec.model_path, self._spec.dtype)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample tokens until a stop token, `max_new_tokens`, or an abort."""
        tokens, logprobs, versions = list(request.token_ids), [], []
        sampling, reason = request.sampling, "length"
        generator = torch.Generator().manual_seed(self._spec.seed if sampling.seed is None else sampling.seed)
        self._aborted[request.request_id] = False
        try:
            while len(logprobs) < sampling.max_new_tokens:
                await self._decodes.wait()
                if self._aborted[request.request_id]:
                    reason = "abort"
                    break
                token, logprob, version = await self._compute(self._step, tokens, sampling, generator)
                tokens.append(token), logprobs.append(logprob), versions.append(version)
                if token in sampling.stop_token_ids:
                    reason = "stop"
                    break
        finally:
            del self._aborted[request.request_id]
            async with self._idle:
                self._idle.notify_all()
        return Generation(
            request_id=request.request_id,
            token_ids=np.array(tokens[len(request.token_ids) :], np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_versions=np.array(versions, np.int32),
            finish_reason=reason,
            engine_id=self.engine_id,
        )

    @torch.inference_mode()
    def _step(self, tokens: Sequence[int], sampling: SamplingParams, generator: Any) -> tuple[int, float, int]:
        logits = self._model(torch.tensor([tokens])).logits[0, -1].float()
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        greedy = sampling.temperature == 0
        token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
        self._num_steps += 1
        return token, float(logprobs[token]), self._policy_version

    async def logprobs(self, sequences: Sequence[Any], media: Any = ()) -> list[Any]:
        """Return the log-prob of every token. `media` is empty, because `capabilities` declares no image support."""
        return [await self._compute(self._score, sequence) for sequence in sequences]

    @torch.inference_mode()
    def _score(self, sequence: Any) -> Any:
        ids = torch.from_numpy(np.asarray(sequence, np.int64))
        logprobs = torch.log_softmax(self._model(ids[None]).logits[0, :-1].float(), -1)
        return np.concatenate([[0.0], logprobs.gather(1, ids[1:, None])[:, 0].numpy()]).astype(np.float32)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests before their next token."""
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id] = True

    async def pause(self, mode: str) -> None:
        """Stop between two tokens; `abort` and `drain` wait until no request is left."""
        if mode == "abort":
            await self.abort(list(self._aborted))
        if mode != "keep":
            async with self._idle:
                await self._idle.wait_for(lambda: not self._aborted)
        self._decodes.clear()

    async def resume(self) -> None:
        """Continue decoding."""
        self._decodes.set()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Copy the trainer's weights into the model."""
        checksums = await self._compute(self._apply, update)
        return WeightReceipt(engine_id=self.engine_id, policy_version=update.policy_version, checksums=checksums)

    def _apply(self, update: WeightUpdate) -> Mapping[str, int]:
        held = self._model.state_dict()
        with torch.no_grad(), open_update(update) as receiver:
            for name, tensor in receiver:
                held[name].copy_(tensor)
        self._policy_version = update.policy_version
        return dict(receiver.checksums)

    async def sleep(self) -> None:
        """Raise an error, because `capabilities` does not declare sleep mode."""
        raise UnsupportedError(f"engine {self.engine_id} does not support sleep mode.")

    wake = sleep

    def load(self) -> EngineLoad:
        """Return the current load."""
        running, capacity = len(self._aborted), self._spec.max_num_seqs
        return EngineLoad(num_running=running, num_waiting=0, kv_used=0.0, capacity=capacity, num_steps=self._num_steps)

    async def close(self) -> None:
        """End the thread after its current step."""
        self._thread.shutdown(wait=False, cancel_futures=True)
