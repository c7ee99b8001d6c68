"""Beginning in the midst of an earlier episode: the context is the unbroken one, token by token, or it is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.rollout.test_token_exactness import HISTORIES, TOOLS, answers, replies
from worlds.episodes import MAX_NEW_TOKENS, Engine, Script, check_exact, run_episode
from worlds.published_templates import PUBLISHED, published_tokenizer

from roll.data import ChatRenderer
from roll.data.samples import build_samples
from roll.errors import ReplayError
from roll.models import load_tokenizer
from roll.rollout.episode_replay import build_trajectory
from roll.types import Anchor, RewardResult, Rollout, Trajectory

STEPS: list[tuple[str, dict[str, Any]]] = [("o1", {}), ("o2", {}), ("o3", {}), ("end", {})]


def said(model: Path, *words: str) -> tuple[ChatRenderer, Engine]:
    """The tiny model's tokens are bytes."""
    tokenizer = load_tokenizer(str(model))
    (stop,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    spelt = [[*tokenizer.encode(word, add_special_tokens=False), stop] for word in words]
    return ChatRenderer(tokenizer), Engine(spelt, (stop,))


def won(rollout: Rollout) -> Trajectory:
    return build_trajectory(replace(rollout, reward=RewardResult(value=2.0, correct=True)))


def test_rollout_replay_a_rollout_goes_on_where_the_earlier_episode_was(tiny_model: Path) -> None:
    renderer, engine = said(tiny_model, "a1", "a2", "a3", "a4")
    whole = run_episode(renderer, engine, Script(STEPS))
    _, other = said(tiny_model, "b3", "b4")
    script = Script(STEPS)
    rollout = run_episode(renderer, other, script, anchor=Anchor(trajectory=won(whole), num_turns=2))
    check_exact(rollout, other)
    assert script.heard == ["a1", "a2", "b3", "b4"]
    assert [request.request_id for request, _ in other.seen] == ["train-0.0.t2", "train-0.0.t3"]
    assert (
        other.seen[0][0].token_ids.tolist() == engine.seen[2][0].token_ids.tolist() == rollout.prompt_token_ids.tolist()
    )
    assert rollout.replayed == whole.turns[:2] and len(rollout.turns) == 2 and rollout.turns[0].start == 0
    assert [turn.state for turn in rollout.turns] == ["s2", "s3"] and rollout.prompt.turns == 3
    (sample,) = build_samples(replace(rollout, reward=RewardResult(value=2.0)))
    assert sample.loss_mask.sum() == sum(turn.end - turn.start for turn in rollout.turns)
    assert not sample.loss_mask[: len(rollout.prompt_token_ids)].any()


class Forgetful(Script):
    """An environment that is never the same twice."""

    def __init__(self, what: str) -> None:
        super().__init__(STEPS)
        self.what = what

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = await super().reset(seed)
        return observation, {"state": "other"} if self.what == "first state" else info

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, ended, cut_off, info = await super().step(action)
        if len(self.heard) == 2:
            observation += "!" * (self.what == "text")
            reward += self.what == "reward"
            ended |= self.what == "end"
            info["state"] += "'" * (self.what == "state")
        return observation, reward, ended, cut_off, info


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("first state", "the observation before turn 1 differs"),
        ("text", "an observation up to turn 3 differs"),
        ("reward", "the reward of turn 2 is 1.5, not 0.5 as recorded"),
        ("end", "the episode ends after 2 of 2 turns"),
        ("state", "the state before turn 3 differs"),
    ],
)
def test_rollout_replay_an_environment_that_does_not_repeat_itself_is_an_error(
    tiny_model: Path, what: str, why: str
) -> None:
    renderer, engine = said(tiny_model, "a1", "a2", "a3", "a4")
    whole = run_episode(renderer, engine, Script(STEPS))
    with pytest.raises(ReplayError, match=f"environment 'script' does not repeat its episode 'p'.*: {why}"):
        run_episode(renderer, engine, Forgetful(what), anchor=Anchor(trajectory=won(whole), num_turns=2))


