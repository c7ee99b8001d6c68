"""The part of a rollout's text that a reward scores."""

from __future__ import annotations

from roll.config.rewards.base import AUTO, KEEP
from roll.data.reasoning import answer_of
from roll.types import Rollout

__all__ = ["NO_ANSWER", "scored_text"]

NO_ANSWER = "no answer"
"""Verdict on a rollout without text after its reasoning."""


def scored_text(rollout: Rollout, reasoning: str) -> str | None:
    """Return the part of the rollout's text that is scored; `None` if its reasoning never ends.

    Args:
        rollout: The rollout.
        reasoning: See `RewardSection.reasoning`.
    """
    if reasoning == KEEP:
        return rollout.text
    if reasoning == AUTO:
        final = answer_of(rollout.text) if rollout.final_text is None else rollout.final_text
        return final if final or not rollout.text else None
    _, closed, rest = rollout.text.rpartition(reasoning)
    begun = not closed and reasoning.replace("/", "", 1) in rollout.text
    return None if begun else rest
