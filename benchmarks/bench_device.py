"""The ceilings of a device, measured, and what the trainer makes of them.

    make bench NAME=device                           a model of a billion random weights; on a CPU a tiny one
    make bench NAME=device ARGS="--size tiny"        anywhere, in a minute

    ceilings    products of square bfloat16 matrices, copies within the device's memory and to the host's
    trainer     forward and backward, forward alone, and the update of a Llama; its share of the product rate
    vocabulary  log-probs of targets, forward and backward
    attention   packed attention, forward and backward: plain sequences, and answers behind a common prompt

Model FLOPs are those of `_trainer_parts`: what the mathematics asks for once, whatever is computed again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _report import report
from _trainer_parts import Products, micro_batches, random_batch, seconds_of, visible_pairs

from roll.algorithms.losses import PolicyLoss
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.training import TrainerSpec
from roll.training.attention.packed import packed_attention
from roll.training.attention.plan import build_plan
from roll.training.backend import TorchBackend
from roll.training.network.logprobs import compute_token_logprobs
from roll.training.packing.layout import PackedLayout, build_layout
from roll.training.packing.micro_batches import pack
from roll.weights import compute_checksum

TIMES = 10
"""Products of one measurement, so that its start does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    squares: tuple[int, ...]
    """Sides of matrices."""
    copied_bytes: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    words: int
    groups: int
    group_size: int
    answer: tuple[int, int]
    micro_batch_tokens: int
    repeats: int


SIZES = {
    "1b": Size(
        squares=(4096, 8192, 16384),
        copied_bytes=4 * 2**30,
        layers=16,
        hidden=2048,
        inner=8192,
        heads=32,
        kv_heads=8,
        words=128_256,
        groups=8,
        group_size=8,
        answer=(1024, 2048),
        micro_batch_tokens=16_384,
        repeats=5,
    ),
    "tiny": Size(
        squares=(256, 512),
        copied_bytes=2**24,
        layers=2,
        hidden=64,
        inner=128,
        heads=4,
        kv_heads=2,
        words=512,
        groups=2,
        group_size=4,
        answer=(16, 32),
        micro_batch_tokens=256,
        repeats=2,
    ),
}


