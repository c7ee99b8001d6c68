"""A trainer that holds teachers: loss and gradient are the dense ones, whatever the layout; vocabularies must agree."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_divergence import KINDS, dense
from training_helpers import grads_of, make_batch, make_spec, relative_error
from worlds.tiny_model import write_tiny_model

from roll.algorithms.correction import Correction
from roll.algorithms.losses import (
    DistillationLoss,
    LikelihoodLoss,
    PolicyLoss,
    SummedLoss,
    TopKDistillationLoss,
)
from roll.config.model import LoRAConfig
from roll.errors import ModelError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.types import Divergence, ForwardOptions, TopLogprobs, TrainingBatch

pytestmark = pytest.mark.integration

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
LIMIT = 2e-7
"""Of a gradient's relative error: norms and softmax of the model are in float32, also where it is in float64."""
LAYOUTS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": False, "max_tokens_per_micro_batch": 1},
    {"share_prefix": True, "max_tokens_per_micro_batch": 30, "activation_checkpointing": True},
]
BY_LAYOUT = pytest.mark.parametrize("settings", LAYOUTS, ids=["whole", "alone", "small"])


@pytest.fixture(scope="module", name="teachers")
def _teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of another depth and width than the student."""
    directory = tmp_path_factory.mktemp("teachers")
    return (
        write_tiny_model(directory / "a", seed=7, layers=3, hidden=48),
        write_tiny_model(directory / "b", seed=8, layers=1, tied=False),
    )


def build(student: Path, teachers: tuple[Path, ...], **settings: Any) -> TorchBackend:
    spec = dataclasses.replace(make_spec(student, **settings), teachers=tuple(map(str, teachers)))
    return TorchBackend(spec, precision=DOUBLE)


def two_domains(batch: TrainingBatch) -> TrainingBatch:
    return dataclasses.replace(batch, samples=tuple(dataclasses.replace(s, teacher=s.unit % 2) for s in batch.samples))


def table(model: Any, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """[L - 1, V] log-probs of one sample by transformers alone."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)


def mean_over_tokens(
    student: Any, teachers: list[Any], batch: TrainingBatch, term: Callable, temperature: float | None = None
) -> torch.Tensor:
    terms = []
    for sample in batch.samples:
        at = np.flatnonzero(sample.loss_mask) - 1
        t = temperature or batch.temperature
        with torch.no_grad():
            logq = table(teachers[sample.teacher], sample.token_ids, t)[at]
        terms.append(term(table(student, sample.token_ids, t)[at], logq))
    return torch.cat(terms).mean()


def same(backend: TorchBackend, batch: TrainingBatch, loss: Any, expected: torch.Tensor, student: Any) -> dict:
    student.zero_grad()
    expected.backward()
    result = backend.train_step(batch, loss)
    assert result.loss == pytest.approx(expected.item(), rel=LIMIT)
    named = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert relative_error(grads_of(backend), {n: named[n] for n in grads_of(backend)}) <= LIMIT
    return dict(result.metrics)


@BY_LAYOUT
@pytest.mark.parametrize("form", KINDS[:3], ids=lambda f: f.kind)
def test_teacher_divergence_from_the_teacher_of_each_domain(
    tiny_model: Path, teachers: tuple[Path, ...], form: Divergence, settings: dict[str, Any]
) -> None:
    batch = two_domains(make_batch(2))
    student, *others = (load_causal_lm(p, torch.float64, attention="sdpa") for p in (tiny_model, *teachers))
    expected = mean_over_tokens(student, others, batch, lambda p, q: dense(form, p.exp(), q.exp()))
    metrics = same(build(tiny_model, teachers, **settings), batch, DistillationLoss(divergence=form), expected, student)
    assert metrics["distill/divergence"] == pytest.approx(expected.item(), rel=LIMIT)


@BY_LAYOUT
def test_teacher_a_temperature_of_its_own_beside_entropy_and_a_reference(
    tiny_model: Path, teachers: tuple[Path, ...], settings: dict[str, Any]
) -> None:
    """Everything at once: each part is where it would be alone."""
    form = Divergence(kind="forward", temperature=2.0)
    policy = PolicyLoss(
        correction=Correction(upper=None), entropy_coefficient=0.3, kl_coefficient=0.2, kl_estimator="full"
    )
    batch = make_batch(3)
    spec = dataclasses.replace(make_spec(tiny_model, **settings), holds_reference=True)
    with_all = TorchBackend(dataclasses.replace(spec, teachers=(str(teachers[0]),)), precision=DOUBLE)
    alone = TorchBackend(spec, precision=DOUBLE).train_step(batch, policy)
    student, teacher = (load_causal_lm(p, torch.float64, attention="sdpa") for p in (tiny_model, teachers[0]))
    distance = mean_over_tokens(student, [teacher], batch, lambda p, q: dense(form, p.exp(), q.exp()), 2.0)
    result = with_all.train_step(batch, SummedLoss(parts=((1.0, policy), (0.5, DistillationLoss(divergence=form)))))
    assert result.loss == pytest.approx(alone.loss + 0.5 * distance.item(), rel=LIMIT)
    assert result.metrics["policy/entropy"] == alone.metrics["policy/entropy"]
    for own, other in zip(result.logprobs, alone.logprobs, strict=True):
        np.testing.assert_array_equal(own, other)


