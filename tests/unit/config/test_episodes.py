"""Settings of conversations with an environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from roll.config.episodes import HistoryConfig
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.scheduling import SchedulingConfig
from roll.types import History


def run(**rollout: Any) -> RLVRConfig:
    game = {"source": "guess_number", "max_number": 3, "num_turns": 3}
    data = [game, {"source": "arithmetic", "reward": "math"}]
    return RLVRConfig.model_validate(
        {"name": "x", "model": "m", "training": {"num_steps": 1}, "data": data, "rollout": rollout}
    )


def test_config_episodes_engines_keep_room_for_all_answers_and_an_observation_between_each_two() -> None:
    assert run(max_new_tokens=10).max_rollout_tokens == 3 * 10 + 2 * 512
    assert run(max_new_tokens=10, episodes={"observation_tokens": 7}).max_rollout_tokens == 3 * 10 + 2 * 7


def test_config_episodes_a_history_is_what_the_loop_takes() -> None:
    assert HistoryConfig(type="window", num_turns=2).settings == History(
        kind="window", turns=2, summary_request=HistoryConfig().summary_request
    )


def test_config_episodes_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="`type: window` requires num_turns"):
        HistoryConfig(type="window")
    with pytest.raises(ValidationError, match="only with `type: window`, got type full"):
        HistoryConfig(num_turns=2)
    with pytest.raises(ValidationError, match="restart` requires `pause_mode: abort`, got keep"):
        SchedulingConfig(interrupted_turns="restart")
    assert SchedulingConfig(interrupted_turns="restart", pause_mode="abort").interrupted_turns == "restart"
