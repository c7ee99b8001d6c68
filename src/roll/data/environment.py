"""Prompts for episodes in an environment, which defines the actual prompt when an episode begins."""

from __future__ import annotations

import json

from roll.config.data import EnvironmentData
from roll.data.conversations import build_messages
from roll.data.source import Fingerprint
from roll.types import Prompt

__all__ = ["EpisodeList", "build_environment_prompts"]


class EpisodeList:
    """A `Source` of prompts for the episodes `first` to `first + count - 1`, independent of the run's seed."""

    def __init__(self, config: EnvironmentData, domain: str, first: int, count: int) -> None:
        self._config, self._domain, self._first, self._count = config, domain, first, count
        digest = Fingerprint()
        label = (config.environment, config.options, config.wrappers, config.num_turns, config.build_settings(0).tools)
        asked = (config.system_prompt, config.prompt_template, domain, first, count)
        digest.add([json.dumps([*label, *asked], sort_keys=True, default=repr)])
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._count:
            raise IndexError(index)
        config, episode = self._config, self._first + index
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
