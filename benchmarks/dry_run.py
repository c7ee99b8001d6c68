"""What models of 72 and 235 billion parameters would ask of every rank, tried without weights or devices.

    make bench NAME=dry-run                            every layout (about an hour, on one core)
    make bench NAME=dry-run ARGS="--only 72b --layers 4"

The code that trains goes through a step on tensors without numbers: see `roll.training.dry_run`. Of ranks that have the
same part of the model one is tried: one of every stage.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _report import ROOT, report

PAGE = ROOT / "docs" / "benchmarks" / "dry_run.md"
GIB = 2**30
MAX_BYTES = 80e9
TEXT_TOKENS = 4096
MICRO_BATCH_TOKENS = 8192
MICRO_BATCHES = 4
"""Of each data rank, in a step: as many as there are stages."""

QWEN_72B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN_235B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks, and how they divide the work."""

    ranks: int
    parallel: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        named = dict(self.parallel)
        own = {name: size for name, size in named.items() if name != "ep"}
        rest = self.ranks // int(np.prod(list(own.values()), dtype=int))
        return ", ".join(f"{name} {size}" for name, size in {**own, "dp_shard": rest, **named}.items() if size > 1)

    @property
    def tried(self) -> list[int]:
        """A rank of every stage."""
        stages = self.parallel.get("pp", 1)
        return [stage * self.ranks // stages for stage in range(stages)]


MODELS = {
    "72b": (
        QWEN_72B,
        (
            Layout(ranks=64),
            Layout(ranks=32, parallel={"tp": 8}),
            Layout(ranks=64, parallel={"tp": 8, "cp": 2}),
            Layout(ranks=32, parallel={"pp": 4, "tp": 4}),
        ),
    ),
    "235b-a22b": (
        QWEN_235B,
        (
            Layout(ranks=128),
            Layout(ranks=128, parallel={"ep": 8}),
            Layout(ranks=128, parallel={"tp": 4, "ep": 16}),
            Layout(ranks=128, parallel={"pp": 4, "ep": 8}),
        ),
    ),
}


def try_rank(model: dict[str, Any], layout: Layout, rank: int) -> dict[str, Any]:
    """A step of one rank, in a process of its own."""
    from roll.config.model import ModelConfig
    from roll.config.parallel import ParallelConfig
    from roll.config.training import TrainingConfig
    from roll.training.dry_run import dry_run
    from roll.training.spec import TrainerSpec
    from roll.types import LossRequirements, TrainingBatch, TrainingSample

    parallel = ParallelConfig(**layout.parallel)
    shares = layout.ranks // (parallel.ranks_per_micro_batch * parallel.pp)
    count = (
        shares
        * parallel.ranks_per_micro_batch
        * MICRO_BATCHES
        * MICRO_BATCH_TOKENS
        // (TEXT_TOKENS * parallel.ranks_per_micro_batch)
    )
    text = {
        "token_ids": np.zeros(TEXT_TOKENS, dtype=np.int32),
        "loss_mask": np.arange(TEXT_TOKENS) > 0,
        "advantages": np.zeros(TEXT_TOKENS, dtype=np.float32),
    }
    samples = tuple(TrainingSample(sample_id=str(i), unit=i, prefix_length=1, **text) for i in range(count))
    training = TrainingConfig(
        num_steps=1,
        learning_rate=1e-6,
        parallel=parallel,
        max_tokens_per_micro_batch=MICRO_BATCH_TOKENS,
        activation_checkpointing=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model))
        spec = TrainerSpec(
            model_path=directory,
            model=ModelConfig(path=directory),
            training=training,
            rank=rank,
            world_size=layout.ranks,
            device="cpu",
        )
        began = time.perf_counter()
        found = dry_run(spec, TrainingBatch(samples=samples), LossRequirements())
    traffic = [
        {"operation": kind.operation, "ranks": kind.ranks, "size": kind.size, "count": n, "bytes": found.bytes[kind]}
        for kind, n in found.counts.items()
    ]
    return {
        "rank": rank,
        "between": found.between_steps,
        "gradients": found.gradients,
        "peak": found.peak,
        "traffic": traffic,
        "seconds": time.perf_counter() - began,
    }


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """The tables."""
    yield "# Dry runs of large models"
    yield ""
    yield (
        "This page reports how much memory a trainer rank needs for Qwen2.5-72B (72b) and Qwen3-235B-A22B (235b-a22b) "
        "with\ndifferent [parallel layouts](../layouts.md), and which collectives the rank executes. "
        "`make bench NAME=dry-run` runs the real\ntraining code on meta tensors, which contain no data and need no "
        "device. It executes one training step for one rank of every\npipeline stage. The step consists of four "
        "micro-batches of 8,192 tokens, in sequences of 4,096 tokens, with activation\ncheckpointing, bfloat16 with "
        "float32 master weights, and AdamW.\n\n"
        "The reported memory includes only tensors. A device needs a few GiB more for kernels, collectives and "
        "fragmentation.\n[Parallel layouts](../layouts.md) explains the dimensions of a layout. In the tables of "
        "collectives, `shards` means the\nranks of `dp_shard`, `efsdp` means the ranks that shard the same experts, "
        "and `all` means the ranks of all dimensions."
    )
    for name, by_layout in results.items():
        yield ""
        yield f"## {name}"
        yield ""
        yield f"The table shows the memory of one rank for {name}:"
        yield ""
        yield "| ranks | layout | stage | memory between steps | memory of gradients | peak memory |"
        yield "|---|---|---|---|---|---|"
        for text, ranks in by_layout.items():
            for stage, found in enumerate(ranks["found"]):
                sizes = " | ".join(f"{found[key] / GIB:.1f} GiB" for key in ("between", "gradients", "peak"))
                yield f"| {ranks['ranks']} | {text} | {stage if len(ranks['found']) > 1 else 'all layers'} | {sizes} |"
        yield ""
        yield (
            "The next table shows the collectives that one rank executes in a step. If a layout has several pipeline "
            "stages, the\nrank belongs to the first stage."
        )
        yield ""
        yield "| layout | collective | size and dimension of the group | calls | data of all calls | data per call |"
        yield "|---|---|---|---|---|---|"
        for text, ranks in by_layout.items():
            for kind in ranks["found"][0]["traffic"]:
                mean = kind["bytes"] / kind["count"] / 2**20
                yield (
                    f"| {text} | {kind['operation']} | {kind['size']} {kind['ranks']} | {kind['count']:,} | "
                    f"{kind['bytes'] / GIB:,.1f} GiB | {mean:,.1f} MiB |"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one model")
    parser.add_argument("--layers", type=int, help="of the models, fewer than they have; nothing is written then")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(
        arguments.workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for name, (model, layouts) in MODELS.items():
            if arguments.only not in ("", name):
                continue
            changed = {**model, **({"num_hidden_layers": arguments.layers} if arguments.layers else {})}
            asked = [(layout, [pool.submit(try_rank, changed, layout, r) for r in layout.tried]) for layout in layouts]
            for layout, futures in asked:
                found = [future.result() for future in futures]
                peak = max(each["peak"] for each in found)
                print(f"{name}, {layout.ranks} ranks, {layout.text}: at most {peak / GIB:.1f} GiB", file=sys.stderr)
                results.setdefault(name, {})[f"{layout.text}"] = {"ranks": layout.ranks, "found": found}
    if not arguments.layers and not arguments.only:
        PAGE.write_text("\n".join(page(results)) + "\n")
        report("dry_run", results)
    peaks = [each["peak"] for name in results.values() for layout in name.values() for each in layout["found"]]
    return 0 if max(peaks) <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
