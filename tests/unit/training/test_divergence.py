"""Divergences from a teacher, and log-probs of several tokens, equal a dense float64 softmax and stay small."""

from __future__ import annotations

import pytest
import torch
from test_logprobs import inputs, peak_bytes_of

from roll.training.network import distributions, logprobs
from roll.training.network.distributions import Projection
from roll.training.network.divergence import compute_teacher_divergence
from roll.training.network.logprobs import compute_token_logprobs
from roll.training.network.top_logprobs import compute_logprobs, compute_topk_logprobs
from roll.types import Divergence

KINDS = [
    Divergence(),
    Divergence(kind="forward"),
    Divergence(kind="jsd"),
    Divergence(kind="jsd", beta=0.1),
    Divergence(kind="jsd", beta=0.9),
]
SETTINGS = pytest.mark.parametrize("chunk_elements", [1, 40, 10**6])
KEEPING = pytest.mark.parametrize("keep_bytes", [0, 10**9])
DTYPES = pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])


@pytest.fixture(name="small_chunks")
def _small_chunks(monkeypatch: pytest.MonkeyPatch, chunk_elements: int, keep_bytes: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", keep_bytes)
    monkeypatch.setattr(logprobs, "CPU_BLOCK_ELEMENTS", 30)


def teacher_of(m: int, vocab: int, hidden: int, dtype: torch.dtype) -> Projection:
    """Of another width than the policy."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(m, hidden + 2, generator=generator, dtype=torch.float64)
    return Projection(h.to(dtype), torch.randn(vocab, hidden + 2, generator=generator, dtype=torch.float64).to(dtype))


def dense(form: Divergence, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[M] of distributions [M, V], from the definitions."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a / b).log()).sum(1)

    if form.kind != "jsd":
        return kl(p, q) if form.kind == "reverse" else kl(q, p)
    mixture = form.beta * q + (1 - form.beta) * p
    return form.beta * kl(q, mixture) + (1 - form.beta) * kl(p, mixture)


@SETTINGS
@KEEPING
@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", KINDS, ids=lambda f: f"{f.kind}-{f.beta}")
@pytest.mark.usefixtures("small_chunks")
def test_divergence_values_and_gradients_equal_the_definitions(
    form: Divergence, temperature: float, dtype, limit
) -> None:
    h, w, targets, weights = inputs(9, 13, 6, dtype)
    teacher = teacher_of(9, 13, 6, dtype)
    found = compute_teacher_divergence(Projection(h, w), teacher, targets, form, temperature=temperature)
    sum((x * c.to(dtype)).sum() for x, c in zip(found, (weights, weights.flip(0)), strict=True)).backward()
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    p = torch.softmax(h64 @ w64.t() / temperature, dim=1)
    q = torch.softmax(teacher.hidden.double() @ teacher.weight.double().t() / temperature, dim=1)
    expected = p.gather(1, targets[:, None])[:, 0].log(), dense(form, p, q)
    sum((x * c).sum() for x, c in zip(expected, (weights, weights.flip(0)), strict=True)).backward()
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), other, rtol=limit, atol=limit)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=10 * limit, atol=10 * limit)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=10 * limit, atol=10 * limit)


@SETTINGS
@KEEPING
@DTYPES
@pytest.mark.usefixtures("small_chunks")
def test_divergence_several_tokens_log_probs_and_gradients_equal_those_of_log_softmax(dtype, limit) -> None:
    h, w, _, _ = inputs(9, 13, 6, dtype)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 13, (9, 4), generator=generator)  # some twice
    weights = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    found = compute_logprobs(Projection(h, w), ids, temperature=0.7)
    (found * weights.to(dtype)).sum().backward()
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    expected = torch.log_softmax(h64 @ w64.t() / 0.7, dim=1).gather(1, ids)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=10 * limit, atol=10 * limit)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=10 * limit, atol=10 * limit)
    top_ids, top = compute_topk_logprobs(Projection(h, w), 5, temperature=0.7)
    values, right = torch.log_softmax(h64 @ w64.t() / 0.7, dim=1).topk(5, dim=1)
    assert torch.equal(top_ids, right)
    torch.testing.assert_close(top.double(), values, rtol=limit, atol=limit)
    assert not top.requires_grad


@pytest.mark.parametrize("form", KINDS, ids=lambda f: f"{f.kind}-{f.beta}")
def test_divergence_gradients_pass_gradcheck(monkeypatch: pytest.MonkeyPatch, form: Divergence) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20)
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", 0)  # kept logits serve one backward pass, gradcheck runs several
    h, w, targets, _ = inputs(4, 7, 3, torch.float64)
    teacher, ids = teacher_of(4, 7, 3, torch.float64), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0]])

    def statistics(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        policy = Projection(h, w)
        return *compute_teacher_divergence(policy, teacher, targets, form, temperature=1.3), compute_logprobs(
            policy, ids
        )

    assert torch.autograd.gradcheck(statistics, (h, w))


@pytest.mark.parametrize("form", KINDS, ids=lambda f: f"{f.kind}-{f.beta}")
def test_divergence_an_equal_teacher_is_no_distance_away(form: Divergence) -> None:
    h, w, targets, _ = inputs(9, 13, 6, torch.float32)
    _, found = compute_teacher_divergence(
        Projection(h, w), Projection(h.detach().clone(), w.detach().clone()), targets, form
    )
    found.sum().backward()
    limit = 1e-6 if form.kind == "jsd" else 0.0
    assert found.abs().max() <= limit
    assert h.grad.abs().max() <= limit


def test_divergence_log_probs_are_those_without_a_teacher() -> None:
    h, w, targets, _ = inputs(9, 13, 6, torch.float32)
    own, _ = compute_teacher_divergence(Projection(h, w), teacher_of(9, 13, 6, torch.float32), targets, Divergence())
    torch.testing.assert_close(own, compute_token_logprobs(h, w, targets), rtol=2e-6, atol=2e-6)


def test_divergence_a_teacher_gets_no_gradient() -> None:
    h, w, targets, _ = inputs(3, 5, 2, torch.float32)
    teacher = Projection(*(x.requires_grad_() for x in teacher_of(3, 5, 2, torch.float32)[:2]))
    compute_teacher_divergence(Projection(h, w), teacher, targets, Divergence(kind="jsd"))[1].sum().backward()
    assert teacher.hidden.grad is None
    assert teacher.weight.grad is None


@pytest.mark.parametrize("form", KINDS, ids=lambda f: f"{f.kind}-{f.beta}")
def test_divergence_huge_logits_stay_finite(form: Divergence) -> None:
    h = torch.tensor([[1e4, 0.0], [1e4, 1e4]], requires_grad=True)
    projection = torch.eye(2) * 1e3
    teacher = Projection(torch.tensor([[0.0, 1e4], [0.0, 1.0]]), projection)
    policy, targets = Projection(h, projection), torch.tensor([1, 0])
    found = *compute_teacher_divergence(policy, teacher, targets, form), compute_logprobs(policy, targets[:, None])
    assert all(torch.isfinite(x).all() for x in found)
    sum(x.sum() for x in found).backward()
    assert torch.isfinite(h.grad).all()


def test_divergence_memory_does_not_grow_with_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2**18)  # 1 MiB
    monkeypatch.setattr(logprobs, "MAX_KEPT_BYTES", 2**18)
    monkeypatch.setattr(logprobs, "CPU_BLOCK_ELEMENTS", 2**17)
    monkeypatch.setattr(distributions, "BLOCK_ELEMENTS", 2**17)

    def peak(m: int) -> int:
        vocab = 8192
        h, w = torch.randn(m, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
        teacher, targets = Projection(torch.randn(m, 8), torch.randn(vocab, 8)), torch.zeros(m, dtype=torch.int64)

        def run() -> None:
            compute_teacher_divergence(Projection(h, w), teacher, targets, Divergence(kind="jsd"))[1].sum().backward()
            compute_logprobs(Projection(h, w), targets[:, None]).sum().backward()

        return peak_bytes_of(run)

    logits = 4 * 1024 * 8192  # 32 MiB
    large, small = peak(1024), peak(256)
    assert large < 14 * 2**20 < logits
    assert large < 1.2 * small
