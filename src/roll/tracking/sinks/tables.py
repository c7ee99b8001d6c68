"""Select a few rollouts of a step for trackers: the best, the worst, and some in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from roll.tracking.escape import shorten
from roll.tracking.sinks.base import RolloutTable
from roll.types import describe_content

if TYPE_CHECKING:
    from roll.types import Group, Rollout

__all__ = ["build_rollout_table"]

MAX_CELL_CHARACTERS = 2000
COLUMNS = (
    "step", "rollout", "domain", "prompt", "text", "answer", "reward", "advantage", "verdict", "correct",
    "num_tokens", "finish_reason", "status",
)  # fmt: skip


def build_rollout_table(
    name: str, step: int, groups: Sequence[Group], advantages: Mapping[str, float] | None, num_rows: int
) -> RolloutTable:
    """Return a table of at most `num_rows` rollouts, evenly spaced from the highest reward to the lowest.

    Rollouts without a reward are last.
    """
    rollouts = sorted(
        (rollout for group in groups for rollout in group.rollouts),
        key=lambda rollout: (rollout.reward is None, -rollout.reward.value if rollout.reward else 0.0),
    )
    count = min(num_rows, len(rollouts))
    places = [i * (len(rollouts) - 1) // max(1, count - 1) for i in range(count)]
    rows = tuple(_build_row(step, rollouts[place], advantages or {}) for place in places)
    return RolloutTable(name=name, columns=COLUMNS, rows=rows)


def _build_row(step: int, rollout: Rollout, advantages: Mapping[str, float]) -> tuple[str | float | None, ...]:
    prompt, reward = rollout.prompt, rollout.reward

    def format_cell(text: str) -> str:
        return shorten(text, MAX_CELL_CHARACTERS)

    return (
        step,
        rollout.sample_id,
        format_cell(prompt.domain),
        format_cell(describe_content(prompt.input_messages[-1].content) if prompt.messages else prompt.uid),
        format_cell(rollout.text),
        format_cell(prompt.answer),
        reward.value if reward else None,
        advantages.get(rollout.sample_id),
        format_cell(reward.verdict if reward else rollout.cause),
        None if reward is None or reward.correct is None else float(reward.correct),
        len(rollout.token_ids),
        rollout.finish_reason,
        str(rollout.status),
    )