def topped(batch: TrainingBatch, teacher: Any, k: int) -> TrainingBatch:
    samples = []
    for sample in batch.samples:
        ids, logprobs = np.zeros((len(sample), k), np.int32), np.zeros((len(sample), k), np.float32)
        at = np.flatnonzero(sample.loss_mask)
        with torch.no_grad():
            values, tokens = table(teacher, sample.token_ids, batch.temperature)[at - 1].topk(k, dim=1)
        ids[at], logprobs[at] = tokens.numpy(), values.float().numpy()
        samples.append(dataclasses.replace(sample, teacher_top=TopLogprobs(token_ids=ids, logprobs=logprobs)))
    return dataclasses.replace(batch, samples=tuple(samples))


@BY_LAYOUT
def test_teacher_likeliest_tokens_of_a_teacher(
    tiny_model: Path, teachers: tuple[Path, ...], settings: dict[str, Any]
) -> None:
    student, teacher = (load_causal_lm(p, torch.float64, attention="sdpa") for p in (tiny_model, teachers[0]))
    batch = topped(make_batch(4), teacher, 5)

    terms = []
    for sample in batch.samples:
        at = np.flatnonzero(sample.loss_mask)
        ids = torch.from_numpy(sample.teacher_top.token_ids[at].astype(np.int64))
        q = torch.from_numpy(sample.teacher_top.logprobs[at]).double().exp()
        p = table(student, sample.token_ids, batch.temperature)[at - 1].exp().gather(1, ids)
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], dim=1) for x in (p, q))
        terms.append((q * (q / p).log()).sum(1))
    expected = torch.cat(terms).mean()
    loss = SummedLoss(parts=((1.0, TopKDistillationLoss()), (0.0, LikelihoodLoss())))
    metrics = same(build(tiny_model, (), **settings), batch, loss, expected, student)
    assert metrics["sft/nll"] == pytest.approx(metrics["distill/nll"])


def test_teacher_a_trainer_says_a_teachers_likeliest_tokens(tiny_model: Path, teachers: tuple[Path, ...]) -> None:
    batch, model = make_batch(5), load_causal_lm(teachers[0], torch.float64, attention="sdpa")
    first = dataclasses.replace(batch.samples[0], loss_mask=np.zeros(len(batch.samples[0]), np.bool_))
    batch = dataclasses.replace(batch, samples=(first, *batch.samples[1:]))
    spec = dataclasses.replace(make_spec(teachers[0], max_tokens_per_micro_batch=30), role="reference")
    backend = TorchBackend(spec, precision=DOUBLE)
    expected = [s.teacher_top for s in topped(batch, model, 3).samples]
    for outputs in (["top_logprobs"], ["logprobs", "top_logprobs"]):
        found = backend.forward(batch, outputs, ForwardOptions(num_top=3))["top_logprobs"]
        for own, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(own.token_ids, right.token_ids)
            np.testing.assert_allclose(own.logprobs, right.logprobs, rtol=1e-6)
            assert own.logprobs.dtype == np.float32
    with pytest.raises(ValueError, match="num_top must be at least 1, got None"):
        backend.forward(batch, ["top_logprobs"])


def test_teacher_a_teacher_stays_and_is_no_part_of_what_is_trained_or_sent(
    tiny_model: Path, teachers: tuple[Path, ...]
) -> None:
    backend, plain = build(tiny_model, teachers), build(tiny_model, ())
    before = {n: p.clone() for n, p in backend.network.teachers.named_parameters()}
    backend.train_step(two_domains(make_batch(6)), DistillationLoss())
    for name, parameter in backend.network.teachers.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert backend.weights().names() == plain.weights().names()
    assert backend.masters.parameters.keys() == plain.masters.parameters.keys()


def test_teacher_with_adapters_the_first_step_is_that_of_the_whole_model(
    tiny_model: Path, teachers: tuple[Path, ...]
) -> None:
    batch, loss = two_domains(make_batch(6)), DistillationLoss()
    adapted, plain = (build(tiny_model, teachers, lora=lora) for lora in (LoRAConfig(rank=2), None))
    assert adapted.train_step(batch, loss).loss == pytest.approx(plain.train_step(batch, loss).loss, rel=LIMIT)
    grads = grads_of(adapted)
    assert all("lora" in name for name in grads)
    assert any(grad.any() for grad in grads.values())


