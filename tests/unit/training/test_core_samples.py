"""Samples with nothing but the core (tokens, mask, unit) train, and the samples of a unit can be kept together.

Gradients are compared with those of the model's own eager forward pass over a padded batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training_helpers import grads_of, make_spec, reference_logprobs, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.algorithms.ratio import compute_segment_sums
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.packing.micro_batches import pack
from roll.training.precision import Precision
from roll.types import LossInputs, LossOutputs, LossRequirements, TrainingBatch, TrainingSample

LIMIT = 2e-7
"""Of a gradient's relative error: norms and softmax of the model are in float32, also where it is in float64."""

DOUBLE = Precision.from_name("float64")
SETTINGS = pytest.mark.parametrize(
    ("budget", "share"), [(4096, True), (4096, False), (60, True), (60, False), (5, True)]
)


def core_batch(seed: int = 0, *, num_units: int = 6) -> TrainingBatch:
    """Pairs of random texts, most after a common prompt; the loss counts several stretches of some."""
    rng = np.random.default_rng(seed)
    samples = []
    for unit in range(num_units):
        prompt = rng.integers(4, 260, rng.integers(3, 12))
        for index in range(2):
            tokens = np.concatenate([prompt, rng.integers(4, 260, rng.integers(2, 16))]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            if unit % 3 == 1:
                mask[1:3] = True  # a turn of the assistant's within the prompt
            prefix = 0 if unit == 2 else len(prompt)
            samples.append(
                TrainingSample(
                    sample_id=f"{unit}.{index}", unit=unit, prefix_length=prefix, token_ids=tokens, loss_mask=mask
                )
            )
    return TrainingBatch(samples=tuple(samples))


@dataclass(frozen=True)
class CrossEntropy:
    """The mean of -log p over the loss tokens of the batch."""

    needs: LossRequirements = LossRequirements()  # noqa: RUF009

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss=-inputs.require("logprobs").sum() / inputs.num_tokens)


@dataclass(frozen=True)
class EvenPairs:
    """A loss of pairs that needs both: the mean of softplus((s_1 - s_2)^2), s the log-prob of an answer."""

    needs: LossRequirements = LossRequirements(whole_units=True)  # noqa: RUF009

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        sums = compute_segment_sums(inputs.require("logprobs"), inputs.sequence_ids)
        units = inputs.require("unit_ids")
        loss = sum((_of_pair(*sums[units == unit]) for unit in units.unique()), sums.new_zeros(()))
        return LossOutputs(loss=loss / (inputs.num_sequences / 2))


def _of_pair(one: Tensor, other: Tensor) -> Tensor:
    return F.softplus((one - other).square() / 100)


def expected_cross_entropy(batch: TrainingBatch, logprobs: list[Tensor]) -> Tensor:
    counted = [x[torch.from_numpy(s.loss_mask)] for x, s in zip(logprobs, batch.samples, strict=True)]
    return -torch.cat(counted).mean()


def expected_even_pairs(batch: TrainingBatch, logprobs: list[Tensor]) -> Tensor:
    sums = [x[torch.from_numpy(s.loss_mask)].sum() for x, s in zip(logprobs, batch.samples, strict=True)]
    return torch.stack([_of_pair(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]).mean()


Expected = Callable[[TrainingBatch, list[Tensor]], Tensor]


@SETTINGS
@pytest.mark.parametrize(
    ("loss", "expected"), [(CrossEntropy(), expected_cross_entropy), (EvenPairs(), expected_even_pairs)]
)
def test_core_samples_the_gradient_is_the_references_however_samples_are_packed(
    tiny_model: Path, loss: CrossEntropy | EvenPairs, expected: Expected, budget: int, share: bool
) -> None:
    batch = core_batch()
    model = load_causal_lm(tiny_model, torch.float64)
    right = expected(batch, reference_logprobs(model, batch))
    right.backward()
    spec = make_spec(tiny_model, max_tokens_per_micro_batch=budget, share_prefix=share)
    backend = TorchBackend(spec, precision=DOUBLE)
    result = backend.train_step(batch, loss)
    assert result.loss == pytest.approx(right.item(), rel=1e-9)
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = grads_of(backend)
    assert relative_error(found, {name: named[name] for name in found}) <= LIMIT


def test_core_samples_texts_are_learned(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model, learning_rate=3e-3))
    losses = [backend.train_step(core_batch(1), CrossEntropy()).loss for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_core_samples_a_column_that_a_loss_needs_is_named(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="this loss requires advantages, but the batch has none"):
        TorchBackend(make_spec(tiny_model)).train_step(core_batch(), PolicyLoss())


def test_core_samples_a_column_that_some_samples_lack_is_named_whatever_they_are_packed_with(tiny_model: Path) -> None:
    first, *others = core_batch().samples
    mixed = TrainingBatch(samples=(replace(first, advantages=np.ones(len(first), np.float32)), *others))
    with pytest.raises(ValueError, match="`advantages` must be set for all samples of the batch or for none"):
        TorchBackend(make_spec(tiny_model, max_tokens_per_micro_batch=1)).train_step(mixed, CrossEntropy())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [5, 40, 4096])
@pytest.mark.parametrize("share", [True, False])
def test_core_samples_a_pair_is_never_split(num_ranks: int, budget: int, share: bool) -> None:
    batch = core_batch(3, num_units=11)
    settings = {"max_tokens": budget, "share_prefix": share, "num_ranks": num_ranks}
    packed = pack(batch.samples, **settings, whole_units=True)
    assert len({len(own) for own in packed}) == 1  # as many micro-batches on every rank
    (alone,) = pack(batch.samples, **settings | {"num_ranks": 1, "max_tokens": 4096}, whole_units=True)
    sizes = [(b.members[0].sample.unit, b.num_tokens) for b in alone[0]]
    longest = max(sum(size for own, size in sizes if own == unit) for unit, _ in sizes)
    places: dict[int, set[tuple[int, int]]] = {}
    members = []
    for rank, micro_batches in enumerate(packed):
        for number, blocks in enumerate(micro_batches):
            for member in (m for block in blocks for m in block.members):
                places.setdefault(member.sample.unit, set()).add((rank, number))
                members.append(member.index)
            assert sum(b.num_tokens for b in blocks) <= max(budget, longest)
    assert sorted(members) == list(range(len(batch.samples)))
    assert {len(own) for own in places.values()} == {1}
    shuffled = pack(batch.samples[::-1], **settings, whole_units=True)
    assert _names(shuffled) == _names(packed)
    if budget == 5:  # and a loss that does not compare them lets them be split
        assert _names(pack(batch.samples, **settings)) != _names(packed)


def _names(packed: list) -> list:
    return [[[[m.sample.sample_id for m in b.members] for b in blocks] for blocks in own] for own in packed]
