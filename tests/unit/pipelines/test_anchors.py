"""Where episodes begin in the midst of successful ones; what is kept of these, and what that is good for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.algorithms.selection import select_training_rollouts
from roll.algorithms.token_weights import add_advantages
from roll.config.algorithm import AlgorithmConfig
from roll.config.pipelines.agentic import AgenticConfig, AnchorsConfig
from roll.data import PromptStream, WeightedSource
from roll.data.environment import EpisodeList
from roll.data.samples import build_batch, build_samples
from roll.pipelines.episodes import anchors
from roll.pipelines.episodes.curriculum import choose_domain
from roll.pipelines.episodes.draws import EpisodeDraws
from roll.pipelines.episodes.state import AgenticState, AnchorEpisode
from roll.pipelines.reinforcement.demonstrations import build_anchor_demonstration
from roll.rollout.episode import play_episode
from roll.types import (
    Anchor,
    Branch,
    EncodedText,
    EnvironmentSettings,
    Generation,
    GenerationRequest,
    Group,
    IntArray,
    Message,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Trajectory,
    Turn,
)

ROLLBACK = AnchorsConfig(type="rollback", num_rollouts=2, passed_at=1.0, share=1.0)
PARALLEL = AnchorsConfig(type="parallel", num_rollouts=2, passed_at=1.0, share=1.0)


def trajectory(num_turns: int, uid: str = "a/0", reward: float = 1.0) -> Trajectory:
    """Turns of two tokens, with one of the environment's behind each."""
    turns = tuple(Turn(start=3 * i, end=3 * i + 2, state=f"s{i}") for i in range(num_turns))
    ids = np.arange(3 * num_turns - 1, dtype=np.int32)
    return Trajectory(uid=uid, prompt_token_ids=np.array([90, 91], np.int32), token_ids=ids, turns=turns, reward=reward)


def kept(num_turns: int = 4, uid: str = "a/0", **changes: Any) -> AnchorEpisode:
    return AnchorEpisode(**{"domain": "a", "position": 5, "trajectory": trajectory(num_turns, uid), **changes})


def group(*solved: bool | str, uid: str = "a/9", anchor: Anchor | None = None, turns: int = 3) -> Group:
    """A text among the results is why a rollout failed."""
    prompt = Prompt(uid=uid, domain="a", messages=(), environment=EnvironmentSettings(name="a"), turns=turns)
    draw = PromptDraw(draw_id=0, prompt=prompt, token_ids=np.zeros(1, np.int32), position=7, anchor=anchor)
    ids = trajectory(turns).token_ids
    rollouts = [
        Rollout(
            draw_id=0,
            index=index,
            prompt=prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
            text="",
            turns=trajectory(turns).turns,
            replayed=anchor.trajectory.turns[: anchor.num_turns] if anchor else (),
            reward=None if isinstance(won, str) else RewardResult(value=float(won), correct=won),
            status=RolloutStatus.INFRA_ERROR if isinstance(won, str) else RolloutStatus.COMPLETED,
            cause=won if isinstance(won, str) else "",
        )
        for index, won in enumerate(solved)
    ]
    return Group(draw=draw, rollouts=tuple(rollouts))


# ---- choice


@pytest.mark.parametrize(
    ("config", "num_turns", "expected"),
    [
        ({"type": "rollback"}, 3, [2, 1, 0]),
        ({"num_anchors": 4}, 10, [2, 4, 6, 8]),
        ({"num_anchors": 3}, 5, [1, 3, 4]),  # 1.25, 2.5 and 3.75
        ({"num_anchors": 4}, 3, [1, 2]),
        ({"num_anchors": 1}, 2, [1]),
        ({"placement": "random"}, 5, [1, 2, 3, 4]),
    ],
)
def test_anchors_lie_where_they_should(config: dict[str, Any], num_turns: int, expected: list[int]) -> None:
    assert anchors.list_anchors(AnchorsConfig(**config), num_turns) == expected


