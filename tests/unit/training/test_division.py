"""A batch whose arrays are divided over ranks is packed, checked and trained on as the whole batch."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from division_ranks import LAYOUTS, NUM_RANKS, REPLAY, add_heavy_columns, heavy_batch, run_rank
from families import FAMILIES, write_model
from training_helpers import branching_batch, make_batch, make_spec
from worlds.ranks import run_ranks

from roll.algorithms.losses import DistillationLoss, PolicyLoss
from roll.algorithms.losses.distillation import TopKDistillationLoss
from roll.errors import DataError
from roll.training import TorchBackend
from roll.training.packing.division import RankShare, divide_batch, restore_batch
from roll.training.packing.micro_batches import select_micro_batches
from roll.types import AttentionStatistics, LossRequirements, MediaSpan, TrainingBatch, TrainingSample

pytestmark = pytest.mark.integration


@dataclasses.dataclass(frozen=True)
class Needs:
    """Stands for a loss with these requirements."""

    needs: LossRequirements

    def __call__(self, inputs: Any) -> Any:
        raise AssertionError


def list_shares(data_size: int, *, budget: int = 60, stages: int = 1, share_prefix: bool = True) -> list[RankShare]:
    return [
        RankShare(
            data_rank=rank,
            data_size=data_size,
            computes_loss=stage == stages - 1,
            max_tokens=budget,
            share_prefix=share_prefix,
        )
        for stage in range(stages)
        for rank in range(data_size)
    ]


def full_batch(seed: int) -> TrainingBatch:
    """Branching samples with a column of every kind, some of which lack experts."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, sample in enumerate(branching_batch(seed, units=4).samples):
        waad, fai = rng.random((2, len(sample))).astype(np.float32)
        more = add_heavy_columns(sample, rng)
        samples.append(
            dataclasses.replace(
                more,
                experts=more.experts if index % 3 else None,
                attention=AttentionStatistics(waad=waad, fai=fai),
                old_logprobs=rng.random(len(sample)).astype(np.float32),
                policy_versions=np.zeros(len(sample), np.int32),
                teacher=index % 2,
            )
        )
    return TrainingBatch(samples=tuple(samples))


def assert_equal_samples(own: TrainingSample, other: TrainingSample) -> None:
    for each in dataclasses.fields(TrainingSample):
        if each.name == "policy_versions":  # no trainer reads them
            continue
        one, two = getattr(own, each.name), getattr(other, each.name)
        if dataclasses.is_dataclass(one):
            one, two = dataclasses.astuple(one), dataclasses.astuple(two)  # type: ignore[arg-type]
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True)), each.name
        else:
            assert np.array_equal(one, two), each.name


@pytest.mark.parametrize("data_size", [2, 3, 7])
@pytest.mark.parametrize(
    "work",
    [
        Needs(LossRequirements()),
        Needs(LossRequirements(whole_units=True)),
        Needs(LossRequirements(whole_sequences=True)),
        DistillationLoss(),
    ],
    ids=["samples", "units", "sequences", "teachers"],
)
def test_batch_division_every_rank_packs_what_it_packs_of_the_whole_batch(work: Any, data_size: int) -> None:
    batch, shares = full_batch(data_size), list_shares(data_size)
    divided = divide_batch(batch, work, shares)
    assert divided is not None
    trained = 0
    for share in shares:
        expected = select_micro_batches(share.pack(batch.samples, work.needs, every_token=False), share.data_rank)
        own = restore_batch(divided.outline, divided.get_columns(share))
        packed = share.pack(own.samples, work.needs, every_token=False, unify_experts=False)
        found = select_micro_batches(packed, share.data_rank)
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            assert (one.teacher, one.encodes_media) == (two.teacher, two.encodes_media)
            assert [block.shared for block in one.blocks] == [block.shared for block in two.blocks]
            members = [[m for block in each.blocks for m in block.members] for each in (one, two)]
            for a, b in zip(*members, strict=True):
                assert (a.index, a.num_inputs) == (b.index, b.num_inputs)
                assert_equal_samples(a.sample, b.sample)
                assert a.index in (own.held or ())
                trained += 1
    assert trained == sum(sample.loss_mask[1:].any() for sample in batch.samples)


def test_batch_division_placeholders_have_the_shape_of_arrays_and_take_no_memory() -> None:
    batch, shares = full_batch(0), list_shares(4)
    divided = divide_batch(batch, PolicyLoss(), shares)
    assert divided is not None
    restored = restore_batch(divided.outline, divided.get_columns(shares[0]))
    assert restored.held is not None
    assert 0 < len(restored.held) < len(batch.samples)
    for index, (sample, whole) in enumerate(zip(restored.samples, batch.samples, strict=True)):
        assert sample.advantages is not None and sample.teacher_top is not None and sample.attention is not None
        assert whole.teacher_top is not None
        assert sample.teacher_top.token_ids.shape == whole.teacher_top.token_ids.shape
        assert sample.policy_versions is None
        if index in restored.held:
            continue
        assert sample.advantages.base.nbytes == sample.teacher_top.logprobs.base.nbytes == 4
        if whole.experts is not None:
            assert sample.experts is not None
            assert sample.experts.shape == whole.experts.shape
            assert (sample.experts == -1).all()
            assert sample.experts.base.nbytes == 1


