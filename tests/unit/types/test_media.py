"""Media in token sequences: tokens and digests together tell sequences apart, wherever tokens alone did."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.samples import build_samples
from roll.errors import DataError, ReplayError, UnsupportedError
from roll.inference.hf_requests import build_prefill_key, create_row
from roll.inference.spec import reject_media
from roll.pipelines.episodes.state import AnchorEpisode
from roll.pipelines.supervised import output_store
from roll.rollout.episode_replay import ReplayedTurns, build_trajectory, check_replay
from roll.training.packing.blocks import BlockMember, group_into_blocks
from roll.training.packing.layout import build_layout, pad_layout
from roll.types import (
    Anchor,
    Branch,
    GenerationRequest,
    MediaSpan,
    Prompt,
    RewardResult,
    Rollout,
    SamplingParams,
    TrainingSample,
    Turn,
    build_sequence_key,
    check_spans,
    slice_media,
)

ONE, OTHER = (hashlib.sha256(name).hexdigest() for name in (b"one", b"other"))


def span(digest: str = ONE, start: int = 2, end: int = 5, **more: Any) -> MediaSpan:
    return MediaSpan(**{"kind": "image", "digest": digest, "start": start, "end": end, **more})


def sample(sample_id: str, *media: MediaSpan, last: int = 7, positions: Any = None) -> TrainingSample:
    token_ids = np.array([1, 2, 9, 9, 9, 3, 4, last, 8], np.int32)
    return TrainingSample(
        sample_id=sample_id,
        unit=0,
        prefix_length=6,
        token_ids=token_ids,
        loss_mask=np.arange(9) >= 6,
        media=media,
        positions=positions,
    )


def members(*samples: TrainingSample) -> list[BlockMember]:
    return [BlockMember(index=i, sample=one, num_inputs=8) for i, one in enumerate(samples)]


TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=12).map(lambda ids: np.array(ids, np.int32))
SPANS = st.builds(
    lambda kind, digest, start, length, grid: span(digest, start, start + length, kind=kind, grid=grid),
    st.sampled_from(["image", "audio", "video"]),
    st.sampled_from([ONE, OTHER]),
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from([None, (1, 2, 2)]),
)


@given(TOKENS)
def test_media_keys_of_texts_are_their_tokens(token_ids: Any) -> None:
    assert build_sequence_key(token_ids) is token_ids


@given(TOKENS, SPANS, SPANS)
def test_media_keys_are_equal_where_tokens_and_media_are(token_ids: Any, one: MediaSpan, other: MediaSpan) -> None:
    """The placeholders' own ids say nothing: a text that spells them is no picture."""
    a, b = (build_sequence_key(token_ids, [each]) for each in (one, other))
    assert np.array_equal(a, b) == (one == other)
    assert (a[one.start : one.end] < 0).all() and not np.array_equal(a, token_ids)
    outside = np.ones(len(token_ids), bool)
    outside[one.start : one.end] = False
    assert np.array_equal(a[outside], token_ids[outside])


@given(SPANS)
def test_media_spans_become_json_and_come_back(one: MediaSpan) -> None:
    assert MediaSpan.from_dict(one.to_dict()) == one


@pytest.mark.parametrize("media", [[span(start=5)], [span(end=10)], [span(), span(OTHER, 4, 6)], [span(start=-1)]])
def test_media_spans_outside_their_sequence_are_refused(media: list[MediaSpan]) -> None:
    with pytest.raises(DataError, match="must be in order, must not overlap"):
        check_spans(media, 9, "it")
    with pytest.raises(DataError, match="sample 'a' has 9 tokens, but its 'image' span is"):
        sample("a", *media)


def test_media_are_cut_as_a_whole() -> None:
    media = [span(), span(OTHER, 6, 8)]
    assert slice_media(media, 2, 6, offset=10) == (span(start=10, end=13),)
    assert slice_media(media, 5, 9) == (span(OTHER, 1, 3),)
    with pytest.raises(DataError, match="contains only a part of its 'image' span"):
        slice_media(media, 3, 9)


def test_media_shared_prefixes_of_samples_end_where_their_pictures_differ() -> None:
    """Equal tokens with another picture share two tokens, which are no context, so nothing; the same picture, six."""
    same = group_into_blocks(members(sample("a", span()), sample("b", span(), last=5)))
    assert [block.shared for block in same] == [(0, 6)]
    other = group_into_blocks(members(sample("a", span()), sample("b", span(OTHER))))
    assert [block.shared for block in other] == [(0,), (0,)]
    none = group_into_blocks(members(sample("a", span()), sample("b")))
    assert [block.shared for block in none] == [(0,), (0,)]


def test_media_shared_prefixes_of_texts_are_as_without_media() -> None:
    blocks = group_into_blocks(members(sample("a"), sample("b", last=5)))
    set_media_dir = group_into_blocks(members(sample("a", span()), sample("b", span(), last=5)))
    assert [block.shared for block in blocks] == [block.shared for block in set_media_dir]


def test_media_shared_prefixes_of_samples_end_where_their_positions_differ() -> None:
    own = np.tile(np.arange(9, dtype=np.int32), (3, 1))
    other = own.copy()
    other[1, 3:] += 5
    assert len(group_into_blocks(members(sample("a", positions=own), sample("b", positions=own)))) == 1
    assert len(group_into_blocks(members(sample("a", positions=own), sample("b", positions=other)))) == 2
    assert len(group_into_blocks(members(sample("a", positions=own[0]), sample("b")))) == 1  # what a text has


