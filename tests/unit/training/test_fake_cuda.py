"""On a CUDA device without numbers, every operation of a pass finds its operands on that device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from families import FAMILIES, write_model
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.training import TorchBackend, experts
from roll.types import ForwardOptions

RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "adapters": {"dtype": "bfloat16", "lora": LoRAConfig(rank=2)},
}


def passes(model: Path, settings: dict[str, Any]) -> None:
    """A loss, log-probs, the memory handed over and taken back, a loss again."""
    spec = make_spec(model, max_tokens_per_micro_batch=60, **settings)
    with fake_cuda():
        backend = TorchBackend(dataclasses.replace(spec, device="cuda"))
        batch = make_batch()
        backend.measure(batch, PolicyLoss())
        backend.forward(batch, ["logprobs"])
        backend.forward(batch, ["top_logprobs"], ForwardOptions(num_top=3))
        backend.offload(["parameters", "optimizer"])
        held = [*backend.network.parameters(), *backend.network.buffers()]
        held += [backend.masters.get_local(name) for name in backend.masters.parameters]
        held += [moment for moments in backend.optimizer.get_moments().values() for moment in moments.values()]
        assert {tensor.device.type for tensor in held} == {"cpu"}
        backend.onload(["parameters", "optimizer"])
        held = [
            *backend.network.parameters(),
            *(backend.masters.get_local(name) for name in backend.masters.parameters),
        ]
        assert {tensor.device for tensor in held} == {CUDA}
        backend.measure(batch, PolicyLoss())


@pytest.mark.parametrize("name", RUNS)
def test_fake_cuda_passes_keep_to_their_device(tiny_model: Path, name: str) -> None:
    passes(tiny_model, RUNS[name])


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_fake_cuda_families_keep_to_their_device(tiny_model: Path, tmp_path: Path, family: str) -> None:
    passes(write_model(tmp_path / "model", tiny_model, FAMILIES[family]), RUNS["bfloat16"])


def test_fake_cuda_operands_of_two_devices_are_found() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match=r"two different devices|on the same device"):
        torch.empty(8, device=CUDA) + torch.empty(8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inner", "outer"), [(16, 24), (16, 20), (12, 16), (4, 4), (10, 16)])
def test_fake_cuda_experts_use_the_grouped_kernel_where_it_takes_their_shapes(
    dtype: torch.dtype, inner: int, outer: int
) -> None:
    """The checks of the kernel's meta form say so. They are for bfloat16, and about bytes: rows of as many."""
    weight = torch.empty(2, outer, inner, dtype=dtype, device="meta")
    outer, inner = (width * weight.element_size() // 2 for width in (outer, inner))
    alike, offsets = meta(2, outer, inner), torch.empty(2, dtype=torch.int32, device="meta")
    try:
        torch._grouped_mm(meta(6, inner), alike.transpose(1, 2), offs=offsets)
        torch._grouped_mm(meta(6, outer), alike, offs=offsets)  # as the backward pass does
        takes = True
    except RuntimeError:
        takes = False
    assert experts._has_kernel(weight) == takes


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")
