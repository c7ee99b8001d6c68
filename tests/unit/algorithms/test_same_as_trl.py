"""Loss and gradient are those of TRL's trainers, on the same batch and a tiny random Llama.

TRL's trainers make the batch of texts, compute its loss and its gradient; ROLL's trainer gets the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pair_model_helpers import STILL, critic
from training_helpers import grads_of, make_spec, reference_logprobs, relative_error
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import (
    BradleyTerryLoss,
    DistillationLoss,
    KTOLoss,
    LikelihoodLoss,
    PreferenceLoss,
    SummedLoss,
)
from roll.algorithms.losses.preference import compute_reference_point, pairwise
from roll.models import load_causal_lm, load_tokenizer
from roll.protocols import LossFn
from roll.training import TorchBackend
from roll.types import Divergence, TrainingBatch, TrainingSample

vllm_speaks = os.environ.get("VLLM_LOGGING_LEVEL")
trl = pytest.importorskip("trl")
if vllm_speaks is None:  # TRL silences vLLM, whose messages other tests read
    os.environ.pop("VLLM_LOGGING_LEVEL", None)
pytestmark = pytest.mark.slow

LIMIT = 1e-5
PROMPTS = ["Add two: 3+4=", "Say it", "Q", "Count to five. "]
BETTER = ["7, of course", "it", "A longer answer", "1 2 3 4 5"]
WORSE = ["8", "No, never will I", "b", "5 4 3 2 1 0"]
SMOOTHED = {"robust": 0.1, "exo_pair": 1e-3}
OF_DPO: dict[str, LossFn] = {
    "sigmoid": PreferenceLoss(),
    "hinge": PreferenceLoss(pairwise_loss=pairwise.HingeLoss()),
    "ipo": PreferenceLoss(pairwise_loss=pairwise.SquaredLoss(), scores="mean"),
    "exo_pair": PreferenceLoss(pairwise_loss=pairwise.ExoPairLoss()),
    "nca_pair": PreferenceLoss(pairwise_loss=pairwise.NcaPairLoss()),
    "robust": PreferenceLoss(pairwise_loss=pairwise.SigmoidLoss(label_smoothing=0.1, robust=True)),
    "sppo_hard": PreferenceLoss(pairwise_loss=pairwise.SppoHardLoss()),
    "apo_zero": PreferenceLoss(pairwise_loss=pairwise.ApoZeroLoss()),
    "apo_down": PreferenceLoss(pairwise_loss=pairwise.ApoDownLoss()),
    "discopop": PreferenceLoss(pairwise_loss=pairwise.DiscopopLoss()),
    "sigmoid_norm": PreferenceLoss(scores="mean"),
    "sigmoid, sft": PreferenceLoss(likelihood=0.3),
    "sigmoid, nca_pair": SummedLoss(
        parts=((1.0, PreferenceLoss()), (0.3, PreferenceLoss(pairwise_loss=pairwise.NcaPairLoss())))
    ),
}
"""By TRL's names of loss types; `aot` and `aot_unpaired` sort all answers of a batch, which no loss here does."""


@dataclass(frozen=True)
class World:
    """A student, its reference and their tokenizer."""

    student: Path
    other: Path
    tokenizer: Any

    def models(self, count: int = 2) -> list[Any]:
        return [load_causal_lm(path, torch.float32) for path in (self.student, self.other)[:count]]


@pytest.fixture(scope="module", name="world")
def _world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    other = write_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=11)
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.bos_token = None  # ORPO's likelihood counts what follows the first token of a prompt
    return World(tiny_model, other, tokenizer)


def dataset(columns: dict[str, Sequence[Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({name: list(values) for name, values in columns.items()})


def settings(kind: Any, directory: Path, **given: Any) -> Any:
    return kind(
        output_dir=str(directory), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=len(PROMPTS), **given,
    )  # fmt: skip


def theirs(trainer: Any, rows: Any = None, **given: Any) -> tuple[Any, float, dict[str, torch.Tensor]]:
    """TRL's batch, loss and gradient."""
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))] if rows is None else rows
    batch = trainer.data_collator(rows)
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(batch), **given)
    loss.backward()
    named = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return batch, loss.item(), named


