"""Adapters of a trainer, and the engine `sglang` with a server that has them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from hf_helpers import engine_spec, prompt, reference_logprobs, request, send
from sglang_server import SGLangServer, serving

sys.path.append(str(Path(__file__).parents[1] / "training"))
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import LikelihoodLoss
from roll.config.model import LoRAConfig
from roll.inference.sglang.engine import SGLangEngine
from roll.training import TorchBackend

TARGETS = ["q_proj", "v_proj", "down_proj"]
LORA = LoRAConfig(rank=4, alpha=8.0, target_modules=TARGETS)
PATTERNS = LoRAConfig(
    rank=4,
    alpha=8.0,
    target_modules=TARGETS,
    use_rslora=True,
    rank_pattern={"q_proj": 2},
    alpha_pattern={"v_proj": 3},
)
SERVED = LORA.model_copy(update={"alpha": 4.0})  # the server's own scale is 1
INFO = {
    "enable_lora": True,
    "max_lora_rank": 4,
    "lora_target_modules": ["down_proj", "o_proj", "q_proj", "v_proj"],
    "max_loras_per_batch": 8,
    "max_loaded_loras": None,
}
TEXT = prompt(5, 60)


def spec_of(model: Path, **changes: Any) -> Any:
    return dataclasses.replace(engine_spec(model), kind="sglang", **{"lora": LORA, **changes})


@asynccontextmanager
async def running(model: Path, **changes: Any) -> AsyncIterator[tuple[SGLangServer, SGLangEngine]]:
    served = {"lora": SERVED, "max_adapters": 4} if changes.get("lora", LORA) is not None else {}
    async with serving(model, **served) as server:
        server.lora_info = INFO
        engine = SGLangEngine(spec_of(model, options={"url": server.url}, **changes))
        await engine.start()
        try:
            yield server, engine
        finally:
            await engine.close()


def train(model: Path, lora: LoRAConfig = LORA, seed: int = 0, steps: int = 1) -> TorchBackend:
    backend = TorchBackend(make_spec(model, lora=lora, learning_rate=0.02))
    for step in range(steps):
        backend.train_step(make_batch(seed + step), LikelihoodLoss())
    return backend


async def sync(engine: SGLangEngine, backend: TorchBackend, version: int, name: str | None = None) -> Any:
    return await send(engine, backend.adapter_weights(), version, "shared_memory", adapter=name)


def numbers(server: SGLangServer) -> list[int]:
    """Return the numbers in the names of the server's adapters, such as `roll-0a1b2c3d-1`."""
    return [int(name.rpartition("-")[2]) for name in server.adapters]


def merged_logprobs(backend: TorchBackend, model: Path, tokens: Any) -> np.ndarray:
    return reference_logprobs(model, tokens, **dict(backend.weights()))


async def version_of(engine: SGLangEngine) -> set[int]:
    return {*(await engine.generate(request("a"))).policy_versions.tolist()}


def fail(server: SGLangServer, path: str) -> None:
    server.failures[path] = web.Response(status=503, text="busy")
