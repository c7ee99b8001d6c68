"""Scripts against a simulated engine."""

from __future__ import annotations

import asyncio

import numpy as np

from roll.simulation.batch import BatchLimits
from roll.simulation.clock import run
from roll.simulation.costs import EngineCosts
from roll.simulation.engine import EngineSettings, SimulatedEngine
from roll.types import Generation, GenerationRequest, SamplingParams, WeightUpdate

COSTS = EngineCosts(
    overhead_s=0.002,
    weights_s=0.004,
    token_s=0.0005,
    communication_s=0.00001,
    request_s=0,
    context_s=0.000003,
    pair_s=0.0000001,
)
PLENTY = BatchLimits(max_num_seqs=64, max_batched_tokens=2048, kv_capacity=100_000)
STEADY = EngineCosts(overhead_s=0.01, weights_s=0, token_s=0, communication_s=0, request_s=0, context_s=0, pair_s=0)
"""Every step takes 10 ms, whatever it does."""


def request(
    name: str, *, prompt: int = 10, wanted: int = 5, priority: int = 0, limit: int = 10**9
) -> GenerationRequest:
    """A request whose seed says how long its answer is."""
    return GenerationRequest(
        request_id=name,
        token_ids=np.ones(prompt, np.int32),
        sampling=SamplingParams(max_new_tokens=limit, seed=wanted),
        priority=priority,
    )


def seed_tokens(request: GenerationRequest) -> int:
    return request.sampling.seed or 1


def update_to(version: int) -> WeightUpdate:
    return WeightUpdate(policy_version=version, manifest=(), transport="simulated", handle=None)


def settings(
    costs: EngineCosts = STEADY, limits: BatchLimits = PLENTY, update_s: float = 0.0, recompute: bool = True
) -> EngineSettings:
    return EngineSettings(costs=costs, limits=limits, update_s=update_s, recompute_on_update=recompute)


def drive(scenario, engine_settings: EngineSettings | None = None, seed: int = 0):
    """Run `scenario(engine)` in virtual time."""

    async def main():
        engine = SimulatedEngine("engine-0", engine_settings or settings(), seed_tokens)
        await engine.start()
        return await scenario(engine)

    return run(main(), seed=seed)


async def timed(engine: SimulatedEngine, asked: GenerationRequest, at: float = 0.0) -> tuple[float, Generation]:
    """Ask at a moment; when the answer came, and the answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at - loop.time())
    generation = await engine.generate(asked)
    return loop.time(), generation
