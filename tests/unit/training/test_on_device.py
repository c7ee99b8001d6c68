"""The same on a device as on the host, piece by piece: run on the host here, and on CUDA where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from torch import Tensor
from training_helpers import logprobs_of, make_batch, make_spec, needs_cuda

from roll.algorithms.losses import PolicyLoss
from roll.training import TorchBackend, experts
from roll.training.memory import adamw_8bit
from roll.training.memory.host_memory import HostMemory
from roll.training.memory.nf4 import Nf4Linear
from roll.training.network.logprobs import compute_token_logprobs
from roll.weights import compute_checksum

CUDA = pytest.param("cuda:0", marks=[pytest.mark.gpu, needs_cuda])
on_each = pytest.mark.parametrize("device", ["cpu", CUDA])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@on_each
def test_trainer_on_device_a_checksum_is_of_bytes_wherever_they_are(device: str) -> None:
    x = random(3, 5, 7, dtype=torch.bfloat16)
    assert compute_checksum(x.to(device).transpose(0, 2)) == compute_checksum(x.transpose(0, 2).contiguous())


@on_each
def test_trainer_on_device_what_goes_to_main_memory_and_back_is_the_same(device: str) -> None:
    memory, taken = HostMemory(torch.device(device)), []
    large = random(1024, 1024).to(device)
    for number in range(8):  # whose memory is given out anew while copies are under way
        memory.to_host_with_callback(large * number, lambda copy: taken.append(copy.clone()))
    away = [memory.to_host(large + number) for number in range(4)]
    back = [memory.to_device(copy) for copy in away]
    memory.finish()
    for number, copy in enumerate(taken):
        assert copy.device.type == "cpu" and torch.equal(copy, (large * number).cpu())
    for number, copy in enumerate(back):
        assert copy.device == large.device and torch.equal(copy, large + number)
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=device)
    for number in range(4):
        source = random(1024, 1024, seed=number)
        memory.write(weight, source)
        expected = source.bfloat16()
        source.fill_(7.0)  # the host goes on at once
        assert torch.equal(weight.cpu(), expected)


@on_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (12, 20)])
def test_trainer_on_device_products_of_experts_and_their_gradients(
    device: str, dtype: torch.dtype, inner: int, outer: int
) -> None:
    """Also of an expert that nobody chose, and of shapes that a device's kernel refuses."""
    counts = [5, 0, 11, 1]
    x, weight, grad = (
        random(17, inner, dtype=dtype),
        random(4, outer, inner, dtype=dtype),
        random(17, outer, dtype=dtype),
    )
    parts = [(a.double(), b.double(), c.double()) for a, b, c in zip(
        x.split(counts), weight, grad.split(counts), strict=True
    )]  # fmt: skip
    expected = [torch.cat([a @ b.t() for a, b, _ in parts]), torch.cat([c @ b for _, b, c in parts])]
    expected.append(torch.stack([c.t() @ a for a, _, c in parts]))
    own, matrices = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    found = experts._grouped_matmul(own, matrices, torch.tensor(counts, device=device), transposed=False)
    found.backward(grad.to(device))
    limit = 1e-4 if dtype == torch.float32 else 0.1
    for mine, theirs in zip((found, own.grad, matrices.grad), expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine.detach().cpu().double(), theirs, rtol=limit, atol=limit)


@on_each
def test_trainer_on_device_log_probs_and_their_gradients(device: str) -> None:
    hidden, weight = random(40, 32), random(300, 32, seed=1)
    targets = torch.arange(40) * 7
    exact, own = hidden.double().requires_grad_(), hidden.to(device).requires_grad_()
    expected = (exact @ weight.double().t() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found = compute_token_logprobs(own, weight.to(device), targets.to(device), temperature=0.7)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad.cpu().double(), exact.grad, rtol=1e-4, atol=1e-4)


@on_each
def test_trainer_on_device_weights_in_4_bits_are_read_alike(device: str) -> None:
    linear = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
    layer = Nf4Linear(linear)
    expected = layer.dequantize().float()
    torch.testing.assert_close(layer.to(device).dequantize().float().cpu(), expected, rtol=1e-2, atol=1e-4)


@on_each
def test_trainer_on_device_an_update_with_moments_in_8_bits(device: str) -> None:
    constants = adamw_8bit.AdamWConstants(learning_rate=1e-2, beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.1)
    host, own = random(64, 256), random(64, 256).to(device)
    states = [adamw_8bit.create_moments(weight) for weight in (host, own)]
    for step in range(1, 4):
        gradient = random(64, 256, seed=step)
        adamw_8bit.update(host, gradient, states[0], step, constants)
        adamw_8bit.update(own, gradient.to(device), states[1], step, constants)
    assert states[1]["moment1_codes"].device == own.device
    torch.testing.assert_close(own.cpu(), host, rtol=1e-3, atol=1e-3)


@on_each
@pytest.mark.parametrize("family", ["llama3", "gemma3", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_trainer_on_device_families_say_and_learn_the_same(
    device: str, family: str, tiny_model: Path, tmp_path: Path
) -> None:
    path, batch = write_model(tmp_path / family, tiny_model, FAMILIES[family]), make_batch(3)
    spec: Any = make_spec(path)
    host, own = (TorchBackend(dataclasses.replace(spec, device=kind)) for kind in ("cpu", device.partition(":")[0]))
    for mine, theirs in zip(logprobs_of(own, batch), logprobs_of(host, batch), strict=True):
        assert abs(mine - theirs).max() <= 1e-3
    results = [backend.train_step(batch, PolicyLoss()) for backend in (own, host)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-2)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-3, abs=1e-4)
