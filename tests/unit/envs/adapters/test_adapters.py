"""Environments of other libraries, with the real packages where they are installed."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from roll.envs.adapters import ADAPTERS
from roll.envs.adapters.packages import RandomState, import_package
from roll.envs.registration import make
from roll.errors import ConfigError, DataError

LONG = ["[" * 5_000, "9" * 5_000, "x" * 100_000]
HOSTILE = [*LONG, "", "\\boxed{", "\\boxed{}", "null", "\ud800", "\0", "\\boxed{1e999}"]


def played(env: Any, seed: int, most: int = 30) -> list[Any]:
    seen: list[Any] = [env.reset(seed)[0]]
    for _ in range(most):
        action = env.sample_random_action()
        step = env.step(action)
        seen.append((action, *step[:4]))
        if step[2] or step[3]:
            break
    return seen


def unmoved(env: Any) -> None:
    for text in HOSTILE:
        env.reset(0)
        observation, reward, *_ = env.step(text)
        assert isinstance(observation, str)
        assert reward <= 0.0


@pytest.mark.parametrize("family", sorted(ADAPTERS))
def test_env_adapters_a_missing_package_is_named_with_the_way_to_install_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"gym": "gymnasium", "rg": "reasoning_gym"}.get(family, family)
    for loaded in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    way = "pip cannot install it together with ROLL" if family == "verifiers" else "pip install '"
    with pytest.raises(ConfigError, match=rf"requires the package '[^']+': {way}"):
        make(f"{family}:anything")


def test_env_adapters_environments_keep_their_random_numbers_to_themselves() -> None:
    one, two = RandomState(), RandomState()
    one.seed(1)
    two.seed(1)
    random.seed(5)
    np.random.seed(5)
    expected = random.Random(5).random()
    with one.activate():
        first = [random.random(), np.random.rand()]
    with two.activate():
        assert [random.random(), np.random.rand()] == first
    with one.activate():
        assert [random.random(), np.random.rand()] != first
    assert random.random() == expected
    assert import_package("json", "json", "x").loads("1") == 1


def test_env_adapters_reasoning_gym_asks_and_scores_by_the_task_itself() -> None:
    env = make("rg:leg_counting", size=20)
    for seed in range(20):
        env.reset(seed)
        assert env.step(env.solution())[1:4] == (1.0, True, False)
    assert env.reset(3) == env.spawn().reset(23)
    assert env.step("I do not know")[1] == -0.1
    unmoved(env)
    with pytest.raises(DataError, match=r"Did you mean 'leg_counting'"):
        make("rg:leg_count")


def test_env_adapters_gymnasium_draws_text_and_takes_names_and_numbers() -> None:
    pytest.importorskip("gymnasium")
    env = make("gym:FrozenLake-v1", is_slippery=False)
    observation, info = env.reset(0)
    assert observation.startswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert "left, down, right, up" in observation
    assert info["state"] == "0"
    for action in ("down", "\\boxed{1}", "<answer>Right</answer>", "right", "1", "right"):
        _, reward, ended, *_, info = env.step(action)
    assert (reward, ended, info["state"]) == (1.0, True, "15")
    unmoved(env)
    slippery = make("gym:FrozenLake-v1")
    assert played(slippery, 7) == played(make("gym:FrozenLake-v1"), 7)
    values = make("gym:Pendulum-v1")
    assert played(values, 1) == played(make("gym:Pendulum-v1"), 1)
    values.reset(0)
    assert values.step("[0.5]")[1] != -0.1
    assert values.step("[9.5]")[1] == -0.1, "outside of the space"
    assert "2" in make("gym:Taxi-v4", observation="value").reset(2)[0]
    with pytest.raises(ConfigError, match="gym:FrozenLak-v1"):
        make("gym:FrozenLak-v1")
    with pytest.raises(ConfigError, match="one name each"):
        make("gym:FrozenLake-v1", actions=["a"])
    with pytest.raises(ConfigError, match="slippery"):
        make("gym:FrozenLake-v1", slippery=True)


def test_env_adapters_gems_environments_pass_through_with_their_own_random_numbers() -> None:
    gem = pytest.importorskip("gem")
    random.seed(3)
    expected = random.Random(3).random()
    env, other = make("gem:game:GuessTheNumber-v0-easy"), make("gem:game:GuessTheNumber-v0-easy")
    episode = played(env, 4)
    assert random.random() == expected, "the process's generator is untouched"
    assert played(other, 4) == episode
    both = [make("gem:game:Mastermind-v0-easy") for _ in range(2)]
    alone = played(both[0], 1)
    both[0].reset(1)
    both[1].reset(1)  # while another episode goes on
    assert [both[1].reset(1)[0], *[(a, *both[1].step(a)[:4]) for a, *_ in alone[1:]]] == alone
    assert isinstance(env.unwrapped, gem.Env)
    unmoved(env)
    with pytest.raises(ConfigError, match=r"not found.* Did you mean 'game:Guess"):
        make("gem:game:GuesTheNumber-v0-easy")


def first_move(seen: str) -> str:
    return "[0 1]"


def test_env_adapters_textarenas_games_are_played_alone_or_against_a_function() -> None:
    pytest.importorskip("textarena")
    env = make("textarena:GuessTheNumber-v0")
    observation, _ = env.reset(1)
    assert "number" in observation
    assert played(env, 5) == played(make("textarena:GuessTheNumber-v0"), 5)
    env.reset(2)
    for guess in range(1, 21):
        _, reward, ended, *_ = env.step(f"[{guess}]")
        if ended:
            break
    assert ended
    duel = make("textarena:Nim-v0", num_players=2, opponent=first_move)
    for seed in range(4):
        duel.reset(seed)
        for _ in range(40):
            _, reward, ended, *_ = duel.step("[0 1]")
            if ended:
                break
        assert ended
        assert -1.0 <= reward <= 1.0
    for text in HOSTILE:
        env.reset(0)
        assert isinstance(env.step(text)[0], str)
    with pytest.raises(ConfigError, match="requires an `opponent`"):
        make("textarena:Nim-v0", num_players=2)
    with pytest.raises(ConfigError, match=r"no game 'Nimm-v0'"):
        make("textarena:Nimm-v0")
