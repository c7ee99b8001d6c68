"""Requests of the hf engine: randomness, order, results, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import ConfigError, UserError
from roll.inference import EngineSpec
from roll.inference.hf_requests import BatchRow, RequestQueue, check_options, check_request, create_row, draw_uniforms
from roll.types import GenerationRequest, SamplingParams


def request(name: str = "r", prompt: int = 3, priority: int = 0, **sampling: object) -> GenerationRequest:
    settings = SamplingParams(**{"max_new_tokens": 4, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(
        request_id=name, token_ids=np.arange(prompt, dtype=np.int32), sampling=settings, priority=priority
    )


def names(rows: list[BatchRow]) -> list[str]:
    return [row.request.request_id for row in rows]


@given(seed=st.integers(0, 2**70), short=st.integers(0, 50), more=st.integers(0, 50))
def test_hf_requests_a_longer_series_of_random_numbers_begins_with_the_shorter(
    seed: int, short: int, more: int
) -> None:
    assert (draw_uniforms(seed, short + more)[:short] == draw_uniforms(seed, short)).all()


def test_hf_requests_random_numbers_never_change_between_versions() -> None:
    # First doubles of NumPy's PCG64 for these seeds; runs could not be resumed bit for bit if they changed.
    assert draw_uniforms(0, 2).tolist() == [0.6369616873214543, 0.2697867137638703]
    assert draw_uniforms(1, 1).tolist() == [0.5118216247002567]


def test_hf_requests_without_a_seed_differ_by_order_and_by_the_engines_seed() -> None:
    rows = [create_row(request(), order, seed) for order, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    first, second, other_engine, again = (row.uniforms.tolist() for row in rows)
    assert first == again and first != second and first != other_engine


def test_hf_requests_a_requests_own_seed_wins() -> None:
    assert (create_row(request(seed=7), 3, 9).uniforms == draw_uniforms(7, 4)).all()


def test_hf_requests_a_row_ends_at_its_stop_token_and_keeps_it() -> None:
    row = create_row(request(stop_token_ids=(9,)), 0, 0)
    assert [row.append(token, -0.5, 1) for token in (5, 9)] == [False, True]
    result = row.build_result("e")
    assert result.token_ids.tolist() == [5, 9] and result.finish_reason == "stop"
    assert result.logprobs.tolist() == [-0.5, -0.5] and result.policy_versions.tolist() == [1, 1]


def test_hf_requests_a_row_ends_when_it_has_all_its_tokens() -> None:
    row = create_row(request(max_new_tokens=2), 0, 0)
    assert [row.append(5, 0.0, 0), row.append(6, 0.0, 0)] == [False, True]
    assert row.build_result("e").finish_reason == "length"


def test_hf_requests_a_stop_token_in_the_prompt_does_not_end_anything() -> None:
    row = create_row(request(prompt=3, stop_token_ids=(2,)), 0, 0)
    assert row.build_result("e", aborted=True).finish_reason == "abort"
    assert row.build_result("e").finish_reason == "length"  # nothing was generated: the prompt's last token is 2


def test_hf_requests_a_wave_is_ordered_by_priority_then_arrival() -> None:
    queue = RequestQueue()
    for order, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", 0)]):
        queue.add(create_row(request(name, priority=priority), order, 0))
    assert queue.pop_admissible(lambda row, taken: True) == []  # no wave yet
    queue.begin_wave()
    assert names(queue.pop_admissible(lambda row, taken: True)) == ["b", "d", "a", "c"]


def test_hf_requests_a_wave_stops_at_the_first_request_that_does_not_fit() -> None:
    queue = RequestQueue()
    for order, prompt in enumerate([1, 9, 1]):
        queue.add(create_row(request(str(order), prompt=prompt), order, 0))
    queue.begin_wave()
    assert names(queue.pop_admissible(lambda row, taken: row.prompt_length < 5)) == ["0"]
    assert queue.num_in_wave == 2  # the third may not overtake the second


def test_hf_requests_arrivals_wait_for_the_next_wave() -> None:
    queue = RequestQueue()
    queue.add(create_row(request("a"), 0, 0))
    queue.begin_wave()
    queue.add(create_row(request("b"), 1, 0))
    assert names(queue.pop_admissible(lambda row, taken: True)) == ["a"] and len(queue) == 1 and queue.num_in_wave == 0


def test_hf_requests_put_back_come_first_and_in_their_order() -> None:
    queue = RequestQueue()
    queue.add(create_row(request("a"), 0, 0))
    queue.begin_wave()
    queue.requeue([create_row(request("x"), 1, 0), create_row(request("y"), 2, 0)])
    assert names(queue.pop_admissible(lambda row, taken: True)) == ["x", "y", "a"]


def test_hf_requests_are_removed_wherever_they_wait() -> None:
    queue = RequestQueue()
    queue.add(create_row(request("a"), 0, 0))
    queue.begin_wave()
    queue.add(create_row(request("b"), 1, 0))
    queue.add(create_row(request("c"), 2, 0))
    assert names(queue.remove({"a", "b", "z"})) == ["a", "b"] and len(queue) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=0), "0 prompt tokens"),
        (request(max_new_tokens=0), "max_new_tokens=0"),
        (request(prompt=7, max_new_tokens=4), "7 \\+ 4 tokens.*context length 10"),
        (request(prompt=6, max_new_tokens=4), "token id 5, which is out of range for the vocabulary size 5"),
    ],
)
def test_hf_requests_that_cannot_be_served_are_refused(bad: GenerationRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_request(bad, max_context=10, vocab_size=5)


def test_hf_requests_a_negative_token_is_refused() -> None:
    bad = GenerationRequest(
        request_id="r", token_ids=np.array([1, -1], np.int32), sampling=SamplingParams(max_new_tokens=1)
    )
    with pytest.raises(UserError, match="token id -1, which is out of range"):
        check_request(bad, max_context=10, vocab_size=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"admision": "wave"}}, "Did you mean 'admission'"),
        ({"options": {"admission": "often"}}, "must be one of wave, continuous"),
    ],
)
def test_hf_requests_options_that_do_not_exist_are_refused(changes: dict[str, object], message: str) -> None:
    spec = EngineSpec(engine_id="e", kind="hf", model_path="x", max_context=8, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        check_options(spec)


def test_hf_requests_a_request_that_is_put_back_without_an_answer_forgets_which_experts_read_its_prompt() -> None:
    """Both their prompts are computed again; what was made of the first one's stays as it was made."""
    chosen = np.arange(2, dtype=np.int8).reshape(2, 1, 1)
    begun, waiting = (create_row(request(name), order, 0) for order, name in enumerate("ab"))
    for row in (begun, waiting):
        row.store_experts(0, chosen)
    begun.append(7, -1.0, 0)
    queue = RequestQueue()
    queue.requeue([begun, waiting])
    assert names(queue.pop_admissible(lambda row, taken: True)) == ["a", "b"]
    for row in (begun, waiting):
        row.store_experts(0, chosen + 5)
    assert [row.experts[:3].ravel().tolist() for row in (begun, waiting) if row.experts is not None] == [
        [0, 1, -1],
        [5, 6, -1],
    ]
