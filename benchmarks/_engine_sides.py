"""One side of `bench_engine`: an engine in a process of its own, which generates the quickstart's load when told.

    python benchmarks/_engine_sides.py KIND OPTIONS      one line of JSON for each line that it reads

`roll` is the engine as a run starts it, with further options of vLLM's; `llm` is vLLM's own class for batches, `LLM`,
with the arguments that ROLL would give. Environment variables are the caller's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _trainer_parts import quickstart_config

from roll.inference import EngineSpec
from roll.types import GenerationRequest, IntArray

LOGS = Path("runs/bench")


def load_and_spec(options: dict[str, Any]) -> tuple[list[GenerationRequest], EngineSpec]:
    """A step's requests, which only their length ends, and the engine that a run would start for them.

    Options that `EngineSpec` has are set there; `seeds: false` leaves the requests without seeds of their own.
    """
    from roll.pipelines.preparation import build_engine_specs, prepare
    from roll.rollout.attempts import compute_request_seed
    from roll.types import SamplingParams

    config = quickstart_config()
    material = prepare(config)
    rollout = config.rollout
    seeds = options.pop("seeds", True)
    sampling = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
    requests = [
        GenerationRequest(
            request_id=f"{draw.draw_id}-{index}",
            token_ids=draw.token_ids,
            sampling=replace(sampling, seed=compute_request_seed(0, "train", draw.draw_id, index) if seeds else None),
        )
        for draw in material.data.train.draw(rollout.prompts_per_step)
        for index in range(rollout.group_size)
    ]
    (spec,) = build_engine_specs(config, material, None)
    own = {name: options.pop(name) for name in list(options) if name in EngineSpec.__dataclass_fields__}
    spec = replace(spec, kind="vllm", options=options, log_path=LOGS / f"engine-{os.getpid()}.log", **own)
    return requests, spec


class RollSide:
    """The engine behind ROLL's protocol."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._group: Any = None

    async def start(self) -> None:
        from roll.cluster.local import LocalCluster

        self._group = await LocalCluster().start_engines([self._spec], "actor_infer")

    async def generate(self, requests: Sequence[GenerationRequest]) -> int:
        """Tokens generated; nothing is cached before, as after a weight sync."""
        (engine,) = self._group.engines
        generations = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(generation.token_ids) for generation in generations)

    async def forget(self) -> None:
        await self._group.engines[0]._llm.reset_prefix_cache()

    async def score(self, sequences: Sequence[IntArray]) -> list[float]:
        (engine,) = self._group.engines
        return [float(value) for found in await engine.logprobs(sequences) for value in found]

    async def close(self) -> None:
        await self._group.close()


class LLMSide:
    """vLLM's own `LLM`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._llm: Any = None

    async def start(self) -> None:
        from roll.inference.vllm.environment import prepare_environment

        prepare_environment()
        from vllm import LLM

        from roll.inference.vllm.arguments import build_engine_arguments

        self._llm = LLM(**build_engine_arguments(self._spec, cpu=True))

    async def generate(self, requests: Sequence[GenerationRequest]) -> int:
        from roll.inference.vllm.conversion import build_sampling_params

        prompts = [{"prompt_token_ids": request.token_ids.tolist()} for request in requests]
        outputs = self._llm.generate(prompts, [build_sampling_params(request) for request in requests], use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    async def forget(self) -> None:
        self._llm.reset_prefix_cache()

    async def score(self, sequences: Sequence[IntArray]) -> list[float]:
        return []

    async def close(self) -> None:
        self._llm = None


async def serve(kind: str, options: dict[str, Any], say: Any) -> None:
    """Start, say how long that took and the log-probs of some sequences; then a round for each line."""
    requests, spec = load_and_spec(options)
    side = {"roll": RollSide, "llm": LLMSide}[kind](spec)
    began = time.perf_counter()
    await side.start()
    seconds = time.perf_counter() - began
    scored = await side.score([request.token_ids for request in requests[::8]])
    print(json.dumps({"start_s": seconds, "logprobs": scored}), file=say, flush=True)
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            await side.forget()
            began = time.perf_counter()
            num_tokens = await side.generate(requests)
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "num_tokens": num_tokens}), file=say, flush=True)
    finally:
        await side.close()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), answers))
