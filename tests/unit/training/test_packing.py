"""Packing and layout: everything goes through once, within the budget, in an order of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_helpers import branching_batch, make_batch

from roll.training.packing import blocks
from roll.training.packing.blocks import Block
from roll.training.packing.layout import PackedLayout, Segment, build_layout, pad_layout
from roll.training.packing.micro_batches import pack
from roll.types import TrainingSample

batches = st.builds(
    make_batch,
    st.integers(0, 2**16),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 6),
    prompt=st.sampled_from([(1, 2), (2, 9), (5, 40)]),
    response=st.sampled_from([(1, 2), (1, 9), (1, 40)]),
)
budgets = st.sampled_from([1, 20, 60, 200, 10_000])
branching = st.builds(
    branching_batch, st.integers(0, 2**16), units=st.integers(1, 3), size=st.integers(2, 12)
) | st.builds(branching_batch, st.integers(0, 2**16), size=st.integers(2, 8), grown=st.just((20, 70)))
batches = batches | branching


def keys(packed: list[list[tuple[Block, ...]]]) -> list[list[list[list[str]]]]:
    return [[[[m.sample.sample_id for m in b.members] for b in micro] for micro in rank] for rank in packed]


@given(batches, budgets, st.booleans(), st.integers(1, 4), st.booleans())
def test_packing_every_sample_is_packed_once_and_every_rank_gets_as_many_micro_batches(
    batch, budget: int, share: bool, ranks: int, every_token: bool
) -> None:
    packed = pack(batch.samples, max_tokens=budget, share_prefix=share, num_ranks=ranks, every_token=every_token)
    members = [m for rank in packed for micro in rank for block in micro for m in block.members]
    assert sorted(m.index for m in members) == list(range(len(batch.samples)))
    assert all(m.sample is batch.samples[m.index] for m in members)
    assert len(packed) == ranks
    assert len({len(rank) for rank in packed}) == 1
    for rank in packed:
        for micro in rank:
            tokens = sum(block.num_tokens for block in micro)
            alone = max((m.num_inputs for block in micro for m in block.members), default=0)
            assert tokens <= budget or tokens <= max(alone, max(m.num_inputs for m in members))


@given(batches, budgets, st.booleans(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_the_order_of_samples(batch, budget, share, ranks, random) -> None:
    shuffled = list(batch.samples)
    random.shuffle(shuffled)
    first, second = (
        pack(samples, max_tokens=budget, share_prefix=share, num_ranks=ranks) for samples in (batch.samples, shuffled)
    )
    assert keys(first) == keys(second)


@given(batches, budgets, st.booleans(), st.booleans())
def test_packing_a_layout_predicts_exactly_the_tokens_that_are_wanted(batch, budget, share, every_token) -> None:
    (micro_batches,) = pack(batch.samples, max_tokens=budget, share_prefix=share, every_token=every_token)
    for micro in micro_batches:
        layout = build_layout(micro, every_token=every_token)
        assert layout.num_tokens == sum(block.num_tokens for block in micro) == len(layout.position_ids)
        used = set()
        for span in layout.spans:
            sample = batch.samples[span.index]
            wanted = np.arange(1, len(sample)) if every_token else np.flatnonzero(sample.loss_mask)
            assert span.token_index.tolist() == wanted.tolist()
            assert (layout.targets[span.prediction_index] == sample.token_ids[wanted]).all()
            rows = layout.rows[span.prediction_index]
            assert (layout.token_ids[rows] == sample.token_ids[wanted - 1]).all()
            assert (layout.position_ids[rows] == wanted - 1).all()
            used |= set(span.prediction_index.tolist())
        assert used == set(range(len(layout.targets)))


def sample(group: int, index: int, prefix: list[int], response: list[int]) -> TrainingSample:
    tokens = np.array(prefix + response, dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(prefix)
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return TrainingSample(
        sample_id=f"{group}.{index}",
        unit=group,
        prefix_length=len(prefix),
        token_ids=tokens,
        loss_mask=mask,
        advantages=zeros,
        rollout_logprobs=zeros,
    )


def test_packing_a_group_is_laid_out_prompt_first_then_each_response_without_its_last_token() -> None:
    samples = [sample(7, 0, [1, 2, 3], [4, 5]), sample(7, 1, [1, 2, 3], [6, 7, 8])]
    ((micro,),) = pack(samples, max_tokens=100)
    layout = build_layout(micro)
    assert layout.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 3, 4]
    assert layout.rows.tolist() == [2, 3, 2, 4, 5]
    assert layout.targets.tolist() == [4, 5, 6, 7, 8]
    (block,) = layout.blocks
    assert block.segments == (
        Segment(start=0, length=3),
        Segment(start=3, length=1, parent=0, position=3),
        Segment(start=4, length=2, parent=0, position=3),
    )


def test_packing_prompt_tokens_of_a_group_are_predicted_once() -> None:
    samples = [sample(7, 0, [1, 2, 3], [4]), sample(7, 1, [1, 2, 3], [5])]
    ((micro,),) = pack(samples, max_tokens=100, every_token=True)
    layout = build_layout(micro, every_token=True)
    assert layout.token_ids.tolist() == [1, 2, 3]
    assert sorted(zip(layout.rows.tolist(), layout.targets.tolist(), strict=True)) == [(0, 2), (1, 3), (2, 4), (2, 5)]


def test_packing_samples_of_a_group_with_other_prompts_share_nothing() -> None:
    samples = [sample(7, 0, [1, 2, 3], [4, 4]), sample(7, 1, [1, 2, 9], [5, 5])]
    ((micro,),) = pack(samples, max_tokens=100)
    assert [block.shared for block in micro] == [(0,), (0,)]


def test_packing_a_group_over_budget_is_split_into_parts_that_repeat_the_prompt() -> None:
    samples = [sample(0, i, [1, 2, 3, 4], [5, 6, 7]) for i in range(4)]  # 4 + 2 each
    (micro_batches,) = pack(samples, max_tokens=8)
    assert [[(b.shared, b.num_tokens) for b in micro] for micro in micro_batches] == [[((0, 4), 8)], [((0, 4), 8)]]


def test_packing_a_group_is_split_when_there_are_more_ranks_than_groups() -> None:
    samples = [sample(0, i, [1, 2, 3, 4], [5, 6, 7]) for i in range(4)]
    packed = pack(samples, max_tokens=1000, num_ranks=2)
    assert [[b.num_tokens for micro in rank for b in micro] for rank in packed] == [[8], [8]]


def test_packing_a_sample_without_loss_does_not_go_through_the_network() -> None:
    silent = dataclasses.replace(sample(0, 0, [1], [2]), loss_mask=np.zeros(2, dtype=np.bool_))
    assert pack([silent], max_tokens=10) == [[()]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_packing_micro_batches_carry_about_the_same_load(num_ranks: int) -> None:
    batch = make_batch(0, groups=24, group_size=4, prompt=(10, 20), response=(5, 20))
    packed = pack(batch.samples, max_tokens=300, num_ranks=num_ranks)
    loads = [sum(b.num_tokens for b in micro) for rank in packed for micro in rank]
    assert max(loads) <= 300
    assert min(loads) >= 0.7 * max(loads)


def seen_by_entry(layout: PackedLayout) -> list[list[int]]:
    """The entries that each entry of the row may see, in order."""
    return [
        [*context, *range(segment.start, segment.start + i + 1)]
        for tree in layout.blocks
        for segment, context in zip(tree.segments, tree.list_contexts(), strict=True)
        for i in range(segment.length)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(branching, budgets, st.integers(1, 40))
def test_packing_each_prediction_sees_the_tokens_before_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, batch, budget: int, min_shared: int
) -> None:
    monkeypatch.setattr(blocks, "MIN_SHARED_TOKENS", min_shared)
    (micro_batches,) = pack(batch.samples, max_tokens=budget)
    for micro in micro_batches:
        layout = build_layout(micro)
        seen = seen_by_entry(layout)
        assert len(seen) == layout.num_tokens
        for span in layout.spans:
            tokens = batch.samples[span.index].token_ids
            for place, prediction in zip(span.token_index, span.prediction_index, strict=True):
                row = layout.rows[prediction]
                assert layout.token_ids[seen[row]].tolist() == tokens[:place].tolist()
                assert layout.position_ids[seen[row]].tolist() == list(range(place))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(branching)
def test_packing_with_no_least_length_every_common_prefix_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, batch
) -> None:
    monkeypatch.setattr(blocks, "MIN_SHARED_TOKENS", 1)
    ((micro,),) = pack(batch.samples, max_tokens=100_000)
    different = {
        (s.unit, s.token_ids[: i + 1].tobytes()) for s in batch.samples for i in range(np.flatnonzero(s.loss_mask)[-1])
    }
    assert sum(block.num_tokens for block in micro) == len(different)


def shared_of(*sequences: tuple[int, list[int]]) -> list[tuple[int, ...]]:
    """What is shared by the blocks of samples of one unit, given by their contexts' lengths and all their tokens."""
    samples = [sample(0, i, tokens[:context], tokens[context:]) for i, (context, tokens) in enumerate(sequences)]
    ((micro,),) = pack(samples, max_tokens=10_000)
    return sorted(block.shared for block in micro)


