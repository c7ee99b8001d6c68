"""Tail batching with α > 0: which groups are deferred, and when their prompts are launched, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.buffer import SampleBuffer
from roll.rollout.long_rounds import LongRounds
from roll.types import Prompt, PromptDraw


def make_draw(draw_id: int) -> PromptDraw:
    prompt = Prompt(uid=str(draw_id), domain="a", messages=())
    return PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(1, np.int32))


def fill(buffer: SampleBuffer, *draw_ids: int) -> None:
    for draw_id in draw_ids:
        buffer.admit(SimpleNamespace(draw=make_draw(draw_id)), 99)  # type: ignore[arg-type]
        buffer.record_start(draw_id)


def finish(buffer: SampleBuffer, *draw_ids: int) -> None:
    for draw_id in draw_ids:
        buffer.record_finish(draw_id)


def blocking(buffer: SampleBuffer) -> list[int]:
    return [live.draw_id for live in buffer.list_blocking_groups()]


def test_tail_batching_only_a_group_that_a_step_would_wait_for_is_blocking() -> None:
    buffer = SampleBuffer(2, 1)  # two groups per step, at most one version old
    fill(buffer, 0, 1, 2, 3)
    finish(buffer, 1, 2)
    assert blocking(buffer) == []  # 0 and 3 can be trained by the next update
    buffer.take(1), buffer.take(2)
    buffer.pop_taken()
    buffer.version = 1
    fill(buffer, 4, 5)
    finish(buffer, 4)
    assert blocking(buffer) == []  # the step has only one finished group anyway
    finish(buffer, 5)
    assert blocking(buffer) == [0, 3]  # 4 and 5 could be trained now, but then 0 and 3 would get too old
    finish(buffer, 3)
    assert blocking(buffer) == [0]
    finish(buffer, 0)
    assert blocking(buffer) == []
    assert buffer.can_take()


def test_tail_batching_a_prompt_is_deferred_once_and_forgotten_when_it_is_trained() -> None:
    buffer, rounds = SampleBuffer(1, 1), LongRounds(1, 0, enabled=True)
    fill(buffer, 7)
    buffer.version = 1
    fill(buffer, 8)
    finish(buffer, 8)
    assert [live.draw_id for live in rounds.choose_deferred(buffer)] == [7]
    assert rounds.is_mandatory(make_draw(7))
    assert rounds.choose_deferred(buffer) == []  # still blocking, but its group must finish now
    rounds.remove(7)
    assert not rounds.is_mandatory(make_draw(7))
    assert LongRounds(1, 0, enabled=False).choose_deferred(buffer) == []


def test_tail_batching_deferred_prompts_wait_for_a_long_round_and_go_before_new_ones() -> None:
    rounds = LongRounds(4, 0, enabled=True)
    assert rounds.plan_launch(3, 2, None) == (0, 3)
    assert rounds.plan_launch(3, 3, 20) == (0, 3)
    assert rounds.plan_launch(3, 5, 20) == (3, 0)  # a long round of 4
    assert rounds.plan_launch(3, 2, 20) == (1, 2)  # its fourth prompt; the fifth waits for the next one
    assert rounds.plan_launch(3, 1, 20) == (0, 3)


def test_tail_batching_the_last_steps_train_what_is_deferred_in_place_of_new_prompts() -> None:
    rounds = LongRounds(4, 0, enabled=True)
    assert rounds.plan_launch(3, 2, 4) == (0, 2)  # two of the four slots belong to deferred prompts
    assert rounds.plan_launch(2, 2, 2) == (2, 0)


def test_tail_batching_a_resumed_run_launches_its_pending_draws_at_once() -> None:
    assert LongRounds(4, 3, enabled=True).plan_launch(5, 3, 20) == (3, 2)


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=30), st.integers(0, 60))
def test_tail_batching_never_launches_more_than_the_remaining_slots(
    size: int, events: list[tuple[int, int]], slots: int
) -> None:
    rounds, deferred = LongRounds(size, 0, enabled=True), 0
    for room, more in events:
        deferred = min(deferred + more, slots)  # a deferred group gives its slot back, and needs another one
        room = min(room, slots)
        plan = rounds.plan_launch(room, deferred, slots)
        assert plan.num_deferred + plan.num_new <= room
        assert plan.num_deferred <= deferred
        deferred, slots = deferred - plan.num_deferred, slots - plan.num_deferred - plan.num_new
        assert deferred <= slots
    while slots and deferred:  # the rest of the run launches all of them
        plan = rounds.plan_launch(min(size, slots), deferred, slots)
        assert plan.num_deferred + plan.num_new > 0
        deferred, slots = deferred - plan.num_deferred, slots - plan.num_deferred - plan.num_new
    assert not deferred