@given(num_turns=st.integers(2, 300), num_anchors=st.integers(1, 400))
def test_anchor_even_anchors_are_different_boundaries_inside_at_like_distances(
    num_turns: int, num_anchors: int
) -> None:
    found = anchors.list_anchors(AnchorsConfig(num_anchors=num_anchors), num_turns)
    assert len(found) == min(num_anchors, num_turns - 1)
    gaps = np.diff([0, *found, num_turns])
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


def test_anchor_a_rollback_stands_at_the_last_turn_that_is_not_passed() -> None:
    assert anchors.list_remaining_anchors(ROLLBACK, kept()) == [3]
    assert anchors.list_remaining_anchors(ROLLBACK, kept(passed_anchors=frozenset({3, 2}))) == [1]
    assert anchors.list_remaining_anchors(ROLLBACK, kept(passed_anchors=frozenset({0, 1, 2, 3}))) == []
    assert anchors.list_remaining_anchors(PARALLEL, kept(passed_anchors=frozenset({2}))) == [1, 3]


def test_anchor_an_episode_that_was_summed_up_is_not_kept_since_its_turns_are_not_the_environments() -> None:
    won = group(True, False, False, False)
    assert len(anchors.update_episodes(ROLLBACK, [], [won], ())) == 1
    summed_up = tuple(replace(rollout, counts={"summaries": 1}) for rollout in won.rollouts)
    assert anchors.update_episodes(ROLLBACK, [], [replace(won, rollouts=summed_up)], ()) == ()


def test_anchor_as_many_draws_begin_at_anchors_as_asked_for_spread_over_episodes_and_boundaries() -> None:
    config = AnchorsConfig(type="parallel", share=0.25)
    both = [kept(uid="a/0"), kept(uid="a/1"), kept(uid="b/0", domain="b")]

    def chosen(number: int, seed: int = 3, domain: str = "a", **unrepeated: int) -> tuple[str, int] | None:
        found = anchors.choose_anchor(config, both, unrepeated, domain=domain, seed=seed, number=number)
        return found and (found[0].trajectory.uid, found[1].num_turns)

    drawn = [chosen(number) for number in range(4000)]
    assert drawn == [chosen(number) for number in range(4000)]
    assert drawn != [chosen(number, seed=4) for number in range(4000)]
    assert sum(one is not None for one in drawn) / 4000 == pytest.approx(0.25, abs=0.02)
    counts = [drawn.count((uid, k)) for uid in ("a/0", "a/1") for k in (1, 2, 3)]
    assert min(counts) > 0.75 * sum(counts) / 6
    assert {chosen(number, domain="b") for number in range(99)} - {None} == {("b/0", k) for k in (1, 2, 3)}
    assert {chosen(number, a=anchors.MAX_REPLAY_FAILURES) for number in range(99)} == {None}
    assert {chosen(number, domain="c") for number in range(99)} == {None}


def test_anchor_draws_at_anchors_are_repeats_and_one_left_in_flight_begins_there_again() -> None:
    config = chain_config(anchors={"share": 1.0}, environments=[{"environment": "a", "num_turns": 4}])
    state = AgenticState(episodes=(kept(uid="a/0"), kept(uid="a/1")))

    def stream() -> PromptStream:
        source = WeightedSource(domain="a", items=EpisodeList(config.environments[0], "a", 0, 9))
        return PromptStream([source], Plain().prompt, 0)

    draws = EpisodeDraws(config=config, state=state, stream=stream())
    first, second = draws.draw(2)
    assert (first.draw_id, second.draw_id, first.position) == (0, 1, 5) and first.anchor and second.anchor
    anchors.update_anchors(config.anchors or ROLLBACK, state, [], [second])
    resumed = EpisodeDraws(config=config, state=state, stream=stream())
    again = resumed.redraw(1, "a", 5)
    assert again.anchor == second.anchor and again.uid == second.uid
    assert resumed.redraw(0, "a", 5).anchor is None  # no longer in flight at the boundary
    state.episodes = ()
    assert [draw.position for draw in draws.draw(2)] == [0, 1] and resumed.redraw(1, "a", 5).anchor is None


