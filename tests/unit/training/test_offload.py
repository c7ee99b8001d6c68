"""Offloaded states and activations change no bit of a step, and are not on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from offload_ranks import OFFLOAD, RUNS, apart, build, check_checkpoints, differing, run_rank, three_steps
from training_helpers import make_batch, make_spec
from transformers import LlamaConfig
from worlds.model_sizes import Sizes
from worlds.ranks import run_ranks

from roll.config.activation_memory import estimate_logit_bytes
from roll.config.estimate import estimate_training_bytes
from roll.config.model import LoRAConfig
from roll.config.training import TrainingConfig
from roll.errors import ConfigError
from roll.training.dry_run import dry_run
from roll.training.memory.activation_offload import ActivationOffloader
from roll.types import LossRequirements


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.integration
def test_offload_three_steps_are_the_same_to_the_bit(tiny_model: Path, tmp_path: Path, name: str) -> None:
    with apart() as left:
        plain = build(tiny_model, RUNS[name])
        expected = three_steps(plain)
        assert not left
        for offload in OFFLOAD.values():
            backend = build(tiny_model, RUNS[name] | offload)
            assert not differing(three_steps(backend), expected)
            assert left
            left.clear()
        check_checkpoints(tmp_path, plain, backend)


def test_offload_a_mixture_takes_the_same_steps(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    with apart():
        steps = [three_steps(build(path, offload)) for offload in ({}, OFFLOAD["both"])]
    assert not differing(steps[1], steps[0])


def test_offload_nothing_is_copied_where_device_and_host_are_one(tiny_model: Path) -> None:
    expected = three_steps(build(tiny_model, {}))
    assert not differing(three_steps(build(tiny_model, OFFLOAD["both"])), expected)


def test_offload_a_storage_travels_once_for_all_its_views() -> None:
    weight = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(6, 4, requires_grad=True)
    with apart() as left:
        saved = ActivationOffloader(weight, torch.device("cpu"))
        with saved.offload_saved_tensors():
            inner = x * 2
            total = (weight(inner) * inner[:3].repeat(2, 1)).sum() + inner.t().square().sum()
        sizes = sorted(left)
        total.backward()
    # of `inner`, what the weight makes of it, and the repeated rows: 6 x 4 float32 each; the weight stays
    assert sizes == [96, 96, 96]
    grad, x.grad = x.grad, None
    inner = x * 2
    ((weight(inner) * inner[:3].repeat(2, 1)).sum() + inner.t().square().sum()).backward()
    assert torch.equal(grad, x.grad)


def test_offload_a_storage_leaves_the_device_when_its_last_view_is_read() -> None:
    with apart():
        saved, x = ActivationOffloader(torch.nn.Identity(), torch.device("cpu")), torch.arange(6.0)
        first, last = saved._pack(x), saved._pack(x[2:])
        assert torch.equal(saved._unpack(first), x)
        assert first.storage.on_device is not None
        assert torch.equal(saved._unpack(last), x[2:])
        assert first.storage.on_device is None


def test_offload_what_a_later_operation_overwrites_is_moved_as_it_was() -> None:
    x = torch.ones(4, requires_grad=True)
    with apart() as left:
        with ActivationOffloader(torch.nn.Identity(), torch.device("cpu")).offload_saved_tensors():
            inner = x * 1
            first = inner.square().sum()  # saves `inner`
            inner.detach().mul_(3)
            second = inner.square().sum()  # saves it again, with other numbers
        (first + second).backward()
    assert len(left) == 2
    assert x.grad.tolist() == [2.0 + 6.0] * 4


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
@pytest.mark.parametrize("field", ["offload_optimizer", "offload_activations"])
def test_offload_another_back_end_refuses_it(backend: str, field: str) -> None:
    settings: dict[str, Any] = {"num_steps": 1, "backend": backend, field: True}
    with pytest.raises((ConfigError, ValueError), match=f"the back-end {backend} does not support this key"):
        TrainingConfig(**settings)


LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WORDS = 12, 512, 1408, 8, 4, 1024
TOKENS = 2 * (100 + 4 * 450)
ESTIMATED: list[Any] = [
    (1, {"offload_optimizer": True, "offload_activations": True}),
    *(
        pytest.param(ranks, settings, marks=pytest.mark.slow)
        for ranks in (1, 2)
        for settings in (
            {"offload_optimizer": True},
            {"offload_optimizer": True, "activation_checkpointing": True},
            {"offload_optimizer": True, "offload_activations": True, "activation_checkpointing": True},
            {"offload_optimizer": True, "offload_activations": True, "lora": LoRAConfig(rank=16)},
            {"activation_checkpointing": True},
            {"lora": LoRAConfig(rank=16)},
            {"lora": LoRAConfig(rank=16), "activation_checkpointing": True},
            {},
        )
    ),
    pytest.param(1, {"offload_activations": True}, marks=pytest.mark.slow),
    pytest.param(1, {"offload_activations": True, "activation_checkpointing": True}, marks=pytest.mark.slow),
    pytest.param(2, {"offload_optimizer": True, "offload_activations": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "settings"), ESTIMATED)
def test_offload_a_device_holds_what_is_estimated(tmp_path: Path, ranks: int, settings: dict[str, Any]) -> None:
    """Within 10 %, by a dry run in which what is offloaded has a memory of its own."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    spec = make_spec(tmp_path, dtype="bfloat16", max_tokens_per_micro_batch=TOKENS // ranks, **settings)
    spec = dataclasses.replace(spec, world_size=ranks, device="cpu")
    batch = make_batch(0, groups=4, group_size=4, prompt=(100, 101), response=(450, 451), vocab=WORDS)
    found = dry_run(spec, batch, LossRequirements())
    width = HIDDEN // HEADS
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * width + 3 * HIDDEN * INNER + 2 * HIDDEN
    sizes = Sizes(
        num_parameters=2 * WORDS * HIDDEN + LAYERS * layer + HIDDEN,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=WORDS,
    )
    own = TOKENS // ranks
    parts = estimate_training_bytes(spec.model, spec.training, sizes, own, ranks, micro_batches=1, on_accelerator=True)
    parts["logits"] = estimate_logit_bytes(sizes, own, 2, layer_bytes=parts.get("a layer", 0))
    ratio = found.peak / sum(parts.values())
    print(f"\n{ranks} ranks, {settings}: {found.peak / 2**20:.0f} MiB, {ratio:.3f} of the estimate")
    assert ratio == pytest.approx(1.0, abs=0.1)
    if spec.training.offload_optimizer:
        assert found.host >= 16 * sizes.num_parameters // ranks  # masters, moments, gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "num"),
    [
        ({"dp 2": {}, "tp 2": {"tp": 2}, "cp 2": {"cp": 2}, "pp 2": {"pp": 2}}, 2),
        ({"dp 2, tp 2": {"tp": 2}, "pp 2, replicas 2": {"pp": 2, "dp_replicate": 2}}, 4),
    ],
)
def test_offload_ranks_take_the_same_steps(tmp_path: Path, tiny_model: Path, layouts: dict[str, Any], num: int) -> None:
    names = ("bfloat16", "adapters") if num > 2 else ("bfloat16", "layers again", "8 bits", "adapters")
    runs = {name: RUNS[name] for name in names}
    run_ranks(run_rank, (tmp_path, tiny_model, layouts, runs, num), num)


@pytest.mark.slow
def test_offload_divided_experts_take_the_same_steps(tmp_path: Path, tiny_model: Path) -> None:
    path = write_model(tmp_path / "moe", tiny_model, FAMILIES["qwen3-moe"])
    runs = {"bfloat16": RUNS["bfloat16"]}
    run_ranks(run_rank, (tmp_path, path, {"ep 2": {"ep": 2}}, runs, 2), 2)
