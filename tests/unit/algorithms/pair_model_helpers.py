"""Batches of pairs for a real (tiny) model, their gradient by a padded pass, and what two ranks find for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import reference_pairs as paper
import torch
from pair_helpers import PAIRS, SINGLE
from reference_pairs import Padded
from training_helpers import grads_of, make_spec, reference_logprobs

from roll.algorithms.losses import (
    BradleyTerryLoss,
    DistillationLoss,
    LikelihoodLoss,
    RegressionLoss,
    SummedLoss,
    TopKDistillationLoss,
)
from roll.protocols import LossFn
from roll.training import TorchBackend
from roll.training.precision import Precision
from roll.types import Divergence, ForwardOptions, TopLogprobs, TrainingBatch, TrainingSample

DOUBLE = Precision.from_name("float64")
STILL = {"learning_rate": 1e-30}
"""A step that moves nothing, so that one back-end serves all losses."""


def pair_batch(seed: int = 0, *, num_pairs: int = 5, targets: bool = True) -> TrainingBatch:
    """Pairs of answers after a common prompt, one with a gap in its mask; the better one first or last."""
    rng = np.random.default_rng(seed)
    samples = []
    for pair in range(num_pairs):
        prompt = rng.integers(4, 260, rng.integers(3, 12))
        for index in range(2):
            tokens = np.concatenate([prompt, rng.integers(4, 260, rng.integers(4, 12))]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            if pair == 1:
                mask[len(prompt) + 1] = False
            samples.append(
                TrainingSample(
                    sample_id=f"{pair}.{index}",
                    unit=pair,
                    prefix_length=len(prompt),
                    token_ids=tokens,
                    loss_mask=mask,
                    ref_logprobs=np.where(mask, -5 + rng.normal(0, 0.5, len(tokens)), 1e6).astype(np.float32),
                    preferred=bool((pair + index) % 2),
                    target=float(np.float32(abs(rng.normal()))) if targets else None,
                    teacher=pair % 2,
                )
            )
    return TrainingBatch(samples=tuple(samples))


def padded(batch: TrainingBatch, logprobs: list[torch.Tensor]) -> Padded:
    longest = max(len(s) for s in batch.samples)

    def rows(arrays: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x in arrays])

    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    ref = [torch.from_numpy(np.where(s.loss_mask, s.ref_logprobs, 0)).double() for s in batch.samples]
    return Padded(
        logprobs=rows(logprobs),
        ref=rows(ref),
        mask=rows([m.double() for m in masks]),
        preferred=[bool(s.preferred) for s in batch.samples],
        pair=[s.unit for s in batch.samples],
        target=None if batch.samples[0].target is None else [float(s.target or 0.0) for s in batch.samples],
    )


def padded_gradient(
    model: Any, batch: TrainingBatch, expected: Callable[[Padded], torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = expected(padded(batch, reference_logprobs(model, batch)))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def scored(batch: TrainingBatch) -> TrainingBatch:
    """For a reward model: a dummy after each text is its one loss token."""
    samples = []
    for sample in batch.samples:
        tokens = np.append(sample.token_ids, 0).astype(np.int32)
        mask = np.arange(len(tokens)) == len(tokens) - 1
        samples.append(replace(sample, token_ids=tokens, loss_mask=mask, ref_logprobs=None))
    return replace(batch, samples=tuple(samples))


def scored_gradient(
    model: Any, head: torch.Tensor, batch: TrainingBatch, expected: Callable[[Padded], torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """By the hidden state of each text's last token, text by text."""
    model.zero_grad()
    weight, bias, values = head.clone().requires_grad_(), torch.zeros(1, dtype=torch.float64, requires_grad=True), []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))[None]
        values.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1] @ weight[0] + bias[0])
    one = torch.zeros(len(values), 1, dtype=torch.float64)
    loss = expected(
        Padded(
            logprobs=one,
            ref=one,
            mask=one + 1,
            preferred=[bool(s.preferred) for s in batch.samples],
            pair=[s.unit for s in batch.samples],
            target=None if batch.samples[0].target is None else [float(s.target or 0.0) for s in batch.samples],
            values=torch.stack(values),
        )
    )
    loss.backward()
    assert weight.grad is not None and bias.grad is not None
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads | {"score.weight": weight.grad, "score.bias": bias.grad}