def test_anchor_the_environment_of_a_draw_under_a_curriculum_is_that_of_its_number() -> None:
    entries = [{"environment": "a"}, {"environment": "b"}]
    config = chain_config(environments=entries, curriculum={})
    sources = [
        WeightedSource(domain=entry.domain, items=EpisodeList(entry, entry.domain, 0, 9))
        for entry in config.environments
    ]
    state = AgenticState(success_rates={"a": 0.4})
    draws = EpisodeDraws(config=config, state=state, stream=PromptStream(sources, Plain().prompt, 0)).draw(24)
    assert [draw.prompt.domain for draw in draws] == [choose_domain(config, state, draw.draw_id) for draw in draws]


# ---- what is kept


def at(one: AnchorEpisode, num_turns: int) -> Anchor:
    return Anchor(trajectory=one.trajectory, num_turns=num_turns)


def test_anchor_an_anchor_is_passed_once_the_last_rollouts_from_it_succeeded() -> None:
    first = kept()
    (one,) = anchors.update_episodes(ROLLBACK, [first], [group(True, False, anchor=at(first, 3))], ())
    assert one.recent_results == {3: (True, False)} and not one.passed_anchors
    (two,) = anchors.update_episodes(ROLLBACK, [one], [group(True, anchor=at(first, 3))], ())
    assert two.recent_results == {3: (False, True)}
    (three,) = anchors.update_episodes(
        ROLLBACK, [two], [group(True, anchor=at(first, 3)), group(False, anchor=at(first, 1))], ()
    )
    assert three.passed_anchors == {3} and three.recent_results == {1: (False,)}
    last = replace(three, passed_anchors=frozenset({3, 2, 1}))
    beaten = group(True, True, anchor=at(first, 0))
    assert anchors.update_episodes(ROLLBACK, [last], [beaten], ()) == ()
    (held,) = anchors.update_episodes(ROLLBACK, [last], [beaten], {"a/0"})  # a draw that begins there is in flight
    assert (
        held.passed_anchors == {0, 1, 2, 3}
        and anchors.choose_anchor(ROLLBACK, [held], {}, domain="a", seed=0, number=0) is None
    )


def test_anchor_rare_successes_are_kept_and_the_oldest_gives_way_to_a_new_one() -> None:
    config = PARALLEL.model_copy(update={"num_kept": 2})
    found = anchors.update_episodes(config, [], [group(True, False, False), group(True, True, False, uid="a/8")], ())
    assert [(one.trajectory.uid, one.position, one.is_demonstration) for one in found] == [("a/9", 7, False)]
    assert found[0].trajectory.turns == trajectory(3).turns and found[0].trajectory.reward == 1.0
    assert anchors.update_episodes(config, found, [group(True, False, turns=2)], ()) == found  # one of a prompt
    single = group(True, False, uid="a/1", turns=1)
    assert anchors.update_episodes(config, [], [single, group(False, False), group("x", uid="a/2")], ()) == ()
    older = [kept(uid="a/1", is_demonstration=True), kept(uid="a/2"), kept(uid="b/0", domain="b")]
    left = anchors.update_episodes(config, older, [group(True, False)], ())
    assert [one.trajectory.uid for one in left] == ["a/1", "b/0", "a/9"]
    left = anchors.update_episodes(config, older, [group(True, False)], {"a/2"})
    assert [one.trajectory.uid for one in left] == ["a/1", "a/2", "b/0"]
    from_an_anchor = group(True, False, anchor=at(older[1], 1))
    assert [one.trajectory.uid for one in anchors.update_episodes(config, older[1:], [from_an_anchor], ())] == [
        "a/2",
        "b/0",
    ]


