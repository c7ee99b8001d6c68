"""Peak memory of each rank of a trainer of a billion weights: loading, a step, a weight sync, an export, a checkpoint.

    make bench NAME=memory

The model is random, its files in float32. Everything here is in bfloat16, weights and optimiser states too, so that
four ranks train it on one small machine; nothing that is compared depends on that. Each phase's peak of a rank's own
pages (`Anonymous` of /proc/self/smaps_rollup, sampled by a thread) is counted from what the process had before it
loaded; pages of mapped files are shared, may be dropped by the kernel, and are given separately. `--before SRC` also
measures another checkout by the same script.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 21,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SAMPLE_S = 0.05
PHASES = ("load", "step", "sync", "export", "save", "restore")


def write_model(directory: Path) -> None:
    """A random Llama with the tokenizer of the tests' tiny model."""
    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module("worlds.tiny_model").write_tiny_model(directory)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))  # type: ignore[arg-type]
    model.save_pretrained(directory, max_shard_size="1GB")
    (directory / "model.safetensors").unlink()  # the tiny one's


def now() -> tuple[int, int]:
    """Bytes of this process's own pages, and of mapped files' pages."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    own, resident = (int(fields[name].split()[0]) * 1024 for name in ("Anonymous", "Rss"))
    return own, resident - own


class Peaks:
    """The most that was found in each phase, beyond what there was at first."""

    def __init__(self) -> None:
        self.base = now()
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Sample inside the block."""
        samples, ended = [now()], threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                samples.append(now())

        thread, began = threading.Thread(target=sample), time.perf_counter()
        thread.start()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            ended.set()
            thread.join()
            samples.append(now())
            self.found[name] = {
                "own_bytes": max(own for own, _ in samples) - self.base[0],
                "file_bytes": max(file for _, file in samples) - self.base[1],
                "kept_bytes": samples[-1][0] - self.base[0],
                "seconds": seconds,
            }
            print(name, json.dumps(self.found[name]), file=sys.stderr, flush=True)


def run_rank(rank: int, num_ranks: int, directory: str, parallel: dict[str, int]) -> None:
    """What one rank does; its peaks go to a file."""
    import torch
    from _trainer_parts import random_batch

    from roll.algorithms.losses import PolicyLoss
    from roll.config.model import ModelConfig
    from roll.config.parallel import ParallelConfig
    from roll.config.training import TrainingConfig
    from roll.training.backend import TorchBackend
    from roll.training.precision import Precision
    from roll.training.spec import TrainerSpec

    place, dtype = Path(directory), torch.bfloat16
    training = {"num_steps": 2, "num_threads": 1, "activation_checkpointing": True}
    spec = TrainerSpec(
        model_path=str(place / "model"),
        model=ModelConfig(path=str(place / "model"), dtype="bfloat16"),
        training=TrainingConfig(parallel=ParallelConfig(**parallel), **training),  # type: ignore[arg-type]
        seed=0,
    )
    ranks = {"rank": rank, "world_size": num_ranks, "init_method": f"file://{place / 'meeting'}"}
    spec = dataclasses.replace(spec, **ranks)
    import roll.training.network.loading  # noqa: F401  # what imports take is no one's share

    batch = random_batch(2, 2, (16, 16), 250)
    peaks = Peaks()
    with peaks.phase("load"):
        backend = TorchBackend(spec, precision=Precision(compute=dtype, master=dtype))
    with peaks.phase("step"):
        backend.train_step(batch, PolicyLoss())
    with peaks.phase("sync"):
        largest = max(tensor.nbytes if tensor is not None else 0 for _, tensor in backend.weights())
    with peaks.phase("export"):
        backend.export(place / "export")
    with peaks.phase("save"):
        backend.save(place / "state")
    with peaks.phase("restore"):
        backend.load(place / "state")
    share = sum(backend.masters.get_local(name).nbytes for name in backend.masters.parameters)
    numel = sum(parameter.numel() for parameter in backend.model.parameters())
    found = {"share_bytes": share, "largest_tensor_bytes": largest, "parameters": numel, "phases": peaks.found}
    (place / f"rank-{rank}.json").write_text(json.dumps(found))


def measure(source: Path, model: Path, num_ranks: int, parallel: dict[str, int]) -> list[dict[str, Any]]:
    """By rank, what it found; or how far it came."""
    with tempfile.TemporaryDirectory(dir=model.parent) as directory:
        (Path(directory) / "model").symlink_to(model)
        call = [sys.executable, __file__, "--directory", directory, "--ranks", str(num_ranks)]
        call += ["--parallel", json.dumps(parallel)]
        environment = os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*call, "--rank", str(i)], env=environment) for i in range(num_ranks)]
        failed = [process.wait() for process in processes]
        if any(failed):
            raise SystemExit("a rank failed")
        return [json.loads((Path(directory) / f"rank-{i}.json").read_text()) for i in range(num_ranks)]


def table(cases: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: of every case and phase, the rank with the highest peak."""
    lines = [
        "| | fraction of the weights | " + " | ".join(PHASES) + " | file pages while loading |",
        "|---|" + "---:|" * (len(PHASES) + 2),
    ]
    for name, ranks in cases.items():
        worst = [max(rank["phases"][phase]["own_bytes"] for rank in ranks) for phase in PHASES]
        share = max(rank["share_bytes"] for rank in ranks)
        files = max(rank["phases"]["load"]["file_bytes"] for rank in ranks)
        lines.append(f"| {name} | " + " | ".join(f"{x / 2**20:,.0f}" for x in (share, *worst, files)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure this checkout, and another one where it is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the src directory of another checkout, measured too")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--directory")
    parser.add_argument("--parallel", default="{}")
    options = parser.parse_args()
    if options.rank is not None:
        return run_rank(options.rank, options.ranks, options.directory, json.loads(options.parallel))
    from _report import report

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model)
        cases = {}
        cases[f"{options.ranks} dp"] = measure(ROOT / "src", model, options.ranks, {})
        if options.before is not None:
            cases[f"{options.ranks} dp, before"] = measure(options.before, model, options.ranks, {})
        cases["2 dp, 2 tp"] = measure(ROOT / "src", model, 4, {"tp": 2})
    print(table(cases))
    report("memory", cases)


if __name__ == "__main__":
    main()