def test_media_layouts_carry_media_once_and_positions_of_three_axes() -> None:
    own = np.stack([np.arange(9), np.arange(9) // 2, np.arange(9) // 3]).astype(np.int32)
    (block,) = group_into_blocks(
        members(sample("a", span(), positions=own), sample("b", span(), last=5, positions=own))
    )
    (alone,) = group_into_blocks([BlockMember(index=2, sample=replace(sample("c", span(OTHER)), unit=1), num_inputs=8)])
    layout = build_layout([block, alone])
    first = block.num_tokens
    assert layout.media == (span(), span(OTHER, first + 2, first + 5))
    assert layout.rotary_ids is not None and layout.rotary_ids.shape == (3, layout.num_tokens)
    assert layout.rotary_ids[:, :8].tolist() == own[:, :8].tolist()
    assert layout.rotary_ids[:, first:].tolist() == [list(range(8))] * 3
    wider = pad_layout(layout, 32)
    assert wider.rotary_ids is not None and wider.rotary_ids.shape == (3, 32) and wider.media == layout.media
    plain = build_layout(group_into_blocks(members(sample("a"))))
    assert plain.rotary_ids is None and plain.media == () and plain.position_ids.tolist() == list(range(8))


def test_media_positions_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"positions have the shape \(2, 9\): the shape must be \[L\] or \[3, L\]"):
        sample("a", positions=np.zeros((2, 9), np.int32))


def test_media_kept_answers_are_found_by_tokens_digests_and_positions() -> None:
    own = np.tile(np.arange(9, dtype=np.int32), (3, 1))
    samples = [sample("a"), sample("a", span()), sample("a", span(OTHER)), sample("a", positions=own)]
    assert len({output_store._compute_key(one) for one in samples}) == 4
    digest = hashlib.blake2b(samples[0].token_ids.tobytes(), digest_size=16)  # as files of earlier versions have it
    digest.update(np.packbits(samples[0].loss_mask).tobytes())
    assert output_store._compute_key(samples[0]) == digest.digest()


def test_media_prefills_of_the_embedded_engine_are_shared_by_tokens_and_digests() -> None:
    def key(*media: MediaSpan) -> bytes:
        sampling = SamplingParams(max_new_tokens=2, seed=0)
        request = GenerationRequest(request_id="a", token_ids=sample("a").token_ids, sampling=sampling, media=media)
        return build_prefill_key(row := create_row(request, 0, 0), row.length - 1)

    assert key(span()) == key(span()) and len({key(), key(span()), key(span(OTHER)), key(span(kind="video"))}) == 4
    assert key() == sample("a").token_ids[:-1].astype(np.int64).tobytes()


def test_media_engines_without_the_capability_refuse_media() -> None:
    reject_media("hf", (), ())
    with pytest.raises(
        UnsupportedError, match="hf engine supports text only, but a sequence has a part of kind 'image'"
    ):
        reject_media("hf", (), (span(),))


def rollout() -> Rollout:
    """A prompt with a picture, an observation with another, and then a context of its own."""
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid="d/0", domain="d", messages=()),
        prompt_token_ids=np.arange(6, dtype=np.int32),
        token_ids=np.arange(10, 18, dtype=np.int32),
        logprobs=np.zeros(8, np.float32),
        policy_versions=np.zeros(8, np.int32),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=1.0),
        turns=(Turn(start=0, end=2), Turn(start=5, end=6), Turn(start=6, end=8)),
        branches=(Branch(start=6, context=np.arange(4, dtype=np.int32), media=(span(OTHER, 1, 3),)),),
        prompt_media=(span(),),
        media=(span(OTHER, 2, 4),),
    )


def test_media_samples_have_the_media_of_their_contexts() -> None:
    first, second = build_samples(rollout())
    assert first.media == (span(), span(OTHER, 8, 10)) and len(first) == 12
    assert second.media == (span(OTHER, 1, 3),) and len(second) == 6


def test_media_replayed_episodes_are_compared_with_their_media() -> None:
    trajectory = build_trajectory(rollout())
    anchor = Anchor(trajectory=trajectory, num_turns=1)
    played = ReplayedTurns(
        prompt_token_ids=trajectory.prompt_token_ids,
        tokens=[trajectory.token_ids[:5]],
        turns=trajectory.turns[:1],
        branches=[],
        state="",
        prompt_media=trajectory.prompt_media,
        media=trajectory.media,
    )
    prompt = rollout().prompt
    check_replay(prompt, anchor, played)
    with pytest.raises(ReplayError, match="the first observation differs"):
        check_replay(prompt, anchor, replace(played, prompt_media=(span(OTHER),)))
    with pytest.raises(ReplayError, match="an observation up to turn 2 differs"):
        check_replay(prompt, anchor, replace(played, media=(span(ONE, 2, 4),)))


def test_media_kept_episodes_come_back_with_their_media() -> None:
    episode = AnchorEpisode(domain="d", position=0, trajectory=build_trajectory(rollout()))
    again = AnchorEpisode.from_json(episode.to_json()).trajectory
    assert (again.prompt_media, again.media) == (rollout().prompt_media, rollout().media)
    assert [branch.media for branch in again.branches] == [(span(OTHER, 1, 3),)]
    text = replace(rollout(), prompt_media=(), media=(), branches=())
    assert "media" not in AnchorEpisode(domain="d", position=0, trajectory=build_trajectory(text)).to_json()
