"""Select the part of a rollout's text that a reward scores."""

from __future__ import annotations

from roll.config.rewards.base import AUTO_REASONING, KEEP_REASONING
from roll.data.reasoning import extract_answer
from roll.types import Rollout

__all__ = ["NO_ANSWER", "get_scored_text"]

NO_ANSWER = "no answer"
"""Verdict on a rollout without text after its reasoning."""


def get_scored_text(rollout: Rollout, reasoning: str) -> str | None:
    """Return the part of the rollout's text that is scored.

    Return `None` if the reasoning never ends or, with `reasoning` set to `auto`, nothing follows it.

    Args:
        rollout: The rollout.
        reasoning: How to treat the model's reasoning, as in `RewardSection.reasoning`.
    """
    if reasoning == KEEP_REASONING:
        return rollout.text
    if reasoning == AUTO_REASONING:
        final = extract_answer(rollout.text) if rollout.final_text is None else rollout.final_text
        return final if final or not rollout.text else None
    _, closed, rest = rollout.text.rpartition(reasoning)
    begun = not closed and reasoning.replace("/", "", 1) in rollout.text
    return None if begun else rest
