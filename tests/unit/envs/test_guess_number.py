"""The guessing game."""

from __future__ import annotations

import pytest

from roll.envs import make
from roll.errors import ConfigError, DataError


def test_env_guess_number_hints_lead_to_the_secret() -> None:
    env = make("guess_number", {"max_number": 5, "num_turns": 3, "secret": 4})
    observation, info = env.reset()
    assert (observation, info) == ("Pick one: 1, 2, 3, 4 or 5. Answer with a number.", {"state": "start"})
    higher, lower = (f"No, my number is {hint}. {observation}" for hint in ("higher than 2", "lower than 5"))
    assert env.step("I say 2.") == (higher, 0.0, False, False, {"state": "2 higher"})
    assert env.step("5") == (lower, 0.0, False, False, {"state": "2 higher, 5 lower"})
    assert env.step("4") == ("Right!", 1.0, True, False, {"state": "won"})


def test_env_guess_number_the_last_turn_ends_the_episode_without_a_reward() -> None:
    env = make("guess_number", {"max_number": 3, "num_turns": 1, "secret": 3})
    env.reset()
    _, reward, ended, cut_off, _ = env.step("1")
    assert (reward, ended, cut_off) == (0.0, True, False)


def test_env_guess_number_an_action_without_a_number_costs_its_turn() -> None:
    env = make("guess_number", {"max_number": 3, "num_turns": 2, "secret": 3})
    env.reset()
    observation, reward, ended, _, info = env.step("well")
    assert (observation, reward, ended, info["state"]) == (
        "That is not a number. Pick one: 1, 2 or 3. Answer with a number.",
        0.0,
        False,
        "?",
    )


def test_env_guess_number_a_seed_gives_the_same_secret_again() -> None:
    def secret(seed: int) -> list[float]:
        env = make("guess_number", {"max_number": 9, "num_turns": 9})
        env.reset(seed)
        return [env.step(str(guess))[1] for guess in range(1, 10)]

    assert secret(5) == secret(5)
    assert len({tuple(secret(seed)) for seed in range(20)}) > 1


def test_env_guess_number_wrong_options_and_names_are_refused() -> None:
    with pytest.raises(DataError, match="secret must be from 1 to 3, got 9"):
        make("guess_number", {"max_number": 3, "secret": 9})
    with pytest.raises(
        DataError, match=r"has no argument 'colour'\. Supported arguments: max_number, num_turns, secret\."
    ):
        make("guess_number", {"colour": 1})
    with pytest.raises(ConfigError, match="Did you mean 'guess_number'"):
        make("guess_numbr", {})


def test_env_guess_number_many_numbers_are_not_listed() -> None:
    assert make("guess_number", {"max_number": 50}).reset()[0] == "Pick a number from 1 to 50. Answer with a number."
