"""The parts of a step, each measured alone, beside the target it is meant to reach.

    make bench-parts

    trainer   model-FLOPs utilisation of forward and backward, against matrix products timed in the same minutes
    memory    peak memory of the vocabulary's log-probs, against logits that are materialised
    sync      verified weight sync to a vLLM engine and to an embedded one; CPU time of an engine without work
    commands  how long `roll --help`, `roll check` and the refusal of a misspelt key take

Model FLOPs count each multiplication and addition once that the mathematics asks for: tokens as packed (a group's
prompt once), pairs of query and key as far as they are visible, the vocabulary only where a token is predicted. What
is computed again, masked away or padded counts as time alone. Each part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from roll.config import RLVRConfig
    from roll.training.backend import TorchBackend
    from roll.training.layout import PackedLayout
    from roll.types import TrainingBatch

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "examples/quickstart.yaml"
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 45
BATCHES = {"quickstart": (16, 32), "long": (128, 128)}
"""Shortest and longest answer in tokens."""
TRAIN_REPEATS = {"quickstart": 5, "long": 3}
SQUARE = 4096
MEMORY_TOKENS = (1024, 2048, 4096)
NUM_PUSHES = 7
IDLE_WINDOW_S, IDLE_WINDOWS = 5.0, 3
COMMAND_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a figure is meant to reach."""

    label: str
    path: tuple[str, ...]
    """Where the figure is in the record."""
    bound: float
    at_least: bool = False

    def line(self, figures: Mapping[str, Any]) -> str:
        """The figure, its target, and whether it is met."""
        value: Any = figures
        for key in self.path:
            value = value[key]
        met = value >= self.bound if self.at_least else value <= self.bound
        sign = ">=" if self.at_least else "<="
        return f"{self.label:<58} {value:>9.3f}   target {sign} {self.bound:<5g} {'met' if met else 'MISSED'}"


