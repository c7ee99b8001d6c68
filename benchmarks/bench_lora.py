"""LoRA on vLLM's CPU build: speed of adapters and of merged weights, and bytes and seconds of a sync.

    make bench NAME=lora

Three engines with SmolLM2-135M-Instruct in bfloat16 take turns: one without adapters, as after a merged sync; one with
an adapter on all linear layers; and one with the same adapter and vLLM's own products, which gather a matrix per token.
Prompts are random and differ in every round, so that the prefix cache never has them. A figure is the median of the
rounds, and a ratio the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _report import report

from roll.config.model import LoRAConfig
from roll.inference import EngineSpec, build_engine
from roll.models import list_adapted_layers, resolve_model
from roll.protocols import InferenceEngine
from roll.types import GenerationRequest, SamplingParams
from roll.weights.shared_memory import SharedMemorySender

MODEL = "smollm2-135m-instruct"
PREFILL = {"count": 8, "length": 480, "new": 1}
DECODE = {"count": 16, "length": 16, "new": 64}


class Adapter:
    """Random tensors of an adapter, as a trainer sends them."""

    def __init__(self, path: Path, lora: LoRAConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for layer, (outputs, inputs) in list_adapted_layers(str(path), "all-linear").items():
            for name, shape in (("lora_A", (lora.rank, inputs)), ("lora_B", (outputs, lora.rank))):
                tensor = 0.01 * torch.randn(shape, generator=generator)
                self.tensors[f"{layer}.{name}.weight"] = tensor.bfloat16()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    def names(self) -> Sequence[str]:
        return list(self.tensors)


async def start(path: Path, name: str, lora: LoRAConfig | None, **options: object) -> InferenceEngine:
    engine = build_engine(
        EngineSpec(
            engine_id=name,
            kind="vllm",
            model_path=str(path),
            max_context=512,
            max_num_seqs=16,
            lora=lora,
            options=options,
            log_path=Path(tempfile.gettempdir()) / f"bench-lora-{name}.log",
        )
    )
    await engine.start()
    return engine


async def measure(engine: InferenceEngine, seed: int, count: int, length: int, new: int) -> float:
    """Tokens per second: of the prompts, or of the answers if they are longer than one token."""
    rng = np.random.default_rng(seed)
    requests = [
        GenerationRequest(
            request_id=f"{seed}-{number}",
            token_ids=rng.integers(100, 40_000, length).astype(np.int32),
            sampling=SamplingParams(max_new_tokens=new, seed=number),
        )
        for number in range(count)
    ]
    began = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    return count * (new if new > 1 else length) / (time.perf_counter() - began)


async def sync(engine: InferenceEngine, adapter: Adapter, version: int) -> float:
    """Seconds of a sync, without the trainer's part of it."""
    sender = SharedMemorySender()
    update = sender.stage(adapter, version)
    assert update is not None
    began = time.perf_counter()
    await engine.update_weights(update)
    seconds = time.perf_counter() - began
    sender.release(failed=False)
    sender.close()
    return seconds


async def run(rank: int, rounds: int) -> dict[str, object]:
    path, lora = resolve_model(MODEL), LoRAConfig(rank=rank)
    adapter = Adapter(path, lora)
    engines = {
        "merged": await start(path, "merged", None),
        "adapter": await start(path, "adapter", lora),
        "gather": await start(path, "gather", lora, worker_extension_cls="_lora_gather.GatherReceiver"),
    }
    try:
        seconds = [await sync(engines[name], adapter, 1) for name in ("adapter", "gather")]
        seconds += [await sync(engines["adapter"], adapter, version) for version in range(2, 12)]
        speeds: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in engines}
        for number in range(rounds + 1):  # the first round warms up
            for name, engine in engines.items():
                for kind, load in (("prefill", PREFILL), ("decode", DECODE)):
                    speeds[name][kind].append(await measure(engine, number, **load))
    finally:
        for engine in engines.values():
            await engine.close()
    sent = sum(tensor.nbytes for tensor in adapter.tensors.values())
    whole = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    figures: dict[str, object] = {
        "rank": rank,
        "sync_bytes": sent,
        "sync_bytes_share": sent / whole,
        "sync_s": statistics.median(seconds[2:]),
    }
    for name, kinds in speeds.items():
        for kind, values in kinds.items():
            figures[f"{name}_{kind}_tokens_per_s"] = statistics.median(values[1:])
            others = speeds["gather"][kind]
            ratios = [own / other for own, other in zip(values[1:], others[1:], strict=True)]
            figures[f"{name}_{kind}_over_gather"] = statistics.median(ratios)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    )  # for `_lora_gather` in the engines' processes
    report("lora", asyncio.run(run(arguments.rank, arguments.rounds)))


if __name__ == "__main__":
    main()