def test_anchor_what_is_not_repeated_is_given_up_and_after_three_times_the_environment(caplog: Any) -> None:
    state = AgenticState(episodes=tuple(kept(uid=f"a/{i}") for i in range(5)))
    for number in range(3):
        gone = group(True, "ReplayError: it differs.", anchor=at(kept(uid=f"a/{number}"), 1))
        assert anchors.compute_anchor_metrics(state.episodes, [gone])["anchors/not_repeated"] == 1
        anchors.update_anchors(PARALLEL, state, [gone], [gone.draw] if number else [])
        assert state.replay_failures == {"a": number + 1} and len(state.episodes) == 4 - number
    assert [record.message for record in caplog.records] == [
        *["it differs."] * 2,
        "it differs. Groups of 'a' no longer begin at anchors.",
    ]
    assert anchors.choose_anchor(PARALLEL, state.episodes, state.replay_failures, domain="a", seed=0, number=0) is None
    died = group("WorkerDiedError: gone", anchor=at(kept(uid="a/3"), 1))
    anchors.update_anchors(PARALLEL, state, [died], [died.draw])
    assert (
        state.replay_failures == {"a": 3} and len(state.episodes) == 2 and state.anchors_in_flight == {"0": ["a/3", 1]}
    )


def test_anchor_figures_tell_success_by_how_much_was_replayed() -> None:
    groups = [group(True, False, anchor=at(kept(), 3)), group(False, anchor=at(kept(), 1)), group(True, True)]
    assert anchors.compute_anchor_metrics([kept()], groups) == {
        "anchors/kept": 1.0,
        "anchors/groups": 2.0,
        "anchors/not_repeated": 0.0,
        "anchors/replayed_share": 0.5,
        "anchors/accuracy": pytest.approx(1 / 3),
        "anchors/accuracy_quarter_2": 0.0,
        "anchors/accuracy_quarter_4": 0.5,
    }


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=9).map(lambda ids: np.array(ids, np.int32))
TURNS = st.builds(
    lambda start, length, reward, state: Turn(start=start, end=start + length, reward=reward, state=state),
    st.integers(0, 9), st.integers(0, 9), st.floats(allow_nan=False), st.text(max_size=4),
)  # fmt: skip
EPISODES = st.builds(
    AnchorEpisode,
    domain=st.text(max_size=3),
    position=st.integers(0, 9),
    is_demonstration=st.booleans(),
    recent_results=st.dictionaries(
        st.integers(0, 9), st.lists(st.booleans(), min_size=1, max_size=4).map(tuple), max_size=3
    ),
    passed_anchors=st.frozensets(st.integers(0, 9), max_size=3),
    trajectory=st.builds(
        Trajectory,
        uid=st.text(max_size=4),
        prompt_token_ids=TOKENS,
        token_ids=TOKENS,
        turns=st.lists(TURNS, max_size=3).map(tuple),
        branches=st.lists(st.builds(Branch, start=st.integers(0, 9), context=TOKENS), max_size=2).map(tuple),
        reward=st.floats(allow_nan=False),
    ),
)


@given(episodes=st.lists(EPISODES, max_size=2).map(tuple))
def test_anchor_a_checkpoint_holds_what_is_kept_to_the_last_bit(episodes: tuple[AnchorEpisode, ...]) -> None:
    state = AgenticState(
        episodes=episodes, anchors_in_flight={"7": ["a/0", 2]}, replay_failures={"a": 1}, demonstrations_played=True
    )
    again = AgenticState.from_json(json.loads(json.dumps(state.to_json())))
    assert again.to_json() == state.to_json() and state.episodes == episodes
    for one, other in zip(again.episodes, episodes, strict=True):
        np.testing.assert_array_equal(one.trajectory.token_ids, other.trajectory.token_ids)
        assert one.trajectory.turns == other.trajectory.turns and (one.recent_results, one.passed_anchors) == (
            other.recent_results,
            other.passed_anchors,
        )


# ---- imitation