def critic(model: Path, **settings: Any) -> TorchBackend:
    """A reward model whose head says something."""
    ranks = {k: settings.pop(k) for k in ("rank", "world_size", "init_method") if k in settings}
    spec = replace(make_spec(model, **STILL, **settings), role="critic", **ranks)
    backend = TorchBackend(spec, precision=DOUBLE)
    target = backend.masters.parameters["score.weight"]
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        whole = torch.randn(target.shape, generator=generator, dtype=torch.float64)
        if hasattr(target, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
        else:
            target.copy_(whole)
    return backend


def tops(batch: TrainingBatch, seed: int = 0) -> TrainingBatch:
    """Random tokens of a teacher's, descending, which leave 1/10 to all others."""
    rng, samples = np.random.default_rng(seed), []
    for sample in batch.samples:
        p = np.sort(0.9 * rng.dirichlet(np.ones(3), len(sample)), axis=1)[:, ::-1]
        ids = rng.permuted(np.tile(np.arange(260), (len(sample), 1)), axis=1)[:, :3]
        top = TopLogprobs(token_ids=ids.astype(np.int32), logprobs=np.log(p).astype(np.float32))
        samples.append(replace(sample, teacher_top=top))
    return replace(batch, samples=tuple(samples))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that one rank and two must find the same for."""

    batch: TrainingBatch
    loss: LossFn
    backend: str


def cases() -> dict[str, Case]:
    """An odd number of pairs, so that at last one of two ranks idles; in the end with teachers of two domains."""
    batch, alone = pair_batch(1, targets=False), pair_batch(2, num_pairs=1, targets=False)
    found = {name: Case(batch=batch, loss=loss, backend="policy") for name, (loss, _) in (PAIRS | SINGLE).items()}
    found["one pair"] = Case(batch=alone, loss=PAIRS["dpo"][0], backend="policy")
    for form in (Divergence(), Divergence(kind="jsd", temperature=2.0)):
        found[f"distillation, {form.kind}"] = Case(
            batch=batch, loss=DistillationLoss(divergence=form), backend="policy"
        )
    found["distillation of one text"] = Case(
        batch=replace(alone, samples=alone.samples[:1]), loss=DistillationLoss(), backend="policy"
    )
    everything = SummedLoss(
        parts=(
            (0.5, TopKDistillationLoss()),
            (1.0, LikelihoodLoss()),
            (0.3, DistillationLoss()),
            (1.0, PAIRS["dpo"][0]),
        )
    )
    found["all at once"] = Case(batch=tops(batch), loss=everything, backend="policy")
    found["tops of one text"] = Case(
        batch=tops(replace(alone, samples=alone.samples[:1])), loss=TopKDistillationLoss(), backend="policy"
    )
    found["scores of pairs"] = Case(
        batch=scored(pair_batch(3)), loss=BradleyTerryLoss(centering=0.1), backend="reward model"
    )
    found["scores of texts"] = Case(batch=scored(pair_batch(3)), loss=RegressionLoss(), backend="reward model")
    return found


def run_cases(model: Path, teachers: tuple[str, ...], **ranks: Any) -> dict[str, Any]:
    small = {"max_tokens_per_micro_batch": 30}
    spec = replace(make_spec(model, **STILL, **small), teachers=teachers, **ranks)
    backends = {"policy": TorchBackend(spec, precision=DOUBLE), "reward model": critic(model, **small, **ranks)}
    found: dict[str, Any] = {}
    for name, case in cases().items():
        result = backends[case.backend].train_step(case.batch, case.loss)
        found[name] = result.loss, result.metrics, grads_of(backends[case.backend])
    batch = pair_batch(4)
    top = backends["policy"].forward(batch, ["top_logprobs"], ForwardOptions(num_top=3))["top_logprobs"]
    found["tops"] = [(t.token_ids, t.logprobs) for t in top]
    return found


def run_rank(rank: int, directory: Path, model: Path, teachers: tuple[str, ...]) -> None:
    meeting = f"file://{directory / 'meeting'}"
    found = run_cases(model, teachers, rank=rank, world_size=2, init_method=meeting)
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()


SCORED: dict[str, tuple[LossFn, Callable[[Padded], torch.Tensor]]] = {
    "bradley-terry": (BradleyTerryLoss(centering=0.1), lambda b: paper.bradley_terry(b, 0.1)),
    "regression": (RegressionLoss(), paper.regression),
}
