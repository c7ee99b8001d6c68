"""What the tests of the hf engine share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worlds.weight_sync import Weights, send

from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.models import load_causal_lm
from roll.types import Generation, GenerationRequest, IntArray, SamplingParams, WeightReceipt


def engine_spec(model: Path, **changes: Any) -> EngineSpec:
    settings: dict[str, Any] = {"dtype": "float32", "max_context": 96, "max_num_seqs": 8, "num_threads": 1, **changes}
    return EngineSpec(engine_id="e0", kind="hf", model_path=str(model), **settings)


@asynccontextmanager
async def running(model: Path, **changes: Any) -> AsyncIterator[HFEngine]:
    engine = HFEngine(engine_spec(model, **changes))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def prompt(seed: int, length: int = 12) -> IntArray:
    return np.random.default_rng(seed).integers(4, 260, length).astype(np.int32)


def request(name: str, tokens: IntArray | None = None, **sampling: Any) -> GenerationRequest:
    """A request named `name`, seeded by its name alone."""
    seed = int.from_bytes(name.encode(), "little")
    settings = SamplingParams(**{"max_new_tokens": 16, "seed": seed, **sampling})
    return GenerationRequest(
        request_id=name, token_ids=prompt(seed % 97) if tokens is None else tokens, sampling=settings
    )


async def generate_all(engine: HFEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(await asyncio.gather(*(engine.generate(one) for one in requests)))


async def has_generated(engine: HFEngine, tokens: int) -> None:
    """Return when every running row has this many tokens, and there is one."""
    while True:
        rows = engine._decoder.rows if engine._decoder else []
        if rows and all(row.num_generated >= tokens for row in rows):
            return
        await asyncio.sleep(0)


def reference_logprobs(model: Path, tokens: IntArray, dtype: str = "float32", **weights: torch.Tensor) -> np.ndarray:
    """[L] float64 of plain `transformers` with eager attention; entry 0 is 0."""
    network = load_causal_lm(model, dtype, attention="eager")
    with torch.inference_mode():
        for name, tensor in weights.items():
            network.state_dict()[name].copy_(tensor)
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        logprobs = network(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    return np.concatenate([[0.0], logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


def same(first: Generation, second: Generation) -> bool:
    """Bit for bit."""
    return (
        first.token_ids.tobytes() == second.token_ids.tobytes()
        and first.logprobs.tobytes() == second.logprobs.tobytes()
        and first.finish_reason == second.finish_reason
    )


async def sync(
    engine: HFEngine, tensors: Mapping[str, torch.Tensor], version: int, transport: str = "in_process"
) -> WeightReceipt:
    """Send weights to the engine, as a trainer would; the checksums of both ends are equal."""
    return await send(engine, Weights(tensors), version, transport)
