"""Time of a step of two stages, each with one part of the layers or several, beside the idle time of their orders.

    make bench NAME=pipeline

Two ranks of one thread each train a random model whose layers are nearly all of its work; every micro-batch is one text
of the same length. The trainers take turns in the same processes, step by step, so that whatever slows the machine
slows all of them. The idle time of the schedules (`compute_bubble_fraction`) excludes messages, the optimizer and work
outside of the layers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _report import ROOT, report

SIZES = {
    "vocab_size": 260,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": False,
}
CHUNKS = (1, 2, 3)
MICRO_BATCHES = (2, 4, 8)
TOKENS = 256
ROUNDS = 7


def write_model(directory: Path) -> None:
    """A random Llama with the tokenizer of the tests' tiny model."""
    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module("worlds.tiny_model").write_tiny_model(directory)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(directory)  # type: ignore[arg-type]


def run_rank(rank: int, directory: str) -> None:
    """What one rank does; the first writes down seconds by micro-batches and parts."""
    import torch
    from _trainer_parts import random_batch

    from roll.algorithms.losses import PolicyLoss
    from roll.config.model import ModelConfig
    from roll.config.parallel import ParallelConfig
    from roll.config.training import TrainingConfig
    from roll.training.backend import TorchBackend
    from roll.training.spec import TrainerSpec

    place = Path(directory)

    def trainer(vpp: int) -> TorchBackend:
        parallel = ParallelConfig(pp=2, vpp=vpp)
        spec = TrainerSpec(
            model_path=str(place / "model"),
            model=ModelConfig(path=str(place / "model"), dtype="float32"),
            training=TrainingConfig(
                num_steps=2, num_threads=1, max_tokens_per_micro_batch=TOKENS, parallel=parallel, malloc_trim=False
            ),
            seed=0,
        )
        ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{place / 'meeting'}"}
        return TorchBackend(dataclasses.replace(spec, **ranks))  # type: ignore[arg-type]

    trainers = {vpp: trainer(vpp) for vpp in CHUNKS}
    seconds: dict[int, dict[int, list[float]]] = {}
    for num in MICRO_BATCHES:
        batch = random_batch(num, 1, (TOKENS // 2, TOKENS // 2), 250)
        seconds[num] = {vpp: [] for vpp in CHUNKS}
        for round_ in range(ROUNDS + 1):
            for vpp, each in trainers.items():
                torch.distributed.barrier()
                began = time.perf_counter()
                each.train_step(batch, PolicyLoss())
                torch.distributed.barrier()
                if round_:  # the first one warms up
                    seconds[num][vpp].append(time.perf_counter() - began)
    if rank == 0:
        (place / "seconds.json").write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure, and report medians."""
    import torch.multiprocessing as mp

    from roll.training.parallel.pipeline_schedule import compute_bubble_fraction

    with tempfile.TemporaryDirectory(prefix="roll-pipeline-") as directory:
        write_model(Path(directory) / "model")
        mp.spawn(run_rank, (directory,), nprocs=2)  # type: ignore[no-untyped-call]
        seconds = json.loads((Path(directory) / "seconds.json").read_text())
    figures = {}
    for num, by_parts in seconds.items():
        medians = {vpp: statistics.median(times) for vpp, times in by_parts.items()}
        for vpp, median in medians.items():
            expected = (1 - compute_bubble_fraction(int(num), 2, 1)) / (
                1 - compute_bubble_fraction(int(num), 2, int(vpp))
            )
            figures[f"micro-batches {num}, vpp {vpp}"] = {
                "median_s": median,
                "fastest_s": min(by_parts[vpp]),
                "of_one_part": median / medians["1"],
                "of_one_part_by_the_orders": expected,
            }
    report("pipeline", figures)


if __name__ == "__main__":
    main()