def test_anchor_what_was_replayed_is_imitated_by_what_it_was_worth_to_the_whole_episode() -> None:
    """IPA, K = 4, gamma = 0.5, R = 2: G = 0.25, 0.5, 1, 2; of these the first two are imitated, weighted by 3."""
    settings = {"type": "ipa", "advantage": {"gamma": 0.5}, "imitation": {"weight": 3.0}}
    algorithm = AlgorithmConfig.model_validate(settings)
    anchor = Anchor(trajectory=trajectory(4, reward=2.0), num_turns=2)
    played = group(True, False, anchor=anchor)
    shown = build_anchor_demonstration(played.draw, anchor, 2)
    assert shown.token_ids.tolist() == [0, 1, 2, 3, 4] and shown.expert
    (sample,) = build_samples(shown)
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True, True]
    selection = select_training_rollouts([played], algorithm, max_new_tokens=8, demonstrations=[shown])
    batch = add_advantages(build_batch(selection.rollouts, temperature=1.0, max_new_tokens=8), selection, algorithm)
    *own, last = batch.samples
    assert last.expert and last.advantages is not None
    np.testing.assert_allclose(last.advantages, [0, 0, 0.75, 0.75, 0, 1.5, 1.5], rtol=1e-6)
    for one, sign in zip(own, (1, -1), strict=True):  # R - mean, discounted by the turns that follow
        assert one.advantages is not None
        np.testing.assert_allclose(one.advantages[[1, 4, 7]], [sign / 8, sign / 4, sign / 2], rtol=1e-6)


def test_anchor_rewards_that_were_replayed_are_of_the_episode_but_not_of_what_is_learnt() -> None:
    algorithm = AlgorithmConfig.model_validate({"type": "gi_gpo"})
    turns = tuple(replace(turn, reward=0.25) for turn in trajectory(4).turns)
    anchor = Anchor(trajectory=replace(trajectory(4), turns=turns), num_turns=2)
    played = group(True, anchor=anchor)
    won = replace(played.rollouts[0], reward=RewardResult(value=1.0, correct=True))
    selection = select_training_rollouts([replace(played, rollouts=(won,))], algorithm, max_new_tokens=8)
    (shaped,) = (*selection.trained_rollouts, *selection.untrained_rollouts)
    assert shaped.episode.total == 0.5 and shaped.training_reward == 0.5


# ---- what it is good for


class Plain:
    """A chat template of letters, which are tokens; 0 ends an answer."""

    drops_tool_results = False

    def render_text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        return "".join(f"{m.role[0]}:{m.text}\n" for m in messages) + "a:"

    def encode(self, text: str) -> EncodedText:
        return EncodedText(np.array([ord(letter) for letter in text], np.int32))

    def prompt(self, prompt: Prompt) -> EncodedText:
        return self.encode(self.render_text(prompt.messages, prompt.tools))

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return "".join(chr(token) for token in token_ids if token)

    def parse_answer(self, answer: IntArray, context: IntArray, stops: Any = ()) -> tuple[str, bool]:
        return self.decode(answer), bool(len(answer)) and answer[-1] == 0

    def encode_suffix(self, text: str, has_end_token: bool) -> EncodedText | None:
        return self.encode(text)

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return self.encode(f"\nu:{observation}\na:").token_ids


CODE = "badcabdc"


class Chain:
    """Eight right letters in a row, of four, earn 1; a wrong one ends the episode: chance finds them once in 65,536."""

    @asynccontextmanager
    async def open(self, settings: EnvironmentSettings) -> AsyncIterator[Chain]:
        self.place = 0
        yield Chain()

    async def store_images(self, result: Any, environment: str) -> Any:
        return result

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.place = 0
        return "0", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == CODE[self.place]
        self.place += 1
        return str(self.place), float(right and self.place == len(CODE)), not right, False, {}


class Table:
    """A policy of one distribution for each observation, which learns by REINFORCE with a group's mean as baseline."""

    def __init__(self) -> None:
        self.logits = np.zeros((len(CODE) + 1, 4))
        self.random = np.random.default_rng(0)

    async def generate(self, request: GenerationRequest) -> Generation:
        place = int("".join(map(chr, request.token_ids)).rpartition("u:")[2].partition("\n")[0])
        letter = self.random.choice(4, p=self.chances(place))
        return Generation(
            request_id=request.request_id,
            token_ids=np.array([ord("abcd"[letter]), 0], np.int32),
            logprobs=np.zeros(2, np.float32),
            policy_versions=np.zeros(2, np.int32),
            finish_reason="stop",
        )

    def chances(self, place: int) -> np.ndarray:
        weights = np.exp(self.logits[place])
        return weights / weights.sum()

    def learn(self, one: Group) -> None:
        rewards = np.array([r.reward.value for r in one.scored_rollouts if r.reward])
        for rollout, advantage in zip(one.scored_rollouts, rewards - rewards.mean(), strict=True):
            for turn, span in enumerate(rollout.turns, start=len(rollout.replayed)):
                letter = "abcd".index(chr(rollout.token_ids[span.start]))
                self.logits[turn] += 2.0 * advantage * (np.eye(4)[letter] - self.chances(turn))


