"""The chunked vocabulary projection equals log_softmax, in value and gradient, and stays small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from roll.training.network import logprobs as module
from roll.training.network.logprobs import compute_token_logprobs


def inputs(m: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(m, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (m,), generator=generator)
    return h, w, targets, torch.randn(m, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
@pytest.mark.parametrize("keep_bytes", [0, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logprobs_values_and_gradients_equal_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk_elements, keep_bytes, temperature, dtype, limit
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", keep_bytes)
    monkeypatch.setattr(module, "CPU_BLOCK_ELEMENTS", 30)
    h, w, targets, weights = inputs(9, 13, 6, dtype)
    found = compute_token_logprobs(h, w, targets, temperature=temperature)
    (found * weights.to(dtype)).sum().backward()
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    expected = torch.log_softmax(h64 @ w64.t() / temperature, dim=-1).gather(1, targets[:, None])[:, 0]
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=10 * limit, atol=10 * limit)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=10 * limit, atol=10 * limit)


def test_logprobs_the_gradient_passes_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 0)  # kept logits serve one backward pass, gradcheck runs several
    h, w, targets, _ = inputs(4, 7, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: compute_token_logprobs(h, w, targets, temperature=1.3), (h, w))


def test_logprobs_huge_logits_stay_finite() -> None:
    h = torch.full((2, 4), 1e4, requires_grad=True)
    found = compute_token_logprobs(h, torch.eye(4) * 1e3, torch.tensor([0, 1]))
    found.sum().backward()
    torch.testing.assert_close(found, torch.full((2,), -1.3862944))  # four equal logits: -log 4
    assert torch.isfinite(h.grad).all()


def test_logprobs_only_hidden_states_get_a_gradient_where_the_projection_is_frozen() -> None:
    h, w, targets, _ = inputs(3, 5, 2, torch.float32)
    compute_token_logprobs(h, w.detach(), targets).sum().backward()
    assert h.grad is not None
    assert w.grad is None


def peak_bytes(m: int, vocab: int, *, backward: bool) -> int:
    """Of the plain function."""
    h = torch.randn(m, 8, requires_grad=True)
    w = torch.randn(vocab, 8, requires_grad=True)
    targets = torch.zeros(m, dtype=torch.int64)

    def run() -> None:
        result = compute_token_logprobs(h, w, targets)
        if backward:
            result.sum().backward()

    return peak_bytes_of(run)


def peak_bytes_of(run: Callable[[], None]) -> int:
    """Largest sum of live tensor memory, from the profiler's record of every allocation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    live = largest = 0
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        largest = max(largest, live)
    return largest


def test_logprobs_memory_does_not_grow_with_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2**18)  # 1 MiB
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2**18)
    monkeypatch.setattr(module, "CPU_BLOCK_ELEMENTS", 2**17)
    logits = 4 * 4096 * 8192  # 128 MiB
    assert peak_bytes(4096, 8192, backward=True) < 8 * 2**20 < logits
    assert peak_bytes(4096, 8192, backward=True) < 1.2 * peak_bytes(1024, 8192, backward=True)
