"""Wrappers that change an environment's observations, `info` or rewards.

make_vec("game:Sokoban-v0-easy", wrappers=get_wrapper_functions("concat_with_action,episode_tracking"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from roll.envs.wrappers.episode import EpisodeTracking, TimeLimit
from roll.envs.wrappers.format_penalty import FormatPenalty
from roll.envs.wrappers.history import ObservationHistory
from roll.errors import ConfigError, DataError
from roll.registry import did_you_mean

__all__ = [
    "WRAPPERS",
    "EpisodeTracking",
    "FormatPenalty",
    "ObservationHistory",
    "TimeLimit",
    "get_wrapper_functions",
    "wrap",
]

WRAPPERS: dict[str, Callable[..., Any]] = {
    "concat": partial(ObservationHistory, actions=False),
    "concat_with_action": ObservationHistory,
    "concat_chat": partial(ObservationHistory, chat="always"),
    "concat_chat_on_reset": partial(ObservationHistory, chat="on_reset"),
    "episode_tracking": EpisodeTracking,
    "time_limit": TimeLimit,
    "format_penalty": FormatPenalty,
}
"""GEM's wrappers by their names in GEM, and a few more."""

_NEED_TOKENIZER = ("concat_chat", "concat_chat_on_reset")


def wrap(env: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return an environment with one wrapper around it.

    Raises:
        ConfigError: The wrapper does not exist.
        DataError: The wrapper rejects its options.
    """
    functions = get_wrapper_functions(name)
    if len(functions) != 1:
        raise ConfigError(f"'{name}' must be the name of one wrapper: list several wrappers separately.")
    (function,) = functions
    try:
        return function(env, **options)
    except (TypeError, ValueError) as error:
        raise DataError(f"wrapper '{name}' rejected the options {dict(options)}: {error}") from error


def get_wrapper_functions(names: str, tokenizer: Any = None) -> list[Callable[[Any], Any]]:
    """Return wrappers by name, in the order in which to apply them.

    Args:
        names: Names separated by commas, such as `concat_with_action,episode_tracking`.
        tokenizer: The model's tokenizer, for wrappers that apply its chat template.

    Raises:
        ConfigError: A name is unknown, or the tokenizer is missing.
    """
    functions: list[Callable[[Any], Any]] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in WRAPPERS:
            raise ConfigError(
                f"unknown wrapper '{name}'.{did_you_mean(name, list(WRAPPERS))} Known: {', '.join(WRAPPERS)}."
            )
        if name in _NEED_TOKENIZER:
            if tokenizer is None:
                raise ConfigError(
                    f"wrapper '{name}' requires the model's tokenizer to apply the chat template: pass the tokenizer."
                )
            functions.append(partial(WRAPPERS[name], tokenizer=tokenizer))
        else:
            functions.append(WRAPPERS[name])
    return functions