async def trained(config: AgenticConfig, num_steps: int) -> tuple[Table, AgenticState]:
    """The pipeline's draws, its loop of episodes, and what it keeps; a table in place of model, engine and trainer."""
    renderer, policy, chain = Plain(), Table(), Chain()
    source = WeightedSource(domain="chain", items=EpisodeList(config.environments[0], "chain", 0, 1))
    stream = PromptStream([source], renderer.prompt, 0)

    async def played(draw: PromptDraw, index: int, generate: Any) -> Rollout:
        first = GenerationRequest(request_id="r", token_ids=draw.token_ids, sampling=SamplingParams(max_new_tokens=2))
        hosts: Any = chain
        rollout = await play_episode(draw, index, first, generate, renderer, hosts=hosts)
        total = sum(turn.reward for turn in (*rollout.replayed, *rollout.turns))
        return replace(rollout, reward=RewardResult(value=total, correct=total == 1))

    script = iter(CODE)

    async def expert(request: GenerationRequest) -> Generation:
        return replace(await policy.generate(request), token_ids=np.array([ord(next(script)), 0], np.int32))

    shown = await played(stream.redraw(-1, "chain", 0), 0, expert)
    episode = AnchorEpisode(
        domain="chain", position=0, trajectory=anchors.build_trajectory(shown), is_demonstration=True
    )
    state = AgenticState(episodes=(episode,))
    draws = EpisodeDraws(config=config, state=state, stream=stream)
    for _ in range(num_steps):
        groups = []
        for draw in draws.draw(2):
            rollouts = [await played(draw, index, policy.generate) for index in range(8)]
            groups.append(Group(draw=draw, rollouts=tuple(rollouts)))
            policy.learn(groups[-1])
        if config.anchors:
            anchors.update_anchors(config.anchors, state, groups, ())
    return policy, state


def success(policy: Table) -> float:
    """Exactly: the chance of all right letters, from the beginning."""
    return float(np.prod([policy.chances(place)["abcd".index(letter)] for place, letter in enumerate(CODE)]))


def chain_config(**changes: Any) -> AgenticConfig:
    base = {"pipeline": "agentic", "name": "x", "model": "m", "training": {"num_steps": 1}}
    environments = [{"environment": "chain", "num_turns": 8, "num_episodes": 1}]
    return AgenticConfig.model_validate({**base, "environments": environments, **changes})


@pytest.mark.parametrize("kind", ["rollback", "parallel"])
def test_anchor_a_chain_that_chance_never_ends_is_learnt_from_one_demonstration_without_imitation(kind: str) -> None:
    plain, _ = asyncio.run(trained(chain_config(), 60))
    assert success(plain) == pytest.approx(4.0**-8)  # no rollout ever succeeded, so nothing was learnt
    anchored = chain_config(anchors={"type": kind, "share": 0.75, "num_anchors": 7})
    policy, state = asyncio.run(trained(anchored, 60))
    assert success(policy) > 0.5
    assert state.episodes == () or kind == "parallel"


def test_anchors_that_could_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="anchors require num_turns >= 2, but every environment has num_turns 1"):
        chain_config(anchors={}, environments=[{"environment": "a"}])
    with pytest.raises(ValueError, match=r"not supported with a custom rollout\.loop"):
        chain_config(anchors={}, rollout={"loop": "mine:loop"})
    with pytest.raises(ValueError, match=r"rollout\.agent generates whole rollouts, so no environment would be used"):
        chain_config(rollout={"agent": {"function": "mine.py:agent"}})
    with pytest.raises(ValueError, match=r"algorithm\.imitation has no effect"):
        chain_config(algorithm={"imitation": {"weight": 0}})
    assert chain_config(anchors={}, algorithm={"imitation": {"weight": 0}}).has_demonstrations
