"""Prompts for episodes in an environment, which defines the actual prompt when an episode begins."""

from __future__ import annotations

import json

from roll.config.data import EnvironmentData
from roll.data.conversations import build_messages
from roll.data.source import Fingerprint
from roll.types import Prompt

__all__ = ["EpisodeList", "build_environment_prompts"]


class EpisodeList:
    """A `Source` of prompts for `num_episodes` episodes from `first_episode` on, independent of the run's seed."""

    def __init__(self, config: EnvironmentData, domain: str, first_episode: int, num_episodes: int) -> None:
        self._config, self._domain, self._first_episode, self._num_episodes = (
            config,
            domain,
            first_episode,
            num_episodes,
        )
        digest = Fingerprint()
        label = (config.environment, config.options, config.wrappers, config.num_turns, config.build_settings(0).tools)
        asked = (config.system_prompt, config.prompt_template, domain, first_episode, num_episodes)
        digest.add([json.dumps([*label, *asked], sort_keys=True, default=repr)])
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._num_episodes

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._num_episodes:
            raise IndexError(index)
        config, episode = self._config, self._first_episode + index
        return Prompt(
            uid=f"{self._domain}/{episode}",
            domain=self._domain,
            messages=build_messages("", config.system_prompt, config.prompt_template),
            environment=config.build_settings(episode),
            turns=config.turns,
        )


def build_environment_prompts(config: EnvironmentData, domain: str, seed: int) -> tuple[EpisodeList, EpisodeList]:
    """Build prompts for the first `num_episodes` episodes (training) and the episodes after them (evaluation)."""
    del seed
    count = config.num_episodes
    return EpisodeList(config, domain, 0, count), EpisodeList(config, domain, count, config.num_held_out)
