"""The few rollouts of a step that a tracker shows: the best, the worst, and some in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roll.tracking.sinks.base import RolloutTable
from roll.tracking.visible import shorten

if TYPE_CHECKING:
    from roll.types import Group, Rollout

__all__ = ["rollout_table"]

CELL_CHARACTERS = 2000
COLUMNS = (
    "step", "rollout", "domain", "prompt", "text", "answer", "reward", "advantage", "verdict", "correct",
    "num_tokens", "finish_reason", "status",
)  # fmt: skip


def rollout_table(
    name: str, step: int, groups: Sequence[Group], advantages: Mapping[str, float] | None, num_rows: int
) -> RolloutTable:
    """Return at most `num_rows` rollouts, evenly spaced from the highest reward to the lowest; unscored ones last."""
    rollouts = sorted(
        (rollout for group in groups for rollout in group.rollouts),
        key=lambda rollout: (rollout.reward is None, -rollout.reward.value if rollout.reward else 0.0),
    )
    count = min(num_rows, len(rollouts))
    places = [i * (len(rollouts) - 1) // max(1, count - 1) for i in range(count)]
    rows = tuple(_row(step, rollouts[place], advantages or {}) for place in places)
    return RolloutTable(name=name, columns=COLUMNS, rows=rows)


def _row(step: int, rollout: Rollout, advantages: Mapping[str, float]) -> tuple[str | float | None, ...]:
    prompt, reward = rollout.prompt, rollout.reward

    def cell(text: str) -> str:
        return shorten(text, CELL_CHARACTERS)

    return (
        step,
        rollout.sample_id,
        cell(prompt.domain),
        cell(prompt.asked[-1].text if prompt.messages else prompt.uid),
        cell(rollout.text),
        cell(prompt.answer),
        reward.value if reward else None,
        advantages.get(rollout.sample_id),
        cell(reward.verdict if reward else rollout.cause),
        None if reward is None or reward.correct is None else float(reward.correct),
        len(rollout.token_ids),
        rollout.finish_reason,
        str(rollout.status),
    )
