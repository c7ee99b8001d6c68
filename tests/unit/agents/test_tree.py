"""Calls of an agent as one rollout: what the engine saw, and each token once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from roll.agents.tree import ModelCall, build_rollout, find_main_chain, group_chains
from roll.types import FinishReason, Prompt, PromptDraw, Rollout


def call(context: list[int], tokens: list[int], number: int = 0, finish_reason: FinishReason = "stop") -> ModelCall:
    return ModelCall(
        context=np.array(context, np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1.0 - number, np.float32),
        policy_versions=np.full(len(tokens), number, np.int32),
        finish_reason=finish_reason,
        engine_id="e",
    )


def rollout_of(*calls: ModelCall, prompt: tuple[int, ...] = (1, 2)) -> Rollout:
    draw = PromptDraw(
        draw_id=4, prompt=Prompt(uid="t/1", domain="t", messages=()), token_ids=np.array(prompt, np.int32)
    )
    return build_rollout(draw, 0, calls, text="said")


def spans(rollout: Rollout) -> list[tuple[int, int]]:
    return [(turn.start, turn.end) for turn in rollout.turns]


def test_agent_trajectory_tree_a_context_that_goes_on_where_an_answer_ended_is_one_sequence() -> None:
    rollout = rollout_of(call([1, 2], [10, 11], 5), call([1, 2, 10, 11, 7, 8], [12], 6))
    assert rollout.token_ids.tolist() == [10, 11, 7, 8, 12]
    assert rollout.policy_versions.tolist() == [5, 5, -1, -1, 6]
    assert rollout.logprobs.tolist() == [-6.0, -6.0, 0.0, 0.0, -7.0]
    assert spans(rollout) == [(0, 2), (4, 5)]
    assert rollout.branches == ()
    assert (rollout.text, rollout.finish_reason, rollout.engine_id) == ("said", "stop", "e")


def test_agent_trajectory_tree_an_agents_own_first_context_is_a_branch_at_the_beginning() -> None:
    rollout = rollout_of(call([9, 9, 9], [10]))
    assert [(b.start, b.context.tolist()) for b in rollout.branches] == [(0, [9, 9, 9])]
    assert rollout.prompt_token_ids.tolist() == [1, 2]


def test_agent_trajectory_tree_an_answer_that_was_cut_off_may_go_on_with_nothing_in_between() -> None:
    rollout = rollout_of(call([1, 2], [10], finish_reason="length"), call([1, 2, 10], [11], 1))
    assert rollout.token_ids.tolist() == [10, 11] and rollout.branches == ()
    assert (spans(rollout), rollout.finish_reason) == ([(0, 1), (1, 2)], "stop")
    assert rollout_of(call([1, 2], [10], finish_reason="length")).finish_reason == "length"


def test_agent_trajectory_tree_a_fork_has_a_context_of_its_own_and_trains_what_is_before_it_once() -> None:
    first = call([1, 2], [10])
    rollout = rollout_of(first, call([1, 2, 10, 7], [11]), call([1, 2, 10, 8], [12]))
    assert rollout.token_ids.tolist() == [10, 7, 11, 12]
    assert [(b.start, b.context.tolist()) for b in rollout.branches] == [(3, [1, 2, 10, 8])]


def test_agent_trajectory_tree_a_sub_agent_comes_before_the_chain_that_ends_last() -> None:
    main, sub, sub_again = call([1, 2], [10]), call([5], [20]), call([5, 20, 6], [21])
    rollout = rollout_of(main, sub, sub_again, call([1, 2, 10, 7], [11]))
    assert rollout.token_ids.tolist() == [20, 6, 21, 10, 7, 11]
    assert [(b.start, b.context.tolist()) for b in rollout.branches] == [(0, [5]), (3, [1, 2])]


def test_agent_trajectory_tree_several_answers_to_one_context_are_chains_that_are_told_apart_by_their_tokens() -> None:
    rollout = rollout_of(call([1, 2], [10]), call([1, 2], [11]), call([1, 2, 11, 7], [12]))
    assert group_chains([call([1], [2]), call([1], [2]), call([1, 2, 3], [4])]) == [
        [1],
        [0, 2],
    ]
    assert rollout.token_ids.tolist() == [10, 11, 7, 12]
    assert [(b.start, b.context.tolist()) for b in rollout.branches] == [(1, [1, 2])]


def test_agent_trajectory_tree_an_answer_that_was_changed_is_context_and_not_trained() -> None:
    rollout = rollout_of(call([1, 2], [10, 11]), call([1, 2, 10, 99, 7], [12]))
    assert [(b.start, b.context.tolist()) for b in rollout.branches] == [(2, [1, 2, 10, 99, 7])]


def test_agent_trajectory_tree_main_chain_is_the_one_of_most_answers_then_of_most_tokens_then_the_last() -> None:
    title, main, on = call([9] * 50, [1] * 50), call([1, 2], [10]), call([1, 2, 10, 7], [11])
    assert find_main_chain([title, main, on]) == [1, 2]
    assert find_main_chain([main, on, title]) == [0, 1]
    assert find_main_chain([main, title]) == [1]
    assert find_main_chain([call([1], [2]), call([3], [4])]) == [1]


@st.composite
def programs(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that go on anywhere, with few different tokens, so that contexts meet by chance as well."""
    token = st.integers(0, 2)
    calls: list[ModelCall] = []
    for number in range(draw(st.integers(1, 10))):
        base: list[int] = []
        if calls and draw(st.booleans()):
            before = draw(st.sampled_from(calls))
            base = before.all_token_ids.tolist()[: None if draw(st.booleans()) else draw(st.integers(0, 4))]
        context = base + draw(st.lists(token, min_size=0 if base else 1, max_size=3))
        calls.append(call(context, draw(st.lists(token, min_size=1, max_size=3)), number))
    return calls


@given(programs())
def test_agent_trajectory_tree_every_call_is_trained_once_after_exactly_what_the_engine_saw(
    calls: list[ModelCall],
) -> None:
    rollout = rollout_of(*calls)
    starts = [branch.start for branch in rollout.branches]
    ends = [*starts, len(rollout.token_ids)][1:]
    pieces = [(branch.context, branch.start, end) for branch, end in zip(rollout.branches, ends, strict=True)]
    head = starts[0] if starts else len(rollout.token_ids)
    pieces = [(rollout.prompt_token_ids, 0, head), *pieces]
    seen: list[tuple[list[int], list[int], int]] = []
    for turn in rollout.turns:
        context, begin, _ = next(piece for piece in reversed(pieces) if piece[1] <= turn.start < piece[2])
        before = [*context.tolist(), *rollout.token_ids[begin : turn.start].tolist()]
        versions = set(rollout.policy_versions[turn.start : turn.end].tolist())
        assert len(versions) == 1
        seen.append((before, rollout.token_ids[turn.start : turn.end].tolist(), versions.pop()))
    expected = [(c.context.tolist(), c.token_ids.tolist(), number) for number, c in enumerate(calls)]
    assert sorted(seen) == sorted(expected)
    written = sum(turn.end - turn.start for turn in rollout.turns)
    assert int((rollout.policy_versions >= 0).sum()) == written
    assert set(starts) <= {turn.start for turn in rollout.turns}
