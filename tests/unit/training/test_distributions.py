"""Entropy and full-vocabulary divergence equal a dense float64 softmax, in value and gradient, and stay small."""

from __future__ import annotations

import pytest
import torch
from test_logprobs import inputs, peak_bytes_of

from roll.training.network import distributions, logprobs
from roll.training.network.distributions import Predictions, Projection, compute_token_statistics
from roll.training.network.logprobs import compute_token_logprobs

WEIGHTS = torch.linspace(-1.5, 1.0, 27, dtype=torch.float64).reshape(3, 9)
"""Of log-prob, entropy and divergence of nine predictions in a loss."""


def reference_of(m: int, vocab: int, hidden: int, dtype: torch.dtype) -> Projection:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(m, hidden, generator=generator, dtype=torch.float64)
    return Projection(h.to(dtype), torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype))


def dense(h: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, reference: Projection, temperature: float):
    """One distribution after the other, from the definitions."""
    logprobs, entropies, divergences = [], [], []
    for m in range(len(h)):
        p = torch.softmax(w @ h[m] / temperature, dim=0)
        q = torch.softmax(reference.weight.double() @ reference.hidden[m].double() / temperature, dim=0)
        logprobs.append(p[targets[m]].log())
        entropies.append(-sum(p[v] * p[v].log() for v in range(len(p))))
        divergences.append(sum(p[v] * (p[v] / q[v]).log() for v in range(len(p))))
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(divergences)


@pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
@pytest.mark.parametrize("keep_bytes", [0, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_output_distribution_values_and_gradients_equal_the_definitions(
    monkeypatch: pytest.MonkeyPatch, chunk_elements, keep_bytes, temperature, dtype, limit
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", keep_bytes)
    monkeypatch.setattr(logprobs, "CPU_BLOCK_ELEMENTS", 30)
    h, w, targets, _ = inputs(9, 13, 6, dtype)
    reference = reference_of(9, 13, 6, dtype)
    found = compute_token_statistics(
        Projection(h, w), targets, temperature=temperature, entropy=True, reference=reference
    )
    sum((x * c.to(dtype)).sum() for x, c in zip(found[:3], WEIGHTS, strict=True)).backward()
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    expected = dense(h64, w64, targets, reference, temperature)
    sum((x * c).sum() for x, c in zip(expected, WEIGHTS, strict=True)).backward()
    for own, other in zip(found[:3], expected, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), other, rtol=limit, atol=limit)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=10 * limit, atol=10 * limit)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=10 * limit, atol=10 * limit)


@pytest.mark.parametrize("asked", [{"entropy": True}, {"divergence": True}, {"entropy": True, "divergence": True}])
def test_output_distribution_each_alone_has_its_own_gradient_and_the_rest_is_none(asked: dict[str, bool]) -> None:
    h, w, targets, _ = inputs(9, 13, 6, torch.float64)
    reference = reference_of(9, 13, 6, torch.float64)
    found = compute_token_statistics(
        Projection(h, w),
        targets,
        entropy=asked.get("entropy", False),
        reference=reference if asked.get("divergence") else None,
    )
    assert (found.entropy is not None, found.full_kl is not None) == ("entropy" in asked, "divergence" in asked)
    last = found.full_kl if found.full_kl is not None else found.entropy
    last.sum().backward()
    h64 = h.detach().requires_grad_()
    dense(h64, w.detach(), targets, reference, 1.0)[2 if "divergence" in asked else 1].sum().backward()
    torch.testing.assert_close(h.grad, h64.grad, rtol=1e-11, atol=1e-12)


def test_output_distribution_known_distributions() -> None:
    weight = torch.eye(4).requires_grad_()
    even, split = torch.zeros(4), torch.tensor([0.5, 0.5, 1e-30, 1e-30]).log()
    hidden = torch.stack([even, split])
    found = compute_token_statistics(
        Projection(hidden, weight), torch.tensor([0, 0]), entropy=True, reference=Projection(even.repeat(2, 1), weight)
    )
    torch.testing.assert_close(found.entropy, torch.tensor([4.0, 2.0]).log())  # over four words, over two
    torch.testing.assert_close(found.full_kl, torch.tensor([1.0, 2.0]).log())


