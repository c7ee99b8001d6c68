"""What a round launches and which groups close it, worked out by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.scheduling import SchedulingConfig
from roll.rollout.buffer import SampleBuffer
from roll.rollout.rounds import Round, choose_groups, list_guaranteed_groups, plan_next_round
from roll.types import Prompt, PromptDraw

TAIL = SchedulingConfig(type="tail_batching", prompt_redundancy=1.5, rollout_redundancy=1.5)
QUEUE = SchedulingConfig(prompt_redundancy=1.5)


def round_of(config: SchedulingConfig, places: dict[str | None, int], **changes: Any) -> Round:
    return plan_next_round(
        config, num_groups=places, group_size=2, **{"deferred": {}, "num_later_groups": None, **changes}
    )


def test_rollout_selection_a_short_round_launches_spare_prompts_in_proportion_and_waits_for_none_that_is_deferred() -> (
    None
):
    short = round_of(TAIL, {"a": 3, "b": 1}, deferred={"a": 2, "b": 1})
    assert (short.kind, short.num_rollouts, short.first_finished, short.deferred) == ("short", 3, True, {})
    assert short.spare == {"a": 2, "b": 1}  # half as many again, rounded up in each domain
    assert (short.num_prompts, short.is_speculative) == (7, True)


@pytest.mark.parametrize(("deferred", "kind"), [({"a": 2, "b": 1}, "short"), ({"a": 2, "b": 2}, "long")])
def test_rollout_selection_a_long_round_begins_once_every_domain_can_fill_its_places(
    deferred: dict[str | None, int], kind: str
) -> None:
    found = round_of(TAIL, {"a": 2, "b": 2}, deferred=deferred)
    assert found.kind == kind
    if kind == "long":
        assert (found.deferred, found.num_rollouts, found.is_speculative) == ({"a": 2, "b": 2}, 2, False)


@pytest.mark.parametrize(("later", "kind"), [(4, "short"), (3, "last")])
def test_rollout_selection_no_short_round_leaves_more_than_the_later_rounds_can_train(later: int, kind: str) -> None:
    found = round_of(TAIL, {None: 4}, deferred={None: 2}, num_later_groups={None: later})
    assert found.kind == kind
    assert found.deferred == ({None: 2} if kind == "last" else {})


@pytest.mark.parametrize(("later", "spare"), [(None, 1), (9, 1), (2, 1), (1, 0), (0, 0)])
def test_rollout_selection_deferred_prompts_come_first_and_new_ones_only_if_they_can_still_be_trained(
    later: int | None, spare: int
) -> None:
    found = round_of(QUEUE, {None: 4}, deferred={None: 5}, num_later_groups=None if later is None else {None: later})
    assert (found.deferred, found.spare_deferred, found.spare) == ({None: 4}, {None: 1}, {None: spare})


def launched(*domains: str) -> SampleBuffer:
    buffer = SampleBuffer(4, 0)
    for domain in domains:
        launch(buffer, domain)
    return buffer


def launch(buffer: SampleBuffer, domain: str) -> None:
    draw_id = max((live.draw_id for live in buffer), default=-1) + 1
    prompt = Prompt(uid=str(draw_id), domain=domain, messages=())
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(1, np.int32))
    buffer.admit(SimpleNamespace(draw=draw), 99)  # type: ignore[arg-type]
    buffer.record_start(draw_id)


def taken(buffer: SampleBuffer, current: Round, quota: dict[str, int] | None = None) -> list[int] | None:
    found = choose_groups(buffer, current, 4, Counter(quota or {}))
    return None if found is None else [live.draw_id for live in found]


def test_rollout_selection_what_finished_first_counts_behind_what_the_round_waits_for() -> None:
    buffer = launched(*"aaaaaa")
    current = Round(
        num_groups={None: 4}, num_rollouts=2, first_finished=True, spare={None: 2}, mandatory_draw_ids={4, 5}
    )
    for draw_id in (3, 1, 5, 0):
        buffer.record_finish(draw_id)
        assert taken(buffer, current) is None  # 4 is still running
    buffer.record_finish(4)
    assert taken(buffer, current) == [1, 3, 4, 5]


def test_rollout_selection_what_was_launched_first_counts_once_nothing_before_it_runs() -> None:
    buffer = launched(*"aaaaaa")
    current = Round(num_groups={None: 4}, num_rollouts=2, spare={None: 2})
    for draw_id in (5, 3, 2, 1, 4):
        buffer.record_finish(draw_id)
        assert taken(buffer, current) is None  # 0 is still running
    buffer.record_finish(0)
    assert taken(buffer, current) == [0, 1, 2, 3]


@pytest.mark.parametrize("first_finished", [False, True])
def test_rollout_selection_a_domain_that_has_its_quota_does_not_end_the_choice(first_finished: bool) -> None:
    buffer = launched(*"aabbbb")
    for draw_id in range(6):
        buffer.record_finish(draw_id)
    current = Round(num_groups={"a": 1, "b": 3}, num_rollouts=2, first_finished=first_finished, spare={"a": 1, "b": 1})
    assert taken(buffer, current, {"a": 1, "b": 3}) == [0, 2, 3, 4]


@st.composite
def rounds_with_events(draw: st.DrawFn) -> tuple[str, Round, dict[str, int], list[tuple[int, bool]]]:
    """A round of 4 groups, and the ends of groups in random order: (which of the running ones, whether a filter
    rejects it).
    """
    kind = draw(st.sampled_from(["plain", "launch order", "first finished"]))
    spare = 0 if kind == "plain" else draw(st.integers(1, 4))
    domains = draw(st.text("ab", min_size=4 + spare, max_size=4 + spare))
    mandatory = set(draw(st.sets(st.integers(0, 3), max_size=2))) if kind == "first finished" else set()
    current = Round(
        num_groups={None: 4},
        num_rollouts=2,
        first_finished=kind == "first finished",
        spare={None: spare},
        mandatory_draw_ids=mandatory,
    )
    quota = draw(st.sampled_from([{}, {"a": min(domains.count("a"), 2), "b": 2}]))
    return domains, current, quota, draw(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=40))


@given(rounds_with_events())
def test_certain_groups_are_chosen_whatever_follows(
    drawn: tuple[str, Round, dict[str, int], list[tuple[int, bool]]],
) -> None:
    domains, current, quota, events = drawn
    buffer, certain = launched(*domains), set[int]()
    for which, rejected in [*events, *[(0, False)] * 40]:
        now = {live.draw_id for live in list_guaranteed_groups(buffer, current, 4, Counter(quota))}
        assert certain <= now  # never taken back
        certain = now
        chosen = taken(buffer, current, quota)
        if chosen is not None:
            assert certain == set(chosen)
            return
        running = buffer.running_groups
        live = running[which % len(running)]
        if rejected:
            buffer.discard(live.draw_id)
            launch(buffer, live.run.draw.prompt.domain)
        else:
            buffer.record_finish(live.draw_id)
    raise AssertionError("the round never ended")


def test_certain_groups_by_hand() -> None:
    buffer = launched(*"aaaaaa")
    spare = Round(num_groups={None: 4}, num_rollouts=2, spare={None: 2})
    for draw_id in (5, 4, 2):
        buffer.record_finish(draw_id)
    ids = lambda current: [live.draw_id for live in list_guaranteed_groups(buffer, current, 4, Counter())]  # noqa: E731
    assert ids(spare) == [2]  # 4 and 5 replace an earlier group only if a filter rejects it
    assert ids(Round(num_groups={None: 4}, num_rollouts=2, spare={None: 2}, first_finished=True)) == [5, 4, 2]
    waits = Round(num_groups={None: 4}, num_rollouts=2, spare={None: 2}, first_finished=True, mandatory_draw_ids={0, 1})
    assert ids(waits) == [5, 4]  # 0, 1, 5 and 4 fill the step
    buffer.discard(0)
    assert ids(spare) == [2, 4]