def sample_of(ids: Sequence[int], mask: Sequence[bool], index: int, **columns: Any) -> TrainingSample:
    own = {"unit": index, "prefix_length": int(np.argmax(mask)) if "preferred" in columns else 0}
    tokens, counted = np.array(ids, np.int32), np.array(mask, np.bool_)
    return TrainingSample(sample_id=str(index), token_ids=tokens, loss_mask=counted, **own | columns)


def cut(ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor) -> list[tuple[list[int], list[bool]]]:
    """Rows without their padding."""
    return [
        (row[real].tolist(), own[real].bool().tolist())
        for row, real, own in zip(ids, attention.bool(), mask, strict=True)
    ]


def with_reference(batch: TrainingBatch, model: Any) -> TrainingBatch:
    with torch.no_grad():
        found = reference_logprobs(model, batch)
    samples = [replace(s, ref_logprobs=x.numpy()) for s, x in zip(batch.samples, found, strict=True)]
    return replace(batch, samples=tuple(samples))


def check(
    batch: TrainingBatch, loss: LossFn, right: float, named: dict[str, torch.Tensor], build: Callable[..., TorchBackend]
) -> dict[str, float]:
    """Whole, and in micro-batches of a pair or a text each."""
    for layout in ({}, {"max_tokens_per_micro_batch": 1}):
        backend = build(**layout)
        result = backend.train_step(batch, loss)
        assert result.loss == pytest.approx(right, rel=LIMIT, abs=1e-7)
        found = grads_of(backend)
        assert relative_error(found, {name: named[name] for name in found}) <= LIMIT
    return dict(result.metrics)


def student_of(world: World) -> Callable[..., TorchBackend]:
    return lambda **layout: TorchBackend(make_spec(world.student, **STILL, **layout))


def test_trl_parity_sft(world: World, tmp_path: Path) -> None:
    texts = dataset({"prompt": PROMPTS, "completion": BETTER})
    args = settings(trl.SFTConfig, tmp_path, completion_only_loss=True, loss_type="nll")
    trainer = trl.SFTTrainer(world.models(1)[0], args, train_dataset=texts, processing_class=world.tokenizer)
    batch, _, _ = theirs(trainer)
    num_tokens = (batch["labels"] != -100).sum()
    batch, loss, named = theirs(trainer, num_items_in_batch=num_tokens)
    rows = cut(batch["input_ids"], batch["input_ids"] != world.tokenizer.pad_token_id, batch["labels"] != -100)
    own = TrainingBatch(samples=tuple(sample_of(*row, i) for i, row in enumerate(rows)))
    assert own.num_loss_tokens == int(num_tokens)
    check(own, LikelihoodLoss(), loss, named, student_of(world))