def ceilings(size: Size, device: torch.device) -> dict[str, float]:
    """FLOP/s of products, and bytes/s of copies; those within the device read and write, so they count twice."""
    found: dict[str, float] = {}
    for side in size.squares:
        a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))

        def products(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            for _ in range(TIMES):
                torch.matmul(a, b)

        found[f"square_{side}_flops_per_s"] = TIMES * 2.0 * side**3 / seconds_of(products, device, size.repeats)
    found["square_flops_per_s"] = max(found.values())
    source = torch.zeros(size.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy_bytes_per_s"] = 2.0 * source.nbytes / seconds_of(lambda: target.copy_(source), device, size.repeats)
    checked = source[: source.nbytes // 4]
    found["checksum_bytes_per_s"] = checked.nbytes / seconds_of(lambda: compute_checksum(checked), device, size.repeats)
    if device.type != "cpu":
        pinned = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        for name, into, out_of in (("to_host", pinned, source), ("from_host", source, pinned)):
            spent = seconds_of(lambda a=into, b=out_of: a.copy_(b, non_blocking=True), device, size.repeats)
            found[f"{name}_bytes_per_s"] = source.nbytes / spent
    return found


def write_model(size: Size, place: Path) -> Path:
    """A Llama of this size with random weights, as a checkpoint; its tokenizer knows one word."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(place)
    return place


def trainer(size: Size, device: torch.device, square: float) -> dict[str, Any]:
    """A trainer of one rank on the device: seconds of its parts, tokens per second, and its share of `square`."""
    with tempfile.TemporaryDirectory(prefix="roll-bench-") as place:
        path = str(write_model(size, Path(place) / "model"))
        training = TrainingConfig(
            num_steps=1, learning_rate=1e-6, max_tokens_per_micro_batch=size.micro_batch_tokens,
            activation_checkpointing=False,
        )  # fmt: skip
        model = ModelConfig(path=path, dtype="bfloat16")
        backend = TorchBackend(TrainerSpec(model_path=path, model=model, training=training, device=device.type))
    products = Products.of(backend.model)
    batch = random_batch(size.groups, size.group_size, size.answer, size.words)
    layouts = micro_batches(backend, batch)
    flops, num_tokens = products.flops(layouts), sum(layout.num_tokens for layout in layouts)
    steps = [backend.train_step(batch, PolicyLoss()) for _ in range(1 + size.repeats)][1:]
    spent = {part: statistics.median(step.timings_s[part] for step in steps) for part in steps[0].timings_s}
    forward_s = seconds_of(lambda: backend.forward(batch, ["logprobs"]), device, size.repeats)
    found = {
        "num_weights": sum(p.numel() for p in backend.model.parameters()),
        "num_tokens": num_tokens,
        "num_micro_batches": len(layouts),
        "model_flops": flops,
        **{f"{part}_s": value for part, value in spent.items()},
        "tokens_per_s": num_tokens / spent["forward_backward"],
        "utilisation": flops / spent["forward_backward"] / square,
        "forward_s": forward_s,
    }
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def vocabulary(size: Size, device: torch.device, square: float) -> dict[str, float]:
    """Log-probs of a micro-batch's tokens over the vocabulary: 6 FLOPs per number of the projection and token."""
    hidden, weight = (
        torch.randn(rows, size.hidden, dtype=torch.bfloat16, device=device).mul_(0.02).requires_grad_()
        for rows in (size.micro_batch_tokens, size.words)
    )
    targets = torch.randint(size.words, (size.micro_batch_tokens,), device=device)

    def work() -> None:
        compute_token_logprobs(hidden, weight, targets).sum().backward()
        hidden.grad = weight.grad = None

    seconds = seconds_of(work, device, size.repeats)
    rate = 6.0 * size.micro_batch_tokens * size.words * size.hidden / seconds
    return {"seconds": seconds, "flops_per_s": rate, "share_of_square": rate / square}


def attention(size: Size, device: torch.device, square: float, *, share: bool) -> dict[str, float]:
    """One layer over a micro-batch of whole sequences, or of answers behind the prompt of their group."""
    batch = random_batch(size.groups, size.group_size, size.answer, size.words)
    packed = pack(batch.samples, max_tokens=size.micro_batch_tokens, share_prefix=share)
    layout: PackedLayout = build_layout(packed[0][0])
    plan = build_plan(layout, device, torch.bfloat16)
    width = size.hidden // size.heads
    q, k, v = (
        torch.randn(1, layout.num_tokens, heads, width, dtype=torch.bfloat16, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    )
    grad = torch.randn(1, layout.num_tokens, size.heads, width, dtype=torch.bfloat16, device=device)
    layer = torch.nn.Identity()

    def work() -> None:
        result, _ = packed_attention(layer, q, k, v, None, roll_plan=plan, is_causal=True)
        result.backward(grad)
        q.grad = k.grad = v.grad = None

    seconds = seconds_of(work, device, size.repeats)
    rate = 12.0 * size.heads * width * visible_pairs(layout) / seconds
    return {
        "num_tokens": layout.num_tokens,
        "varlen": float(plan.varlen is not None),
        "seconds": seconds,
        "flops_per_s": rate,
        "share_of_square": rate / square,
    }


def measure(size: Size, device: torch.device) -> dict[str, Any]:
    """All figures."""
    found: dict[str, Any] = {"device": device_name(device), "ceilings": ceilings(size, device)}
    square = found["ceilings"]["square_flops_per_s"]
    found["vocabulary"] = vocabulary(size, device, square)
    for name, share in (("attention", False), ("attention_behind_prompts", True)):
        found[name] = attention(size, device, square, share=share)
    found["trainer"] = trainer(size, device, square)
    return found


def device_name(device: torch.device) -> str:
    """As its vendor calls it."""
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ceilings of a device, and the trainer's share of them.")
    parser.add_argument("--size", choices=sorted(SIZES), help="by default 1b on an accelerator, tiny on a CPU")
    arguments = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    size = arguments.size or ("tiny" if device.type == "cpu" else "1b")
    found = measure(SIZES[size], device)
    ceiling, own = found["ceilings"], found["trainer"]
    print(f"{found['device']}, {size}: {own['num_weights'] / 1e9:.2f} billion weights")
    print(f"  products {ceiling['square_flops_per_s'] / 1e12:8.2f} TFLOP/s")
    print(f"  copies   {ceiling['copy_bytes_per_s'] / 1e9:8.1f} GB/s")
    print(f"  trainer  {own['utilisation']:8.3f} of the products  {own['tokens_per_s']:10.0f} tokens/s")
    for name in ("vocabulary", "attention", "attention_behind_prompts"):
        print(f"  {name:<26} {found[name]['share_of_square']:6.3f} of the products")
    report("device", {"size": size, **found})


if __name__ == "__main__":
    main()