def test_output_distribution_the_gradient_passes_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", 0)  # kept logits serve one backward pass, gradcheck runs several
    h, w, targets, _ = inputs(4, 7, 3, torch.float64)
    reference = reference_of(4, 7, 3, torch.float64)

    def statistics(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = compute_token_statistics(Projection(h, w), targets, temperature=1.3, entropy=True, reference=reference)
        return found[:3]

    assert torch.autograd.gradcheck(statistics, (h, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_distribution_logprobs_and_their_gradient_do_not_change(dtype: torch.dtype) -> None:
    results = []
    for entropy in (False, True):
        h, w, targets, weights = inputs(9, 13, 6, dtype)
        found = compute_token_statistics(Projection(h, w), targets, temperature=0.7, entropy=entropy)
        (found.logprobs * weights.float()).sum().backward()
        results.append((found.logprobs, h.grad, w.grad))
    (plain, plain_h, plain_w), (beside, beside_h, beside_w) = results
    torch.testing.assert_close(beside, plain, rtol=2e-6, atol=2e-6)  # float32 rounding, in both dtypes
    torch.testing.assert_close(beside_h, plain_h, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(beside_w, plain_w, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_output_distribution_asking_for_nothing_is_the_plain_function() -> None:
    h, w, targets, _ = inputs(5, 13, 6, torch.float32)
    found = compute_token_statistics(Projection(h, w), targets)
    assert found == Predictions(found.logprobs, None, None)
    assert found.logprobs.grad_fn.name() == compute_token_logprobs(h, w, targets).grad_fn.name()


def test_output_distribution_equal_distributions_diverge_by_exactly_nothing() -> None:
    h, w, targets, _ = inputs(9, 13, 6, torch.bfloat16)
    reference = Projection(h.detach().clone(), w.detach().clone())
    found = compute_token_statistics(Projection(h, w), targets, reference=reference)
    found.full_kl.sum().backward()
    assert not found.full_kl.any()
    assert not h.grad.any()
    assert not w.grad.any()


def test_output_distribution_the_reference_gets_no_gradient() -> None:
    h, w, targets, _ = inputs(3, 5, 2, torch.float32)
    reference = Projection(*(x.requires_grad_() for x in reference_of(3, 5, 2, torch.float32)[:2]))
    compute_token_statistics(Projection(h, w), targets, reference=reference).full_kl.sum().backward()
    assert reference.hidden.grad is None
    assert reference.weight.grad is None


def test_output_distribution_huge_logits_stay_finite() -> None:
    h = torch.tensor([[1e4, 0.0], [1e4, 1e4]], requires_grad=True)
    projection = torch.eye(2) * 1e3
    reference = Projection(torch.tensor([[1e4, 0.0], [0.0, 1.0]]), projection)
    found = compute_token_statistics(Projection(h, projection), torch.tensor([1, 0]), entropy=True, reference=reference)
    sum(x.sum() for x in found[:3]).backward()
    torch.testing.assert_close(found.entropy, torch.tensor([0.0, 0.6931472]))
    torch.testing.assert_close(found.full_kl, torch.tensor([0.0, 500.0 - 0.6931472]))
    assert torch.isfinite(h.grad).all()


def test_output_distribution_memory_does_not_grow_with_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2**18)  # 1 MiB
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", 2**18)
    monkeypatch.setattr(logprobs, "CPU_BLOCK_ELEMENTS", 2**17)
    monkeypatch.setattr(distributions, "BLOCK_ELEMENTS", 2**17)

    def peak(m: int) -> int:
        vocab = 8192
        h, w = torch.randn(m, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
        reference = Projection(torch.randn(m, 8), torch.randn(vocab, 8))
        targets = torch.zeros(m, dtype=torch.int64)

        def run() -> None:
            found = compute_token_statistics(Projection(h, w), targets, entropy=True, reference=reference)
            sum(x.sum() for x in found[:3]).backward()

        return peak_bytes_of(run)

    logits = 4 * 4096 * 8192  # 128 MiB
    assert peak(4096) < 12 * 2**20 < logits
    assert peak(4096) < 1.2 * peak(1024)
