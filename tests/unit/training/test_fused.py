"""The fused functions against float64, and how they are recognised, built, and done without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from roll.training.kernels import native
from roll.training.network import logprobs
from roll.training.network.fused import use_fused_kernels
from roll.training.network.logprobs import compute_token_logprobs

WIDTH = 80
needs_compiler = pytest.mark.skipif(native.load_native_library() is None, reason="needs a C compiler")


def norm() -> LlamaRMSNorm:
    torch.manual_seed(1)
    module = LlamaRMSNorm(WIDTH, eps=1e-3)
    nn.init.normal_(module.weight)
    return module.to(torch.bfloat16)


def gate(activation: str = "silu") -> LlamaMLP:
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, hidden_act=activation)
    return LlamaMLP(config).to(torch.bfloat16)


def results(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and gradients of the input and of all weights."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(grad.to(y.dtype))
    return [part.double() for part in (y.detach(), x.grad, *(p.grad for p in module.parameters())) if part is not None]


def exact_norm(module: LlamaRMSNorm, x: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.double().requires_grad_(), module.weight.detach().double().requires_grad_()
    y = weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    y.backward(grad.double())
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def exact_gate(module: LlamaMLP, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in module.parameters()]
    g = x @ weights[0].t()
    y = (g / (1 + (-g).exp()) * (x @ weights[1].t())) @ weights[2].t()
    y.backward(grad.double())
    return [part.detach() for part in (y, x.grad, *(w.grad for w in weights)) if part is not None]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@needs_compiler
@pytest.mark.parametrize(("make", "exact"), [(norm, exact_norm), (gate, exact_gate)])
@pytest.mark.parametrize("size", [0.05, 4.0])
def test_fused_logprobs_a_fused_module_is_as_near_the_truth_as_the_module_itself(make, exact, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (size * torch.randn(2, 37, WIDTH, generator=generator)).to(torch.bfloat16)
    grad = torch.randn(2, 37, WIDTH, generator=generator).to(torch.bfloat16)
    module = make()
    truth = exact(module, x, grad)
    plain = errors(results(module, x, grad), truth)
    assert use_fused_kernels(module) == 1
    fused = results(module, x, grad)
    for mine, theirs in zip(errors(fused, truth), plain, strict=True):
        assert mine <= max(1.1 * theirs, 1e-3)
        assert mine < 0.01
    assert all(torch.equal(a, b) for a, b in zip(fused, results(module, x, grad), strict=True))


@needs_compiler
def test_fused_logprobs_what_computes_something_else_is_left_alone() -> None:
    gemma = GemmaRMSNorm(WIDTH).to(torch.bfloat16)
    gemma.variance_epsilon = gemma.eps  # would be taken for a Llama norm by its looks
    with torch.no_grad():
        gemma.weight.fill_(0.5)
    assert use_fused_kernels(nn.ModuleList([gemma, gate("gelu"), norm().float(), nn.LayerNorm(WIDTH)])) == 0
    assert use_fused_kernels(nn.ModuleList([norm(), gate()])) == 2


@needs_compiler
@pytest.mark.parametrize("make", [norm, gate])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fused_logprobs_what_is_not_finite_stays_so(make, value: float) -> None:
    module = make()
    assert use_fused_kernels(module) == 1
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    x[1, 3] = value
    found = results(module, x, torch.ones(2, WIDTH))
    assert torch.isfinite(found[0][0]).all()
    assert not torch.isfinite(found[0][1]).all()
    assert not torch.isfinite(found[2]).all()


@needs_compiler
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_elements", [2**25, 25 * 60])
@pytest.mark.parametrize("keep_bytes", [0, 10**9])
def test_fused_logprobs_the_softmax_is_as_near_the_truth_as_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, temperature: float, chunk_elements: int, keep_bytes: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", keep_bytes)
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 16, generator=generator).to(torch.bfloat16).requires_grad_() for n in (25, 200))
    targets, grad = torch.randint(200, (25,), generator=generator), torch.randn(25, generator=generator)

    def run() -> list[Tensor]:
        h.grad = w.grad = None
        found = compute_token_logprobs(h, w, targets, temperature=temperature)
        found.backward(grad)
        assert h.grad is not None and w.grad is not None
        return [found.detach().double(), h.grad.double(), w.grad.double()]

    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    expected = torch.log_softmax(h64 @ w64.t() / temperature, dim=-1).gather(1, targets[:, None])[:, 0]
    expected.backward(grad.double())
    truth = [expected.detach(), h64.grad, w64.grad]
    fused = run()
    monkeypatch.setattr(logprobs, "load_native_library", lambda: None)
    for mine, theirs in zip(errors(fused, truth), errors(run(), truth), strict=True):  # type: ignore[arg-type]
        assert mine <= 1.05 * theirs + 1e-6
        assert mine < 0.01


def test_fused_logprobs_without_a_compiler_models_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.load_native_library.__wrapped__() is None
    monkeypatch.setattr("roll.training.network.fused.load_native_library", lambda: None)
    assert use_fused_kernels(norm()) == 0


def test_fused_logprobs_a_compiler_that_fails_is_reported_and_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda name: str(compiler))
    with caplog.at_level(logging.WARNING):
        assert native.load_native_library.__wrapped__() is None
    assert "no such flag" in caplog.text
    assert list((tmp_path / "native").iterdir()) == []


@needs_compiler
def test_fused_logprobs_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLL_CACHE", str(tmp_path))
    assert native.load_native_library.__wrapped__() is not None
    monkeypatch.setattr(native.subprocess, "run", lambda *a, **k: pytest.fail("it was built again"))
    assert native.load_native_library.__wrapped__() is not None
