"""Requests that move between engines in the middle of their answers, through the proxy of a run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from roll.cluster.engines import ManagedEngineGroup
from roll.protocols import InferenceEngine
from roll.rollout import LLMProxy
from roll.types import Generation, GenerationRequest, SamplingParams


class Interrupting:
    """An engine whose requests are aborted after a number of tokens that was planned for each attempt.

    Args:
        engine: The engine that computes.
        cuts: By request, the numbers of tokens after which its next attempts are aborted; shared by all engines.
    """

    def __init__(self, engine: InferenceEngine, engine_id: str, cuts: dict[str, list[int]]) -> None:
        self._engine, self._cuts = engine, cuts
        self.engine_id = engine_id
        self.served: list[str] = []

    async def start(self) -> None:
        """Do nothing: the engine was started by the test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.served.append(request.request_id)
        cuts, sampling = self._cuts[request.request_id], request.sampling
        if not cuts:
            return await self._engine.generate(request)
        limited = replace(sampling, max_new_tokens=min(cuts.pop(), sampling.max_new_tokens))
        piece = await self._engine.generate(replace(request, sampling=limited))
        return replace(piece, finish_reason="abort") if piece.finish_reason == "length" else piece


def _return(engine: InferenceEngine) -> InferenceEngine:
    return engine


def build_requests(count: int, max_new_tokens: int) -> list[GenerationRequest]:
    """Return requests with prompts of 5 to 20 tokens and sampling parameters of several kinds."""
    chance = np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9}]
    return [
        GenerationRequest(
            request_id=f"r{index}",
            token_ids=chance.integers(4, 260, 5 + index % 16).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=1000 + index, **kinds[index % 4]),
        )
        for index in range(count)
    ]


async def count_differences(engines: Sequence[InferenceEngine], requests: Sequence[GenerationRequest]) -> int:
    """Return how many requests that move three times get other tokens than unmoved ones.

    Raises:
        AssertionError: A request moved less often, or a log-prob differs by more than 1e-4 although the tokens agree.
    """
    unmoved = await asyncio.gather(*(engines[0].generate(request) for request in requests))
    chance = random.Random(0)
    cuts = {
        request.request_id: [chance.randint(1, request.sampling.max_new_tokens // 4) for _ in range(3)]
        for request in requests
    }
    wrapped = [Interrupting(engine, f"e{index}", cuts) for index, engine in enumerate(engines)]
    proxy = LLMProxy(await ManagedEngineGroup.start({engine.engine_id: partial(_return, engine) for engine in wrapped}))
    moved = await asyncio.gather(*(proxy.generate(request) for request in requests))
    await proxy.close()
    attempts = [name for engine in wrapped for name in engine.served]
    assert all(attempts.count(request.request_id) == 4 for request in requests), "an answer ended early"
    differences = 0
    for before, after in zip(unmoved, moved, strict=True):
        assert before.finish_reason == after.finish_reason == "length"
        if before.token_ids.tolist() != after.token_ids.tolist():
            differences += 1
        else:
            np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-4)
    return differences
