"""The prompt stream: exact shares, whole epochs, exact resumption."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data import PromptStream, WeightedSource
from roll.data.source import InterleavedSource, PromptList
from roll.errors import CheckpointError, DataError
from roll.types import EncodedText, Message, Prompt


def prompt(domain: str, key: int) -> Prompt:
    return Prompt(uid=f"{domain}/{key}", domain=domain, messages=(Message(role="user", content="x" * key),))


def source(domain: str, size: int, weight: float = 1.0) -> WeightedSource:
    prompts = PromptList(prompt(domain, key) for key in range(size))
    return WeightedSource(domain=domain, items=prompts, weight=weight, fingerprint=prompts.fingerprint)


def render(prompt: Prompt) -> EncodedText:
    return EncodedText(np.zeros(len(prompt.messages[0].text), np.int32))


def stream(*sources: WeightedSource, seed: int = 0, max_prompt_tokens: int | None = None) -> PromptStream:
    return PromptStream(sources, render, seed, max_prompt_tokens=max_prompt_tokens)


def uids(drawn: PromptStream, count: int) -> list[str]:
    return [draw.prompt.uid for draw in drawn.draw(count)]


def test_data_stream_draws_count_from_0_and_carry_their_tokens() -> None:
    draws = stream(source("a", 4)).draw(3) + stream(source("a", 4)).draw(1)
    assert [draw.draw_id for draw in draws] == [0, 1, 2, 0]
    assert all(len(draw.token_ids) == int(draw.prompt.uid.split("/")[1]) for draw in draws)


def test_data_stream_every_epoch_has_every_prompt_once_in_another_order() -> None:
    drawn = stream(source("a", 50))
    epochs = [uids(drawn, 50) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 50 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_data_stream_another_seed_gives_another_order() -> None:
    assert uids(stream(source("a", 50)), 50) != uids(stream(source("a", 50), seed=1), 50)


def test_data_stream_sources_of_one_size_come_in_orders_of_their_own() -> None:
    drawn = uids(stream(source("a", 50), source("b", 50)), 100)
    a, b = ([int(uid.split("/")[1]) for uid in drawn if uid.startswith(domain)] for domain in "ab")
    assert sorted(a) == sorted(b) and a != b


def test_data_stream_weights_3_to_1_give_every_step_of_8_its_6_and_2() -> None:
    drawn = stream(source("a", 10, 3.0), source("b", 7, 1.0))
    for _ in range(20):
        assert Counter(uid[0] for uid in uids(drawn, 8)) == {"a": 6, "b": 2}


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
    count=st.integers(1, 400),
)
def test_data_stream_after_any_number_of_draws_each_source_is_near_its_share(weights: list[float], count: int) -> None:
    drawn = stream(*(source(str(i), 3, weight) for i, weight in enumerate(weights)))
    counts = Counter(uid[0] for uid in uids(drawn, count))
    for i, weight in enumerate(weights):
        share = weight / sum(weights) * count
        assert abs(counts[str(i)] - share) < max(1.0, len(weights) / 2) + 1e-6


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.7, 4.0]), min_size=3, max_size=3),
    parts=st.lists(st.integers(0, 13), min_size=1, max_size=6),
    seed=st.integers(0, 5),
)
def test_data_stream_any_split_into_calls_with_resumption_between_equals_the_uninterrupted_sequence(
    sizes: list[int], weights: list[float], parts: list[int], seed: int
) -> None:
    def fresh() -> PromptStream:
        sources = [source(f"{i}", size, weight) for i, (size, weight) in enumerate(zip(sizes, weights, strict=False))]
        return stream(*sources, seed=seed)

    whole = [(draw.draw_id, draw.prompt.uid) for draw in fresh().draw(sum(parts))]
    pieces: list[tuple[int, str]] = []
    state = fresh().state()
    for part in parts:
        resumed = fresh()
        resumed.restore(json.loads(json.dumps(state)))
        pieces += [(draw.draw_id, draw.prompt.uid) for draw in resumed.draw(part)]
        state = resumed.state()
    assert pieces == whole


def test_data_stream_the_state_is_small_whatever_the_data() -> None:
    large = stream(source("a", 5000))
    large.draw(4000)
    assert len(json.dumps(large.state())) < 300


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (stream(source("a", 5), source("c", 5)), "had the sources 'a', 'b', now there are 'a', 'c'"),
        (stream(source("a", 5)), "now there are 'a'"),
        (stream(source("a", 5), source("b", 6)), "num_prompts of source 'b' was 5 and is 6"),
        (stream(source("a", 5), source("b", 5, 2.0)), "weight of source 'b' was 1.0 and is 2.0"),
        (stream(source("a", 5), source("b", 5), seed=1), "seed of source 'a' was 0 and is 1"),
    ],
)
def test_data_stream_a_state_of_other_data_is_refused(now: PromptStream, words: str) -> None:
    before = stream(source("a", 5), source("b", 5))
    before.draw(3)
    with pytest.raises(CheckpointError, match=words):
        now.restore(before.state())


def test_data_stream_changed_content_is_refused() -> None:
    changed = PromptList(prompt("a", key + 1) for key in range(5))
    now = stream(WeightedSource(domain="a", items=changed, fingerprint=changed.fingerprint))
    with pytest.raises(CheckpointError, match="fingerprint of source 'a' was"):
        now.restore(stream(source("a", 5)).state())


def test_data_stream_a_prompt_longer_than_the_context_is_refused_with_its_length_and_what_to_do() -> None:
    drawn = stream(source("a", 9), max_prompt_tokens=7)
    with pytest.raises(
        DataError, match=r"prompt 'a/8' has 8 tokens, but the context leaves 7 for prompts: .*max_context"
    ):
        drawn.draw(9)


def test_data_stream_interleaved_prompts_take_one_of_each_in_turn() -> None:
    parts = [PromptList(prompt(domain, key) for key in range(size)) for domain, size in (("a", 3), ("b", 0), ("c", 1))]
    mixed = InterleavedSource(parts)
    assert [mixed[i].uid for i in range(len(mixed))] == ["a/0", "c/0", "a/1", "a/2"]
    assert len(InterleavedSource([])) == 0


def test_data_stream_a_repeated_draw_has_an_id_of_its_own_and_takes_the_place_of_no_other_prompt() -> None:
    plain, other = stream(source("a", 5)), stream(source("a", 5))
    first = other.draw(2)
    again = other.repeat("a", first[1].position)
    assert (again.draw_id, again.uid, again.position) == (2, first[1].uid, 1)
    resumed = stream(source("a", 5))
    resumed.restore(json.loads(json.dumps(other.state())))
    assert resumed.num_drawn == 3
    rest = resumed.draw(3)
    assert [draw.uid for draw in (*first, *rest)] == uids(plain, 5) and [draw.draw_id for draw in rest] == [3, 4, 5]


def test_data_stream_repeated_draws_count_in_their_sources_share() -> None:
    drawn = stream(source("a", 9), source("b", 9))
    assert drawn.next_domain == "a"
    drawn.draw(2)
    drawn.repeat("a", 0)
    assert drawn.next_domain == "b" and [draw.prompt.domain for draw in drawn.draw(3)] == ["b", "a", "b"]


def test_data_stream_where_an_item_comes_in_the_first_epoch() -> None:
    drawn = stream(source("a", 7))
    for position, draw in enumerate(drawn.draw(7)):
        assert drawn.find_position("a", int(draw.uid.partition("/")[2])) == position