def test_batch_division_a_stage_before_the_last_gets_only_experts() -> None:
    batch, shares = full_batch(1), list_shares(2, stages=2)
    divided = divide_batch(batch, PolicyLoss(), shares)
    assert divided is not None
    first, last = (divided.get_columns(share) for share in (shares[0], shares[2]))
    assert first.keys() == last.keys()
    assert set().union(*first.values()) == {"experts"}
    assert {"advantages", "experts", "old_logprobs", "teacher_top"} <= set().union(*last.values())


def test_batch_division_a_forward_pass_gets_only_experts() -> None:
    divided = divide_batch(full_batch(1), ["logprobs"], list_shares(2, stages=2))
    assert divided is not None
    assert set().union(*(names for columns in divided.columns.values() for names in columns.values())) == {"experts"}


def test_batch_division_media_without_positions_and_unequal_experts_are_sent_whole() -> None:
    shares, batch = list_shares(2), heavy_batch()
    first = batch.samples[0]
    assert first.experts is not None
    span = MediaSpan(kind="image", digest="00", start=0, end=1)
    for change in ({"media": (span,)}, {"experts": first.experts[:, :1]}):
        other = dataclasses.replace(first, **change)  # type: ignore[arg-type]
        assert divide_batch(dataclasses.replace(batch, samples=(other, *batch.samples[1:])), REPLAY, shares) is None
    placed = dataclasses.replace(first, media=(span,), positions=np.arange(len(first)))
    assert divide_batch(dataclasses.replace(batch, samples=(placed, *batch.samples[1:])), REPLAY, shares) is not None


def test_batch_division_a_rank_refuses_the_columns_of_another_rank(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    shares = list_shares(2, budget=4096)
    divided = divide_batch(make_batch(), PolicyLoss(), shares)
    assert divided is not None
    foreign = restore_batch(divided.outline, divided.get_columns(shares[0]))
    with pytest.raises(DataError, match="belongs to data rank 0, whose part of the batch does not have the sample's"):
        backend.train_step(foreign, PolicyLoss())


def test_batch_division_a_column_that_some_samples_lack_is_named_on_every_rank(tiny_model: Path) -> None:
    batch, shares = make_batch(), list_shares(2)
    lacking = dataclasses.replace(batch.samples[0], advantages=None)
    batch = dataclasses.replace(batch, samples=(lacking, *batch.samples[1:]))
    divided = divide_batch(batch, PolicyLoss(), shares)
    assert divided is not None
    backend = TorchBackend(make_spec(tiny_model))
    for share in shares:
        restored = restore_batch(divided.outline, divided.get_columns(share))
        with pytest.raises(ValueError, match="`advantages` must be set for all samples of the batch or for none"):
            backend.train_step(dataclasses.replace(restored, held=None), PolicyLoss())


@pytest.fixture(scope="module", name="found")
def _found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("division")
    write_model(directory / "model", tiny_model, FAMILIES["qwen3-moe"])
    run_ranks(run_rank, (directory, directory / "model"), NUM_RANKS)
    return {
        layout: [torch.load(directory / f"{layout}-{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
        for layout in LAYOUTS
    }


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_batch_division_four_ranks_find_the_same_bits_with_divided_as_with_whole_batches(
    layout: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in found[layout]:
        assert rank["same"]
        assert rank["error"] == found[layout][0]["error"]
        assert "the experts recorded in sample '0.0' cannot be replayed" in rank["error"]


def test_batch_division_bytes_per_rank_fall_by_the_share_of_columns_that_a_rank_does_not_need(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """Of a token, k = 64 top log-probs take 512 bytes, and its ID, mask and other columns 25."""
    batch = heavy_batch(1)
    ranks = found["dp 4"]
    shares = [rank["share"] for rank in ranks]
    loss = TopKDistillationLoss()
    packed = shares[0].pack(batch.samples, loss.needs, every_token=False)
    per_token = {"experts": 4, "teacher_top": 512, "advantages": 4, "rollout_logprobs": 4}
    total = sum(map(len, batch.samples)) * sum(per_token.values())
    for rank, share in zip(ranks, shares, strict=True):
        members = [m for _, blocks in packed[share.data_rank] for block in blocks for m in block.members]
        needed = sum(len(m.sample) for m in members) * sum(per_token.values())
        sent, whole = rank["bytes"]["TopKDistillationLoss"]
        assert 0.1 < needed / total < 0.5
        # Pickle adds names and headers of arrays, about 1 KB for each of these short samples.
        assert whole - sent == pytest.approx(total - needed, rel=0.15)
    whole = len(pickle.dumps(batch, 5))
    assert max(rank["bytes"]["forward"] for rank in ranks) < 0.2 * whole
    stages = found["pp 2, dp 2"]
    sizes = [rank["bytes"]["TopKDistillationLoss"][0] for rank in stages]
    assert max(sizes[:2]) < 0.2 * whole < min(sizes[2:])