@pytest.mark.parametrize("name", OF_DPO)
def test_trl_parity_dpo(name: str, world: World, tmp_path: Path) -> None:
    kinds = name.split(", ")
    args = settings(
        trl.DPOConfig, tmp_path, loss_type=kinds, loss_weights=[1.0, 0.3][: len(kinds)], beta=0.1,
        label_smoothing=SMOOTHED.get(name, 0.0),
    )  # fmt: skip
    pairs = dataset({"prompt": PROMPTS, "chosen": BETTER, "rejected": WORSE})
    model, reference = world.models()
    trainer = trl.DPOTrainer(model, reference, args, train_dataset=pairs, processing_class=world.tokenizer)
    batch, loss, named = theirs(trainer)
    rows = cut(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    half = len(rows) // 2
    samples = [sample_of(*row, i, unit=i % half, preferred=i < half) for i, row in enumerate(rows)]
    own = with_reference(TrainingBatch(samples=tuple(samples)), load_causal_lm(world.other, torch.float32))
    metrics = check(own, OF_DPO[name], loss, named, student_of(world))
    said = trainer._metrics["train"]
    assert metrics["preference/logprob_chosen"] == pytest.approx(said["logps/chosen"][-1], rel=1e-5)
    assert metrics["preference/logprob_rejected"] == pytest.approx(said["logps/rejected"][-1], rel=1e-5)
    if "mean" not in str(OF_DPO[name]):
        assert metrics["preference/margin"] == pytest.approx(said["rewards/margins"][-1], rel=1e-4)
        assert metrics["preference/accuracy"] == pytest.approx(said["rewards/accuracies"][-1])


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_trl_parity_kto(kind: str, world: World, tmp_path: Path) -> None:
    labels = [True, False, True, True]
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    args = settings(trl.KTOConfig, tmp_path, loss_type=kind, beta=0.3, **weights)
    answers = dataset({"prompt": PROMPTS, "completion": BETTER, "label": labels})
    model, reference = world.models()
    trainer = trl.KTOTrainer(model, reference, args, train_dataset=answers, processing_class=world.tokenizer)
    batch, loss, named = theirs(trainer)
    rows = cut(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    samples = [sample_of(*row, i, preferred=bool(batch["label"][i])) for i, row in enumerate(rows)]
    reference = load_causal_lm(world.other, torch.float32)
    own = with_reference(TrainingBatch(samples=tuple(samples)), reference)
    z0 = 0.0
    if kind == "kto":
        mismatched = cut(batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"])
        others = TrainingBatch(samples=tuple(sample_of(*row, i) for i, row in enumerate(mismatched)))
        sums = []
        for model in (load_causal_lm(world.student, torch.float32), reference):
            found = with_reference(others, model).samples
            sums.append([float(s.ref_logprobs[s.loss_mask].sum()) for s in found])
        z0 = compute_reference_point(*sums)
        assert z0 == pytest.approx(trainer._metrics["train"]["kl"][-1], rel=1e-5)
    check(own, KTOLoss(reference_point=z0, beta=0.3, **weights), loss, named, student_of(world))


REFERENCE_FREE: dict[str, tuple[dict[str, Any], PreferenceLoss]] = {
    "cpo": ({"loss_type": "sigmoid"}, PreferenceLoss(against_reference=False, likelihood=1.0)),
    "cpo, smoothed": (
        {"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.5},
        PreferenceLoss(
            pairwise_loss=pairwise.SigmoidLoss(label_smoothing=0.1), against_reference=False, likelihood=0.5
        ),
    ),
    "cpo, hinge": (
        {"loss_type": "hinge", "cpo_alpha": 0.0},
        PreferenceLoss(pairwise_loss=pairwise.HingeLoss(), against_reference=False),
    ),
    "cpo, ipo": (
        {"loss_type": "ipo", "cpo_alpha": 0.0},
        PreferenceLoss(pairwise_loss=pairwise.SquaredLoss(), scores="mean", against_reference=False),
    ),
    "simpo": (
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
        PreferenceLoss(beta=2.0, scores="mean", against_reference=False, margin=0.5),
    ),
    "orpo": (
        {},
        PreferenceLoss(pairwise_loss=pairwise.OddsRatioLoss(), scores="mean", against_reference=False, likelihood=1.0),
    ),
}


@pytest.mark.parametrize("name", REFERENCE_FREE)
def test_trl_parity_cpo_simpo_and_orpo(name: str, world: World, tmp_path: Path) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    given, loss = REFERENCE_FREE[name]
    config, kind = (ORPOConfig, ORPOTrainer) if name == "orpo" else (CPOConfig, CPOTrainer)
    args = settings(config, tmp_path, max_length=64, **{"beta": 0.1} | given)
    pairs = dataset({"prompt": list("abcd"), "chosen": BETTER, "rejected": WORSE})
    trainer = kind(world.models(1)[0], args, train_dataset=pairs, processing_class=world.tokenizer)
    batch, right, named = theirs(trainer)
    samples = []
    for side in ("chosen", "rejected"):
        ids, attention, labels = (batch[f"{side}_{part}"] for part in ("input_ids", "attention_mask", "labels"))
        for i, row in enumerate(cut(ids, attention, labels != -100)):
            samples.append(sample_of(*row, len(samples), unit=i, preferred=side == "chosen"))
    check(TrainingBatch(samples=tuple(samples)), loss, right, named, student_of(world))


@pytest.mark.parametrize("centering", [None, 0.01])
@pytest.mark.parametrize("margins", [False, True])
def test_trl_parity_reward_model(centering: float | None, margins: bool, world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    args = settings(trl.RewardConfig, tmp_path, center_rewards_coefficient=centering, max_length=64)
    pairs = {"chosen": [p + a for p, a in zip(PROMPTS, BETTER, strict=True)], "rejected": WORSE}
    if margins:
        pairs["margin"] = [0.5, 0.0, 2.0, 1.0]
    model = AutoModelForSequenceClassification.from_pretrained(world.student, num_labels=1, dtype=torch.float32)
    head = critic(world.student).masters.parameters["score.weight"].detach()
    model.score.weight.data.copy_(head)
    trainer = trl.RewardTrainer(model, args, train_dataset=dataset(pairs), processing_class=world.tokenizer)
    batch, loss, named = theirs(trainer)
    samples, half = [], len(PROMPTS)
    for i, (ids, _) in enumerate(cut(batch["input_ids"], batch["attention_mask"], batch["attention_mask"])):
        target = [0.5, 0.0, 2.0, 1.0][i % half] if margins else None
        mask = [False] * len(ids) + [True]
        samples.append(sample_of([*ids, 0], mask, i, unit=i % half, preferred=i < half, target=target, prefix_length=0))
    own = BradleyTerryLoss(centering=centering or 0.0)
    for layout in ({}, {"max_tokens_per_micro_batch": 1}):
        backend = critic(world.student, **layout)
        result = backend.train_step(TrainingBatch(samples=tuple(samples)), own)
        assert result.loss == pytest.approx(loss, rel=LIMIT)
        found = grads_of(backend)
        found.pop("score.bias")  # TRL's model has none
        assert relative_error(found, {name: named[name] for name in found}) <= LIMIT
        assert result.metrics["reward_model/accuracy"] == pytest.approx(trainer._metrics["train"]["accuracy"][-1])
        assert result.metrics["reward_model/margin"] == pytest.approx(trainer._metrics["train"]["margin"][-1], rel=1e-5)


@pytest.mark.parametrize(
    "form",
    [Divergence(kind="forward"), Divergence(kind="jsd"), Divergence(kind="jsd", beta=0.2), Divergence()],
    ids=lambda f: f"{f.kind}-{f.beta}",
)
def test_trl_parity_gkd(form: Divergence, world: World, tmp_path: Path) -> None:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    beta = {"forward": 0.0, "jsd": form.beta, "reverse": 1.0}[form.kind]
    args = settings(GKDConfig, tmp_path, beta=beta, lmbda=0.0, max_length=64)
    messages = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": a}]
        for p, a in zip(PROMPTS, BETTER, strict=True)
    ]
    student, teacher = world.models()
    trainer = GKDTrainer(
        student, teacher, args, train_dataset=dataset({"messages": messages}), processing_class=world.tokenizer
    )
    batch, _, _ = theirs(trainer)
    batch, loss, named = theirs(trainer, num_items_in_batch=(batch["labels"] != -100).sum())
    rows = cut(batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
    own = TrainingBatch(samples=tuple(sample_of(*row, i) for i, row in enumerate(rows)))

    def build(**layout: Any) -> TorchBackend:
        return TorchBackend(replace(make_spec(world.student, **STILL, **layout), teachers=(str(world.other),)))

    check(own, DistillationLoss(divergence=form), loss, named, build)
