"""What wrappers change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll.envs import ENVS, EnvWrapper, make, make_vec, register
from roll.envs.hosting import EnvHosts
from roll.envs.wrappers import (
    EpisodeTracking,
    FormatPenalty,
    ObservationHistory,
    TimeLimit,
    get_wrapper_functions,
    wrap,
)
from roll.errors import ConfigError
from roll.types import EnvironmentSettings


class Board:
    """Says what happened, with the board as a suffix, in GEM's way."""

    size = 3

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "Rules", {"suffix": "[0]"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"did {self.turn}", 0.5, False, False, {"suffix": f"[{self.turn}]"}

    def spawn(self, same_state: bool = False) -> Board:
        other = Board()
        other.turn = self.turn if same_state else 0
        return other


class Template:
    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def test_env_wrappers_histories_show_the_board_with_the_newest_observation_alone() -> None:
    env = ObservationHistory(Board(), actions=False)
    assert env.reset()[0] == "Rules\n[0]"
    assert env.step("up")[0] == "Rules\ndid 1\n[1]"
    env = ObservationHistory(Board())
    env.reset()
    env.step("up")
    assert env.step("down")[0] == "Rules\nup\ndid 1\ndown\ndid 2\n[2]"
    assert env.reset()[0] == "Rules\n[0]"


async def test_env_wrappers_hosts_show_the_board_once_with_or_without_a_history() -> None:
    register("mine:Board-v0", Board)
    register("mine:RememberedBoard-v0", lambda: ObservationHistory(Board()))
    try:
        seen = []
        for name in ("mine:Board-v0", "mine:RememberedBoard-v0"):
            async with EnvHosts().open(EnvironmentSettings(name=name, options={})) as env:
                seen += [(await env.reset())[0], (await env.step("up"))[0]]
    finally:
        del ENVS["mine:Board-v0"], ENVS["mine:RememberedBoard-v0"]
    assert seen == ["Rules[0]", "did 1[1]", "Rules\n[0]", "Rules\nup\ndid 1\n[1]"]


def test_env_wrappers_the_last_turns_alone_are_kept() -> None:
    env = ObservationHistory(Board(), last=1)
    env.reset()
    env.step("up")
    assert env.step("down")[0] == "did 1\ndown\ndid 2\n[2]"


def test_env_wrappers_chat_templates_are_written_around_all_turns_or_the_first() -> None:
    env = ObservationHistory(Board(), chat="always", tokenizer=Template())
    assert env.reset()[0] == "<user>Rules<assistant>[0]"
    assert env.step("up")[0] == "<user>Rules<assistant>up<user>did 1<assistant>[1]"
    env = ObservationHistory(Board(), chat="on_reset", tokenizer=Template())
    env.reset()
    assert env.step("up")[0] == "<user>Rules<assistant>\nup\ndid 1\n[1]"
    with pytest.raises(ConfigError, match="requires the model's tokenizer"):
        ObservationHistory(Board(), chat="always")


def test_env_wrappers_a_history_has_the_action_as_it_was_read() -> None:
    class Reads(Board):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            *stepped, info = super().step(action)
            return (*stepped, {**info, "parsed_action": action.partition("!")[0]})  # type: ignore[return-value]

    env = ObservationHistory(Reads())
    env.reset()
    assert env.step("up! and so on")[0] == "Rules\nup\ndid 1\n[1]"


def test_env_wrappers_turns_and_rewards_are_counted() -> None:
    env = EpisodeTracking(Board())
    env.reset()
    env.step("a")
    assert env.step("b")[4] == {"suffix": "[2]", "step_counter": 2, "cumulative_rewards": 1.0}
    assert env.reset()[1]["prev_ep_cumulative_rewards"] == 1.0
    assert env.step("a")[4] == {"suffix": "[1]", "step_counter": 1, "cumulative_rewards": 0.5}


def test_env_wrappers_a_time_limit_cuts_off() -> None:
    env = TimeLimit(Board(), max_turns=2)
    env.reset()
    assert [env.step("a")[3], env.step("a")[3]] == [False, True]
    env.reset()
    assert env.step("a")[3] is False
    env = TimeLimit(TimeLimit(Board(), max_turns=1), max_turns=2)
    env.reset()
    assert env.step("a")[3] is True


@pytest.mark.parametrize(
    ("action", "reward"),
    [("<a>x</a>", 0.5), ("x", 0.25), ("</a><a>", 0.25), ("<a><a></a>", 0.25), ("<a>" * 300_000, 0.25)],
)
def test_env_wrappers_a_missing_form_costs_its_penalty(action: str, reward: float) -> None:
    env = FormatPenalty(Board(), penalty=0.25, required=("<a>", "</a>"))
    env.reset()
    _, found, _, _, info = env.step(action)
    assert (found, info["well_formed"]) == (reward, reward == 0.5)


def test_env_wrappers_are_transparent_and_are_copied_with_what_they_hold() -> None:
    inner = Board()
    env = EpisodeTracking(ObservationHistory(inner, chat="always", tokenizer=Template()))
    assert env.size == 3 and env.unwrapped is inner
    env.reset()
    env.step("a")
    twin = env.spawn(same_state=True)
    assert twin.unwrapped is not inner and twin.env._tokenizer is env.env._tokenizer
    assert twin.step("b") == env.step("b")
    twin.step("c")
    assert env.step("c")[4]["step_counter"] == 3
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = env.nothing_like_it


def test_env_wrappers_work_around_coroutines() -> None:
    class Late(Board):
        async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
            return super().reset(seed)

        async def step(self, action: str) -> Any:  # type: ignore[override]
            return super().step(action)

    async def played() -> Any:
        env = EpisodeTracking(ObservationHistory(Late()))
        await env.reset()
        return await env.step("up")

    assert asyncio.run(played())[:2] == ("Rules\nup\ndid 1\n[1]", 0.5)


def test_env_wrappers_are_found_by_gems_names() -> None:
    wrappers = get_wrapper_functions("concat_with_action, episode_tracking")
    envs = make_vec("game:GuessTheNumber-v0-easy", wrappers=wrappers)
    observations, infos = envs.reset()
    assert infos[0]["step_counter"] == 0
    assert envs.step(["\\boxed{11}"])[0][0].startswith(observations[0])
    with pytest.raises(ConfigError, match=r"unknown wrapper 'concatt'\. Did you mean 'concat'"):
        get_wrapper_functions("concatt")
    with pytest.raises(ConfigError, match="tokenizer"):
        get_wrapper_functions("concat_chat")
    with pytest.raises(ConfigError, match="must be the name of one wrapper"):
        wrap(Board(), "concat,episode_tracking", {})


def test_env_wrappers_a_wrapper_that_overrides_step_as_gems_do_works() -> None:
    class Loud(EnvWrapper):
        def step(self, action: str) -> Any:
            observation, *rest = self.env.step(action.lower())
            return (observation.upper(), *rest)

    env = Loud(make("guess_number", secret=1))
    env.reset()
    assert env.step("1")[:2] == ("RIGHT!", 1.0)