def test_teacher_a_student_comes_to_say_what_its_teacher_says(tiny_model: Path, teachers: tuple[Path, ...]) -> None:
    batch = make_batch(7)
    for loss, given in (
        (DistillationLoss(), batch),
        (TopKDistillationLoss(), topped(batch, load_causal_lm(teachers[0], torch.float64, attention="sdpa"), 20)),
    ):
        backend = build(tiny_model, teachers[:1], learning_rate=3e-3)
        losses = [backend.train_step(given, loss).loss for _ in range(20)]
        assert losses[-1] < 0.7 * losses[0]


def test_teacher_what_is_missing_is_named(tiny_model: Path, teachers: tuple[Path, ...]) -> None:
    batch = make_batch(8)
    with pytest.raises(ValueError, match=r"has teacher index 0 .counted from 0., but the number of teachers is 0"):
        build(tiny_model, ()).train_step(batch, DistillationLoss())
    with pytest.raises(ValueError, match="the loss requires teacher_top for every sample"):
        build(tiny_model, ()).train_step(batch, TopKDistillationLoss())
    foreign = TopLogprobs(token_ids=np.full((99, 2), 260, np.int32), logprobs=np.zeros((99, 2), np.float32))
    given = dataclasses.replace(
        batch, samples=tuple(dataclasses.replace(s, teacher_top=foreign) for s in batch.samples)
    )
    with pytest.raises(ValueError, match="teacher_top contains token 260, but the vocabulary size is 260"):
        build(tiny_model, ()).train_step(given, TopKDistillationLoss())
    with pytest.raises(ValueError, match="must be at most the vocabulary size 260, got 261"):
        build(tiny_model, ()).forward(batch, ["top_logprobs"], ForwardOptions(num_top=261))
    different = SummedLoss(
        parts=((1.0, DistillationLoss()), (1.0, DistillationLoss(divergence=Divergence(kind="forward"))))
    )
    with pytest.raises(ValueError, match=r"require conflicting values of LossRequirements\.divergence"):
        build(tiny_model, teachers).train_step(batch, different)


def test_teacher_another_vocabulary_is_refused(tiny_model: Path, teachers: tuple[Path, ...], tmp_path: Path) -> None:
    other = shutil.copytree(teachers[0], tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = [token for token, number in vocabulary.items() if number in (100, 101)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(
        ModelError,
        match=r"has a different vocabulary from .*2 tokens of the model are missing in the teacher",
    ):
        build(tiny_model, (other,))


@pytest.mark.parametrize("form", [Divergence(), Divergence(kind="jsd", beta=0.3)], ids=lambda f: f.kind)
@pytest.mark.parametrize("longer", ["teacher", "student"])
def test_teacher_rows_that_one_model_has_beyond_the_other_are_not_compared(
    tiny_model: Path, teachers: tuple[Path, ...], tmp_path: Path, longer: str, form: Divergence
) -> None:
    """Models of one tokenizer, whose projections are padded to different sizes."""
    short = teachers[0] if longer == "teacher" else tiny_model
    model = load_causal_lm(short, torch.float32)
    rows = len(model.get_output_embeddings().weight)
    model.resize_token_embeddings(rows + 4, mean_resizing=False)
    padded = shutil.copytree(short, tmp_path / "padded")
    model.save_pretrained(padded)
    student, teacher = (padded, teachers[0]) if longer == "student" else (tiny_model, padded)
    batch = make_batch(5)
    backend = build(student, (teacher,))
    step = backend.train_step(batch, DistillationLoss(divergence=form))
    own, other = (load_causal_lm(path, torch.float64) for path in (student, teacher))

    def of_common(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return dense(form, *(x[:, :rows] / x[:, :rows].sum(1, keepdim=True) for x in (p, q)))

    terms, nll = [], []
    for sample in batch.samples:
        at = np.flatnonzero(sample.loss_mask) - 1
        mine, theirs = (table(m, sample.token_ids, batch.temperature)[at] for m in (own, other))
        terms.append(of_common(mine.exp(), theirs.exp()))
        nll.append(-mine.gather(1, torch.from_numpy(sample.token_ids[at + 1].astype(np.int64))[:, None]))
    torch.cat(terms).mean().backward()
    assert step.loss == pytest.approx(torch.cat(terms).mean().item(), rel=1e-6)
    assert step.metrics["distill/nll"] == pytest.approx(torch.cat(nll).mean().item(), rel=1e-6)  # over all its rows
    expected = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    found = grads_of(backend)
    assert relative_error(found, {n: expected[n] for n in found}) <= LIMIT