def test_packing_what_is_shared_is_a_context_or_long_enough() -> None:
    prompt, turn, more = [7] * 5, list(range(100, 140)), list(range(200, 240))
    assert shared_of((5, [*prompt, 1, 2, 9]), (5, [*prompt, 1, 2, 8])) == [(0, 5)]  # two tokens more are not worth it
    assert shared_of((5, [*prompt, *turn, 9]), (5, [*prompt, *turn, 8])) == [(0, 45)]
    assert shared_of((6, [*prompt, 1, 9]), (6, [*prompt, 2, 9])) == [(0,), (0,)]
    assert shared_of((5, [*prompt, *turn, 9]), (45, [*prompt, *turn, 8, 9]), (5, [*prompt, 3])) == [(0, 45, 5)]
    chain = (5, [*prompt, *turn, 1]), (45, [*prompt, *turn, *more, 2]), (85, [*prompt, *turn, *more, 3, 4])
    assert shared_of(*chain) == [(0, 45, 85)]
    assert shared_of(chain[0], chain[1], (60, [*prompt, *turn, *more[:20], 3])) == [(0, 45, 45)]  # 20 are too few


def test_packing_a_unit_over_budget_is_cut_between_rollouts_and_not_within_one() -> None:
    prompt = list(range(40))
    samples = []
    for rollout in range(3):
        history = [*prompt, *range(100 + 50 * rollout, 140 + 50 * rollout)]
        samples += [sample(0, 3 * rollout + i, history, [i, 1, 2]) for i in range(3)]  # 80 shared by 3, 2 of each own
    (micro_batches,) = pack(samples, max_tokens=140)
    found = sorted([m.index for m in block.members] for micro in micro_batches for block in micro)
    assert found == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]  # 40 + 2 x 46, and 40 + 46
    assert sum(b.num_tokens for micro in micro_batches for b in micro) == 132 + 86


def test_packing_padding_belongs_to_no_sample_and_chooses_its_own_experts() -> None:
    samples = [
        dataclasses.replace(s, experts=np.ones((len(s), 2, 3), dtype=np.int16)) for s in make_batch(groups=1).samples
    ]
    ((micro,),) = pack(samples, max_tokens=10_000)
    layout = build_layout(micro)
    multiple = layout.num_tokens + 3
    found = pad_layout(layout, multiple)
    assert found.num_tokens == multiple and found.num_padding == 3
    assert found.uses[-3:].tolist() == [0, 0, 0] and (found.uses[:-3] > 0).all()
    assert layout.experts is not None and found.experts is not None
    assert (found.experts[-3:] == -1).all() and np.array_equal(found.experts[:-3], layout.experts)
    assert found.blocks[-1].start == layout.num_tokens and found.position_ids[-3:].tolist() == [0, 1, 2]
    assert pad_layout(layout, layout.num_tokens) is layout
