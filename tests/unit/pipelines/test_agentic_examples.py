"""The agentic examples: what a model is first shown is what it is asked later."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from roll.config.data import EnvironmentData
from roll.config.load import load_config
from roll.data.environment import EpisodeList
from roll.envs import make
from roll.envs.tools import with_tools
from roll.user_code import load_function

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["guess", "calculator", "lake"])
def test_agentic_examples_the_first_run_shows_episodes_as_the_second_one_asks_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    first: Any = load_config(EXAMPLES / f"agentic_{name}_first.yaml")
    second: Any = load_config(EXAMPLES / f"agentic_{name}.yaml")
    assert second.model.path == f"runs/{first.name}"
    entry: EnvironmentData = second.environments[0]
    options = first.data[0].options
    shown = list(itertools.islice(load_function(first.data[0].function, "function")(**options), 40))
    stepwise = entry.history is not None
    for number, example in enumerate(shown):
        roles = [message["role"] for message in example["messages"]]
        later = ["tool" if entry.tools else "user", "assistant"] * (0 if stepwise else entry.num_turns - 1)
        turns = ["user", "assistant", *later]
        assert roles == ["system", *turns[: len(roles) - 1]]
        assert example["messages"][0]["content"] == entry.system_prompt
        if not stepwise:
            env = make(entry.environment, entry.options)
            if entry.tools:
                env = with_tools(env, ["calculator"], tool_format=entry.tool_calls.format)
            assert env.reset(seed=1_000_000 + number)[0] == example["messages"][1]["content"]
    asked = EpisodeList(entry, "d", 0, 1)[0].messages[:-1]
    assert [message.to_dict() for message in asked] == shown[0]["messages"][:1]


def test_agentic_examples_the_calculators_player_is_right_in_about_a_third_of_its_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    first: Any = load_config(EXAMPLES / "agentic_calculator_first.yaml")
    entry: Any = load_config(EXAMPLES / "agentic_calculator.yaml").environments[0]  # type: ignore[attr-defined]
    episodes = list(load_function(first.data[0].function, "function")(**{**first.data[0].options, "count": 300}))
    won = 0.0
    for number, example in enumerate(episodes):
        env = make(entry.environment, entry.options)
        env.reset(seed=1_000_000 + number)
        won += env.step(example["messages"][-1]["content"])[1] == 1
    assert 0.25 < won / 300 < 0.45