def test_rollout_replay_another_first_observation_is_an_error_also_where_no_turn_is_replayed(tiny_model: Path) -> None:
    renderer, engine = said(tiny_model, "a1", "a2", "a3", "a4")
    whole = won(run_episode(renderer, engine, Script(STEPS)))
    again = run_episode(renderer, engine, Script(STEPS), anchor=Anchor(trajectory=whole, num_turns=0))
    assert again.replayed == () and again.turns == whole.turns
    other = replace(whole, prompt_token_ids=whole.prompt_token_ids[1:])
    with pytest.raises(ReplayError, match="the first observation differs"):
        run_episode(renderer, engine, Script(STEPS), anchor=Anchor(trajectory=other, num_turns=0))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "gemma"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_rollout_replay_saying_the_same_again_from_any_anchor_gives_the_rest_of_the_same_episode(
    default_model: Path, name: str, data: st.DataObject
) -> None:
    tokenizer = published_tokenizer(default_model, name)
    renderer = ChatRenderer(tokenizer)
    special = PUBLISHED[name] or ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    stops = tuple(tokenizer.convert_tokens_to_ids(token) for token in (special[0], special[-1]))
    others = [tokenizer.convert_tokens_to_ids(token) for token in special[1:-1]]
    one = answers(stops, others, lambda text: tokenizer.encode(text, add_special_tokens=False))
    ended = one.map(lambda tokens: tokens if tokens and tokens[-1] in stops else [*tokens, stops[0]])
    words = data.draw(st.lists(ended.map(lambda tokens: tokens[-20:]), min_size=2, max_size=5))
    steps = data.draw(st.lists(replies(), min_size=2, max_size=5))
    history = data.draw(st.sampled_from([h for h in HISTORIES if h.kind != "summary"]))
    tools = data.draw(st.sampled_from([(), TOOLS]))
    engine = Engine(words, stops)
    whole = run_episode(renderer, engine, Script(steps), history, tools=tools)
    depth = data.draw(st.integers(0, len(whole.turns) - 1))
    again = Engine(words[depth % len(words) :] + words[: depth % len(words)], stops)
    anchor = Anchor(trajectory=won(whole), num_turns=depth)
    rollout = run_episode(renderer, again, Script(steps), history, tools=tools, anchor=anchor)
    check_exact(rollout, again)
    pairs = [(request.token_ids, answer.token_ids) for request, answer in engine.seen[depth:]]
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == [
        (request.token_ids.tolist(), answer.token_ids.tolist()) for request, answer in again.seen
    ]
    begin = whole.turns[depth].start
    np.testing.assert_array_equal(rollout.token_ids, whole.token_ids[begin:])
    assert [t.reward for t in (*rollout.replayed, *rollout.turns)] == [t.reward for t in whole.turns]
    assert [t.state for t in rollout.turns] == [t.state for t in whole.turns[depth:]]


def test_rollout_replay_what_was_cut_before_the_anchor_is_not_counted_again(tiny_model: Path) -> None:
    renderer, engine = said(tiny_model, "a1", "a2", "a3")
    steps: list[tuple[str, dict[str, Any]]] = [("x" * 900, {}), ("end", {})]
    whole = run_episode(renderer, engine, Script(steps), max_context=400, min_answer_tokens=200)
    assert whole.counts == {"observations_cut": 1}
    anchor = Anchor(trajectory=won(whole), num_turns=1)
    again = run_episode(renderer, engine, Script(steps), max_context=400, min_answer_tokens=200, anchor=anchor)
    assert again.replayed and again.counts == {}


def test_rollout_replay_an_answer_of_as_many_tokens_as_it_may_have_did_not_fill_the_context(tiny_model: Path) -> None:
    renderer, engine = said(tiny_model, "a" * 100)
    rollout = run_episode(renderer, engine, Script(STEPS), max_context=1000)
    assert (len(rollout.token_ids), rollout.finish_reason, rollout.counts) == (MAX_NEW_TOKENS, "length", {})


def test_rollout_replay_an_episode_that_its_environment_cuts_off_has_no_further_turn(tiny_model: Path) -> None:
    class CutsOff(Script):
        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, reward, ended, _, info = await super().step(action)
            return observation, reward, ended, len(self.heard) == 2, info

    renderer, engine = said(tiny_model, "a1", "a2", "a3", "a4")
    rollout = run_episode(renderer, engine, CutsOff(STEPS))
    assert len(rollout.turns) == len(engine.seen) == 2 and rollout.finish_reason == "stop"