TARGETS = (
    Target(
        label="utilisation, quickstart batch, of the model's own products",
        path=("trainer", "quickstart", "utilisation_of_own_shapes"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label=f"utilisation, quickstart batch, of a {SQUARE} square",
        path=("trainer", "quickstart", "utilisation_of_square"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label="utilisation, long batch, of the model's own products",
        path=("trainer", "long", "utilisation_of_own_shapes"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label=f"utilisation, long batch, of a {SQUARE} square",
        path=("trainer", "long", "utilisation_of_square"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label="log-probs, peak memory at 4k tokens over that at 1k", path=("memory", "roll", "growth_ratio"), bound=1.5
    ),
    Target(label="weight sync to vLLM, verified, s", path=("sync", "vllm", "verified_s"), bound=0.3),
    Target(label="weight sync to the embedded engine, verified, s", path=("sync", "hf", "verified_s"), bound=0.3),
    Target(label="vLLM engine without work, % of a core", path=("sync", "vllm", "idle_cpu_percent"), bound=2.0),
    Target(label="roll --help, s", path=("commands", "help_s"), bound=0.5),
    Target(label="roll check, s", path=("commands", "check_s"), bound=5.0),
    Target(label="a misspelt key refused, s", path=("commands", "misspelt_s"), bound=1.0),
)


def quickstart_config() -> RLVRConfig:
    """The quickstart's settings: model, data, trainer, engine."""
    import yaml

    from roll.config import RLVRConfig

    return RLVRConfig.model_validate(yaml.safe_load((ROOT / QUICKSTART).read_text()))


def random_batch(num_groups: int, group_size: int, answer: tuple[int, int], vocab_size: int) -> TrainingBatch:
    """Groups of random tokens after a common prompt; answers of `answer` tokens (shortest, longest)."""
    import numpy as np

    from roll.types import TrainingBatch, TrainingSample

    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab_size, PROMPT_TOKENS)
        for index in range(group_size):
            own = rng.integers(0, vocab_size, rng.integers(answer[0], answer[1] + 1))
            token_ids = np.concatenate([prompt, own]).astype(np.int32)
            in_answer = np.arange(len(token_ids)) >= PROMPT_TOKENS
            samples.append(
                TrainingSample(
                    sample_id=f"{group}.{index}",
                    group_id=group,
                    prefix_length=PROMPT_TOKENS,
                    token_ids=token_ids,
                    loss_mask=in_answer,
                    advantages=np.where(in_answer, rng.normal(), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(in_answer, -10.0, 0.0).astype(np.float32),
                )
            )
    return TrainingBatch(samples=tuple(samples), max_length=answer[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """The matrix products of a model, found in its modules."""

    layers: Mapping[tuple[int, int], int]
    """How many projections of [out, in] all layers have together."""
    head: tuple[int, int]
    """[vocabulary, hidden]"""
    attention: int
    """Layers x heads x head dimension."""

    @classmethod
    def of(cls, model: Any) -> Products:
        """Read them from an HF model of the Llama family."""
        from torch import nn

        linear = (m.weight.shape for m in model.get_decoder().modules() if isinstance(m, nn.Linear))
        shapes = Counter((out, wide) for out, wide in linear)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            layers=shapes,
            head=tuple(model.get_output_embeddings().weight.shape),
            attention=config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def projection_flops(self, num_tokens: int, num_predictions: int) -> float:
        """Forward and backward: 6 per weight, for each token of the row or prediction."""
        weights = sum(count * out * wide for (out, wide), count in self.layers.items())
        return 6.0 * (num_tokens * weights + num_predictions * self.head[0] * self.head[1])

    def flops(self, layouts: list[PackedLayout]) -> float:
        """Of these micro-batches, forward and backward; scores and weighted values cost 4 per pair, thrice."""
        projections = sum(self.projection_flops(x.num_tokens, len(x.rows)) for x in layouts)
        return projections + 12.0 * self.attention * sum(visible_pairs(x) for x in layouts)


def visible_pairs(layout: PackedLayout) -> int:
    """Pairs of a query and a key that it may see."""
    pairs = 0
    for block in layout.blocks:
        prefix = block.prefix_length
        pairs += prefix * (prefix + 1) // 2
        pairs += sum(n * prefix + n * (n + 1) // 2 for n in block.response_lengths)
    return pairs


def micro_batches(backend: TorchBackend, batch: TrainingBatch) -> list[PackedLayout]:
    """As the trainer cuts this batch."""
    from roll.training.layout import build_layout
    from roll.training.packing import pack

    training = backend.spec.training
    (share,) = pack(batch.samples, max_tokens=training.max_tokens_per_micro_batch, share_prefix=training.share_prefix)
    return [build_layout(blocks) for blocks in share if blocks]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Median time of `work`, after one call that is not counted."""
    import torch

    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def projection_seconds(num_rows: int, shape: tuple[int, int], device: torch.device) -> float:
    """`torch.matmul` of a projection [out, in] of `num_rows` tokens: forward, and the two gradients."""
    import torch

    out, wide = shape
    x, weight, grad = (
        torch.randn(*size, dtype=torch.bfloat16, device=device)
        for size in ((num_rows, wide), (out, wide), (num_rows, out))
    )
    products = ((x, weight.t()), (grad, weight), (grad.t(), x))
    return sum(seconds_of(lambda a=a, b=b: torch.matmul(a, b), device) for a, b in products)


def own_rate(products: Products, layout: PackedLayout, device: torch.device) -> float:
    """FLOP/s of the model's own projections at the sizes of one micro-batch, and nothing around them."""
    from roll.training.logprobs import CHUNK_ELEMENTS

    num_predictions = len(layout.rows)
    chunk = min(num_predictions, CHUNK_ELEMENTS // products.head[0])
    seconds = projection_seconds(chunk, products.head, device) * num_predictions / chunk
    for shape, count in products.layers.items():
        seconds += count * projection_seconds(layout.num_tokens, shape, device)
    return products.projection_flops(layout.num_tokens, num_predictions) / seconds


def square_rate(device: torch.device) -> float:
    """FLOP/s of the product of two large square matrices."""
    import torch

    a, b = (torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2.0 * SQUARE**3 / seconds_of(lambda: torch.matmul(a, b), device)


def measure_trainer() -> dict[str, Any]:
    """Utilisation; every repetition times the products anew, so that a change of clock speed cancels."""
    from roll.algorithms.losses import PolicyLoss
    from roll.models import resolve_model
    from roll.training import TrainerSpec
    from roll.training.backend import TorchBackend

    config = quickstart_config()
    training = config.training.model_copy(update={"learning_rate": 1e-6})
    path = str(resolve_model(config.model.path))
    backend = TorchBackend(TrainerSpec(model_path=path, model=config.model, training=training))
    products = Products.of(backend.model)
    figures: dict[str, Any] = {"device": str(backend.device)}
    for name, answer in BATCHES.items():
        batch = random_batch(NUM_GROUPS, GROUP_SIZE, answer, products.head[0])
        layouts = micro_batches(backend, batch)
        flops = products.flops(layouts)
        if name == "quickstart":
            backend.train_step(batch, PolicyLoss())  # warms up; a long step's micro-batches warm up each other
        seconds, own, square = [], [], []
        for _ in range(TRAIN_REPEATS[name]):
            own.append(own_rate(products, layouts[0], backend.device))
            square.append(square_rate(backend.device))
            result = backend.train_step(batch, PolicyLoss())
            if result.num_tokens != sum(x.num_tokens for x in layouts):
                raise SystemExit(f"the trainer computed {result.num_tokens} tokens, the layouts have others")
            seconds.append(result.timings_s["forward_backward"])
        figures[name] = {
            "num_tokens": sum(x.num_tokens for x in layouts),
            "num_predictions": sum(len(x.rows) for x in layouts),
            "num_micro_batches": len(layouts),
            "model_flops": flops,
            "forward_backward_s": statistics.median(seconds),
            "forward_backward_all_s": seconds,
            "own_shapes_flops_per_s": statistics.median(own),
            "square_flops_per_s": statistics.median(square),
            "utilisation_of_own_shapes": statistics.median(flops / s / r for s, r in zip(seconds, own, strict=True)),
            "utilisation_of_square": statistics.median(flops / s / r for s, r in zip(seconds, square, strict=True)),
        }
    return figures


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes this process grows at most while `work` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    work()
    return resident_bytes("VmHWM") - before


def measure_memory_of(side: str) -> dict[str, Any]:
    """Forward and backward of the log-probs on the CPU, by ROLL or with materialised logits."""
    import torch

    from roll.models import describe_model
    from roll.training.logprobs import token_logprobs

    model = describe_model(quickstart_config().model.path)
    weight = torch.randn(model.vocab_size, model.hidden_size, dtype=torch.bfloat16).mul_(0.05).requires_grad_()

    def run(num_tokens: int) -> None:
        torch.manual_seed(0)
        hidden = torch.randn(num_tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(model.vocab_size, (num_tokens,))
        if side == "roll":
            found = token_logprobs(hidden, weight, targets)
        else:
            found = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        found.sum().backward()
        weight.grad = None

    run(8)
    growth = {n: statistics.median(peak_growth(lambda n=n: run(n)) for _ in range(3)) for n in MEMORY_TOKENS}
    return {
        "growth_bytes": {str(n): value for n, value in growth.items()},
        "growth_ratio": growth[MEMORY_TOKENS[-1]] / growth[MEMORY_TOKENS[0]],
    }


def measure_memory() -> dict[str, Any]:
    """Both sides, and how much less ROLL takes for the most tokens."""
    sides = {side: in_process(f"memory-{side}") for side in ("roll", "materialised")}
    largest = str(MEMORY_TOKENS[-1])
    saving = sides["materialised"]["growth_bytes"][largest] / sides["roll"]["growth_bytes"][largest]
    return {**sides, "materialised_over_roll": saving}


def tree_cpu_seconds() -> float:
    """CPU time of this process and of all that it started."""
    import psutil

    tree = psutil.Process()
    times = [process.cpu_times() for process in (tree, *tree.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def idle_cpu_percent() -> list[float]:
    """Of one core, in each of some windows without work: the engine's processes and the one that drives it."""
    await asyncio.sleep(2.0)
    found = []
    for _ in range(IDLE_WINDOWS):
        begin, used = time.monotonic(), tree_cpu_seconds()
        await asyncio.sleep(IDLE_WINDOW_S)
        found.append(100.0 * (tree_cpu_seconds() - used) / (time.monotonic() - begin))
    return found


async def measure_sync(kind: str) -> dict[str, Any]:
    """Push the default model's weights to one engine, after a real update each time."""
    from roll.algorithms.losses import PolicyLoss
    from roll.cluster.local import LocalCluster
    from roll.config.operations import WeightSyncConfig
    from roll.pipelines.setup import engine_specs, prepare_material, probe_sequences
    from roll.pipelines.trainers import policy_spec
    from roll.weights import WeightSync

    config = quickstart_config()
    material = prepare_material(config)
    (spec,) = engine_specs(config, material, None)
    cluster = LocalCluster()
    batch = random_batch(1, 2, (4, 4), 1000)
    with tempfile.TemporaryDirectory() as directory:
        spec = replace(spec, kind=kind, log_path=Path(directory) / "engine.log")
        trainer = await cluster.start_trainer(policy_spec(config, material.model_path))
        try:
            engines = await cluster.start_engines([spec])
            try:
                transport = cluster.transport(kind)
                probe = probe_sequences(material.data)
                sync = WeightSync(trainer, engines, WeightSyncConfig(), probe=probe, transport=transport)
                reports = []
                for version in range(NUM_PUSHES + 1):
                    await trainer.train_step(batch, PolicyLoss())
                    reports.append(await sync.push(version))
                    if reports[-1].dead or reports[-1].engines != (spec.engine_id,):
                        raise SystemExit(f"push {version} did not reach the engine: {reports[-1]}")
                idle = await idle_cpu_percent() if kind == "vllm" else []
            finally:
                await engines.close()
        finally:
            await trainer.close()
    counted = reports[1:]
    figures = {
        "transport": transport,
        "num_bytes": counted[0].num_bytes,
        "verified_s": statistics.median(r.seconds + r.readback_s for r in counted),
        "verified_all_s": [r.seconds + r.readback_s for r in counted],
        "first_verified_s": reports[0].seconds + reports[0].readback_s,
        "transfer_s": statistics.median(r.seconds for r in counted),
        "readback_s": statistics.median(r.readback_s for r in counted),
        "num_tensors": counted[0].num_tensors,
        "num_read_back": counted[0].num_read_back,
        "probe_s": statistics.median(r.probe_s for r in counted),
    }
    return figures | ({"idle_cpu_percent": statistics.median(idle), "idle_cpu_percent_all": idle} if idle else {})


def command_seconds(arguments: list[str], *, refused: str = "") -> float:
    """Median time of a `roll` command, which must succeed, or be refused with the word `refused`."""
    times = []
    for _ in range(COMMAND_REPEATS):
        begin = time.perf_counter()
        done = subprocess.run(
            [str(Path(sys.executable).with_name("roll")), *arguments], cwd=ROOT, capture_output=True, text=True
        )
        times.append(time.perf_counter() - begin)
        said = done.stdout + done.stderr
        if (done.returncode != 0) != bool(refused) or refused not in said:
            raise SystemExit(f"roll {' '.join(arguments)} ended with {done.returncode}:\n{said[-3000:]}")
    return statistics.median(times)


def measure_commands() -> dict[str, Any]:
    """Latencies of a whole process, as a person meets them."""
    misspelt = ["train", QUICKSTART, "training.lerning_rate=1"]
    with tempfile.TemporaryDirectory() as directory:  # a run of this name may exist in the usual one
        return {
            "help_s": command_seconds(["--help"]),
            "check_s": command_seconds(["check", QUICKSTART, f"output_dir={directory}"]),
            "misspelt_s": command_seconds(misspelt, refused="learning_rate"),
        }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "trainer": measure_trainer,
    "memory-roll": lambda: measure_memory_of("roll"),
    "memory-materialised": lambda: measure_memory_of("materialised"),
    "sync-vllm": lambda: asyncio.run(measure_sync("vllm")),
    "sync-hf": lambda: asyncio.run(measure_sync("hf")),
}
"""What runs in a process of its own."""


def in_process(part: str) -> dict[str, Any]:
    """Run one part in a fresh process."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    begin = time.monotonic()
    done = subprocess.run([sys.executable, __file__, "--part", part], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{part} failed:\n{done.stderr[-3000:]}")
    print(f"    {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every part, print each figure beside its target, and the record last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS))
    part = parser.parse_args().part
    if part:
        print(json.dumps(PARTS[part]()))
        return
    from _report import report

    figures = {
        "trainer": in_process("trainer"),
        "memory": measure_memory(),
        "sync": {"vllm": in_process("sync-vllm"), "hf": in_process("sync-hf")},
    }
    print("commands ...", file=sys.stderr, flush=True)
    figures["commands"] = measure_commands()
    for target in TARGETS:
        print(target.line(figures), file=sys.stderr, flush=True)
    report("parts", figures)


if __name__ == "__main__":
    main()
