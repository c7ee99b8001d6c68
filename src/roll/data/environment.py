"""Episodes in an environment of the user's own: its first observation is the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.config.data import EnvironmentData
from roll.data.rows import messages_of
from roll.data.source import PromptList
from roll.errors import DataError
from roll.registry import load_function
from roll.types import EnvironmentSettings, Prompt

__all__ = ["environment_prompts"]


def environment_prompts(config: EnvironmentData, domain: str, seed: int) -> tuple[PromptList, PromptList]:
    """Episodes 0, 1, … to train on, and the ones after them for evaluation; a run's seed shifts none of them.

    Raises:
        ConfigError: the class cannot be imported.
        DataError: it refuses its options, or an episode does not begin.
    """
    del seed
    kind = load_function(config.environment, "environment")
    count = config.num_episodes
    training = (_prompt(kind, config, domain, episode) for episode in range(count))
    held_out = (_prompt(kind, config, domain, episode) for episode in range(count, count + config.num_held_out))
    return PromptList(training), PromptList(held_out)


def _prompt(kind: Callable[..., Any], config: EnvironmentData, domain: str, episode: int) -> Prompt:
    try:
        observation, _ = kind(**config.options).reset(seed=episode)
    except Exception as error:  # the user's code may fail with anything
        raise DataError(
            f"environment '{config.environment}' does not begin episode {episode}: {type(error).__name__}: {error}. "
            "Its `reset(seed)` returns the first observation and a dictionary."
        ) from error
    if not isinstance(observation, str) or not observation.strip():
        raise DataError(
            f"environment '{config.environment}' begins episode {episode} with {observation!r}: the first observation "
            "is the prompt, a text."
        )
    return Prompt(
        uid=f"{domain}/{episode}",
        domain=domain,
        messages=messages_of(observation, config.system_prompt, config.prompt_template),
        environment=EnvironmentSettings(name=config.environment, options=config.options, seed=episode),
        turns=config.turns,
    )
