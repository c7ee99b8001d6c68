"""How long an episode can become, in tokens: known before the first one is played, so that engines keep room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.config.data import DataConfig
from roll.envs.registration import make
from roll.errors import ConfigError

if TYPE_CHECKING:
    from roll.data import ChatRenderer

__all__ = ["longest_rollout"]


def longest_rollout(entries: Sequence[DataConfig], max_new_tokens: int, renderer: ChatRenderer, context: int) -> int:
    """Most tokens that can follow a prompt of any source: K answers, and what the environment says between them.

    A text counts as many tokens as it has bytes, which no tokenizer exceeds: longer texts may well have fewer tokens.

    Args:
        entries: the sources.
        max_new_tokens: of an answer.
        renderer: how the model's chat template goes on after an answer.
        context: tokens of prompt and rollout together, at most.

    Raises:
        ConfigError: the context has no room for a prompt beside them.
    """
    longest = max(
        max_new_tokens * entry.turns + _between_answers(entry, renderer) * (entry.turns - 1) for entry in entries
    )
    if longest >= context:
        turns = max(entry.turns for entry in entries)
        raise ConfigError(
            f"a context of {context} tokens leaves no room for prompts: a rollout has up to {turns} answer(s) of "
            f"{max_new_tokens}, with what the environment says between them {longest}. Raise inference.max_context "
            "(where the model allows it), or lower rollout.max_new_tokens or the number of turns."
        )
    return longest


def _between_answers(entry: DataConfig, renderer: ChatRenderer) -> int:
    if entry.environment_call is None or entry.turns == 1:
        return 0
    longest = getattr(make(*entry.environment_call), "longest_observation", None)
    if not isinstance(longest, str):
        raise ConfigError(
            f"environment '{entry.environment_call[0]}' does not say how long its observations are: give it a property "
            "`longest_observation`, a text at least as long as any that `step` returns, for which engines keep room."
        )
    return len(renderer.follow_up("")) + len(longest.encode())
