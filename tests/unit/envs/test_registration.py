"""Environments by name, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.envs import ENVS, make, make_vec, register
from roll.envs.registration import ADAPTER_PATHS
from roll.errors import ConfigError, DataError

OWN = """
class Echo:
    def __init__(self, word="hm", **_):
        self.word = word
    def reset(self, seed=None):
        return self.word, {}
    def step(self, action):
        return action, 1.0, True, False, {}
class Half:
    def reset(self, seed=None): ...
def built(word="fn", **options):
    return Echo(word)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mazes.py").write_text(OWN)
    return str(tmp_path / "mazes.py")


def test_env_registration_a_users_class_or_function_in_a_file_is_an_environment(own: str) -> None:
    assert make(f"{own}:Echo", word="well").reset(seed=3)[0] == "well"
    assert make(f"{own}:Echo", {"word": "a"}, word="b").word == "b"
    assert make(f"{own}:built", word="x", colour=3).word == "x"  # a function that forwards options may take any


def test_env_registration_a_class_without_step_is_refused_with_the_way_out(own: str) -> None:
    with pytest.raises(ConfigError, match=r"has no method 'step': implement `reset\(seed\)` and `step\(action\)`"):
        make(f"{own}:Half")


def test_env_registration_misspelt_arguments_are_refused_also_where_the_class_would_swallow_them(own: str) -> None:
    with pytest.raises(DataError, match=r"no argument 'wrod'. Did you mean 'word'\? Supported arguments: word"):
        make(f"{own}:Echo", wrod="x")
    with pytest.raises(DataError, match=r"no argument 'max_turn'. Did you mean 'max_turns'\?.*min_number"):
        make("game:GuessTheNumber-v0-easy", max_turn=3)


def test_env_registration_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'game:GuessTheNumber-v0-easy' or"):
        make("game:GuesTheNumber-v0-easy")
    with pytest.raises(ConfigError, match=r"unknown environment 'nonsense'\. `roll env list`"):
        make("nonsense")
    with pytest.raises(ConfigError, match="no_such_package"):
        make("no_such_package:Env")


def test_env_registration_registered_arguments_give_way_to_those_of_make() -> None:
    env = make("game:GuessTheNumber-v0-easy", max_number=20)
    assert (env.min_number, env.max_number, env.max_turns) == (1, 20, 4)
    assert env.env_id == "game:GuessTheNumber-v0-easy"
    with pytest.raises(DataError, match=r"max_number must be greater than min_number, got 0 and 1"):
        make("game:GuessTheNumber-v0-easy", max_number=0)


def test_env_registration_a_name_belongs_to_one_environment() -> None:
    try:
        for _ in range(2):  # the same again changes nothing
            register("mine:Number-v0", "roll.envs.games.guess_the_number:GuessTheNumber", max_turns=9)
        assert make("mine:Number-v0").max_turns == 9
        with pytest.raises(ConfigError, match=r"is registered as roll\.envs\.games\.guess_the_number:GuessTheNumber"):
            register("mine:Number-v0", "roll.envs.games.guess_the_number:GuessTheNumber")
    finally:
        ENVS.pop("mine:Number-v0", None)


def test_env_registration_a_family_builds_by_what_stands_behind_its_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTER_PATHS, "letters", "collections:Counter")
    assert make("letters:aab", c=3) == {"a": 2, "b": 1, "c": 3}


def test_env_registration_vectors_take_arguments_for_all_and_for_each() -> None:
    envs = make_vec(["game:GuessTheNumber-v0-easy"] * 2, vec_kwargs=[{}, {"max_turns": 2}], max_number=12)
    assert [(env.max_number, env.max_turns) for env in envs.envs] == [(12, 4), (12, 2)]
    with pytest.raises(DataError, match="vec_kwargs has 1 entries for 2 environments"):
        make_vec(["guess_number"] * 2, vec_kwargs=[{}])


def test_env_registration_an_environment_with_slots_can_be_made() -> None:
    class Tight:
        __slots__ = ()

        def reset(self, seed: int | None = None) -> Any:
            return "", {}

        def step(self, action: str) -> Any:
            return "", 0.0, True, False, {}

    register("mine:Tight-v0", Tight)
    try:
        assert make("mine:Tight-v0").reset() == ("", {})
    finally:
        ENVS.pop("mine:Tight-v0")
