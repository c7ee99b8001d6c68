"""Every id without a sandbox: solved by who knows how, survived by chance, repeated by its seed, unmoved by malice."""

from __future__ import annotations

import inspect
from random import Random
from typing import Any

import pytest

from roll.envs.conformance import check
from roll.envs.registration import make
from roll.envs.worlds import WORLDS
from roll.errors import DataError

SANDBOXED = ("code:", "terminal:")
IDS = [name for name in WORLDS if not name.startswith(SANDBOXED)]
HOSTILE = [
    *(
        "",
        " ",
        "\0",
        "\ud800",
        "\\boxed{",
        "\\boxed{" * 5_000,
        "{" * 10_000,
        "\\boxed{}",
        "\\boxed{" + "9" * 9_000 + "}",
    ),
    *(
        "<answer>",
        "<search>",
        "<search></search>",
        "search[",
        "click[]",
        "search[]",
        "click[" * 5_000,
        "go to",
        "book(",
    ),
    *("book(=)", "book(a=" * 5_000, "take nothing from nowhere", "é" * 10_000, "\n" * 10_000, "\\boxed{1/0}", "٣" * 50),
    *("\\boxed{-}", "\\boxed{1-0}", "\\boxed{9-9}", "[TOOL_CALLS]", "<tool_call>", "{}" * 9_000, "x" * 300_000),
]


def solved(env: Any, seed: int) -> float:
    """The reward of one who knows: a list of actions given at the start, or an action asked for at every turn."""
    env.reset(seed)
    inner = env.unwrapped
    actions = inner.solution()
    total, ended = 0.0, False
    for turn in range(100):
        action = actions[turn] if isinstance(actions, list) else inner.solution()
        _, reward, ended, cut_off, _ = env.step(action)
        total += reward
        if ended or cut_off:
            break
    assert ended
    return total


@pytest.mark.parametrize("name", [name for name in IDS if not name.startswith("duel:")])
def test_env_worlds_one_who_knows_how_succeeds_on_a_hundred_seeds(name: str) -> None:
    env = make(name)
    assert [solved(env, seed) for seed in range(100)] == [1.0] * 100


@pytest.mark.parametrize(
    ("name", "least", "never_loses"), [("duel:Nim-v0", 0.9, False), ("duel:TicTacToe-v0", 0.9, True)]
)
def test_env_worlds_an_expert_beats_chance(name: str, least: float, never_loses: bool) -> None:
    env = make(name)
    rewards = [solved(env, seed) for seed in range(100)]
    assert sum(reward == 1.0 for reward in rewards) >= 100 * least * 0.9
    assert not never_loses or min(rewards) >= 0


def episode(env: Any, seed: int, most: int = 60) -> list[Any]:
    """An episode of random actions."""
    seen: list[Any] = [env.reset(seed)]
    for _ in range(most):
        action = env.sample_random_action()
        seen.append((action, env.step(action)))
        if seen[-1][1][2] or seen[-1][1][3]:
            break
    return seen


@pytest.mark.parametrize("name", IDS)
def test_env_worlds_chance_survives_and_equal_seeds_are_equal_episodes(name: str) -> None:
    env, other = make(name), make(name)
    for seed in range(60):
        seen = episode(env, seed)
        for observation, reward, ended, cut_off, info in (step for _, step in seen[1:]):
            assert isinstance(observation, str | tuple)
            assert -1.0 <= reward <= 1.0
            assert isinstance(ended, bool)
            assert isinstance(cut_off, bool)
            assert isinstance(info["state"], str)
        assert episode(other, seed) == seen
    assert len({str(episode(env, seed)) for seed in range(20)}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", IDS)
def test_env_worlds_chance_survives_a_thousand_episodes(name: str) -> None:
    env = make(name)
    for seed in range(1_000):
        episode(env, seed)


@pytest.mark.parametrize("name", IDS)
def test_env_worlds_hostile_actions_cost_a_format_reward_and_never_raise(name: str) -> None:
    env = make(name)
    random = Random(0)
    for number, text in enumerate(HOSTILE):
        env.reset(number)
        for _ in range(3):
            observation, reward, ended, cut_off, _ = env.step(text)
            assert reward <= 0.0 or name.startswith("duel:")
            assert len(observation) < 20_000
            if ended or cut_off:
                break
            env.step("".join(random.choices(HOSTILE[:4] + list("\\{}[]()<>=,:ab1"), k=30)))
            env.reset(number)


@pytest.mark.parametrize("name", IDS)
def test_env_worlds_another_one_is_spawned_fresh_or_in_the_same_state(name: str) -> None:
    env = make(name).unwrapped
    env.reset(5)
    twin = env.spawn(same_state=True)
    action = env.sample_random_action()
    twin.sample_random_action()
    assert twin.step(action) == env.step(action)
    with pytest.raises(ValueError, match="same_state and options cannot be combined"):
        env.spawn(same_state=True, size=3)
    fresh = env.spawn()
    assert type(fresh) is type(env)
    assert fresh.reset(5) == env.reset(5)


@pytest.mark.parametrize("name", IDS)
def test_env_worlds_the_rules_of_environments_are_kept(name: str) -> None:
    assert [str(finding) for finding in check(name, num_seeds=2) if finding.fatal] == []


def test_env_worlds_unknown_options_are_refused() -> None:
    for name in WORLDS:
        with pytest.raises(DataError, match="has no argument 'no_such_option'"):
            make(name, no_such_option=1)


def test_env_worlds_no_world_waits_without_need() -> None:
    for name in IDS:
        env = make(name)
        assert not inspect.isawaitable(env.reset(0))
