"""The trainer's parts of `bench_parts`: its share of the matmul rate, and the memory of its log-probs.

Model FLOPs count each multiplication and addition once that the mathematics asks for: tokens as packed (a group's
prompt once), pairs of query and key as far as they are visible, the vocabulary only where a token is predicted. What
is computed again, masked away or padded counts as time alone.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from roll.config.pipelines.rlvr import RLVRConfig
    from roll.training.backend import TorchBackend
    from roll.training.packing.layout import PackedLayout
    from roll.types import TrainingBatch

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "examples/quickstart.yaml"
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 45
BATCHES = {"quickstart": (16, 32), "long": (128, 128)}
"""Shortest and longest answer in tokens."""
TRAIN_REPEATS = {"quickstart": 5, "long": 3}
SQUARE = 4096
MEMORY_TOKENS = (8192, 16384, 32768)
"""More than those whose logits are kept for the backward pass."""


def quickstart_config() -> RLVRConfig:
    """The quickstart's settings: model, data, trainer, engine."""
    import yaml

    from roll.config.pipelines.rlvr import RLVRConfig

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
                    unit=group,
                    prefix_length=PROMPT_TOKENS,
                    token_ids=token_ids,
                    loss_mask=in_answer,
                    advantages=np.where(in_answer, rng.normal(), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(in_answer, -10.0, 0.0).astype(np.float32),
                    max_length=answer[1],
                )
            )
    return TrainingBatch(samples=tuple(samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """The matmuls of a model, found in its modules."""

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
    segments = (segment for block in layout.blocks for segment in block.segments)
    return sum(s.length * s.position + s.length * (s.length + 1) // 2 for s in segments)


def micro_batches(backend: TorchBackend, batch: TrainingBatch) -> list[PackedLayout]:
    """As the trainer cuts this batch."""
    from roll.training.packing.layout import build_layout
    from roll.training.packing.micro_batches import pack

    training = backend.spec.training
    (share,) = pack(batch.samples, max_tokens=training.max_tokens_per_micro_batch, share_prefix=training.share_prefix)
    return [build_layout(blocks) for blocks in share if blocks]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Median time of `work`, which is done before the clock stops; two calls before are not counted."""
    import torch

    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


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
    from roll.training.network.logprobs import CHUNK_ELEMENTS

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
    """Forward and backward of the log-probs on the CPU, by ROLL or, of the fewest tokens, with materialised logits."""
    import torch

    from roll.models import describe_model
    from roll.training.network.logprobs import compute_token_logprobs

    model = describe_model(quickstart_config().model.path)
    weight = torch.randn(model.vocab_size, model.hidden_size, dtype=torch.bfloat16).mul_(0.05).requires_grad_()

    def run(num_tokens: int) -> None:
        torch.manual_seed(0)
        hidden = torch.randn(num_tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(model.vocab_size, (num_tokens,))
        if side == "roll":
            found = compute_token_logprobs(hidden, weight, targets)
        else:
            found = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        found.sum().backward()
        weight.grad = None

    run(8)
    sizes = MEMORY_TOKENS if side == "roll" else MEMORY_TOKENS[:1]
    growth = {n: statistics.median(peak_growth(lambda n=n: run(n)) for _ in range(3)) for n in sizes}
    return {"growth_bytes": {str(n): value for n, value in growth.items()}}
