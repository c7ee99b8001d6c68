"""Selection of training rollouts in pipelines without an RL algorithm: all, the best, or pairs. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from roll.algorithms.filters import find_filter_reason
from roll.types import DrawOutcome, Group, Rollout

__all__ = [
    "AnswerSelection",
    "LossUnit",
    "Pairing",
    "find_failure_reason",
    "select_answers_in_vocabulary",
    "select_best_answers",
    "select_pairs",
    "select_rollouts_per_group",
]

LossUnit: TypeAlias = tuple[Rollout, ...]
"""A single rollout, or the better and the worse rollout of a pair, for losses of pairs."""
Pairing: TypeAlias = Literal["best_worst", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSelection:
    """The rollouts that a step trains on, and the outcome of every group."""

    units: tuple[LossUnit, ...]
    """The chosen loss units, in the order of their groups."""
    draw_outcomes: dict[int, tuple[DrawOutcome, str]]
    """The outcome of each group by draw id, with the reason if it is not trained on."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All chosen rollouts; a rollout in several pairs is repeated."""
        return tuple(rollout for unit in self.units for rollout in unit)


def select_rollouts_per_group(
    groups: Iterable[Group], select_answers: Callable[[Sequence[Rollout]], list[LossUnit] | str]
) -> AnswerSelection:
    """Choose the rollouts of every group that a step trains on.

    A rollout with an infrastructure error is never chosen; a group in which all rollouts failed gets the outcome
    `failed`.

    Args:
        groups: Groups of the step.
        select_answers: Function of a group's scored rollouts that returns the loss units to train on, or the reason why
            there are none.
    """
    units: list[LossUnit] = []
    draw_outcomes: dict[int, tuple[DrawOutcome, str]] = {}
    for group in groups:
        written = [r for r in group.scored_rollouts if any(turn.end > turn.start for turn in r.spans)]
        found = select_answers(written) if written else []
        if isinstance(found, str):
            draw_outcomes[group.draw.draw_id] = (DrawOutcome.FILTERED, found)
            continue
        units += found
        draw_outcomes[group.draw.draw_id] = (
            (DrawOutcome.TRAINED, "") if written else (DrawOutcome.FAILED, find_failure_reason(group))
        )
    return AnswerSelection(units=tuple(units), draw_outcomes=draw_outcomes)


def find_failure_reason(group: Group) -> str:
    """Return the reason why a group has no rollout to train on: the infrastructure errors of its rollouts, or empty
    answers."""
    return "; ".join(sorted({r.cause for r in group.rollouts if r.cause})) or "no rollout has a token"


def select_answers_in_vocabulary(rollouts: Sequence[Rollout], *, vocab_size: int) -> list[LossUnit] | str:
    """Select the rollouts whose token IDs are all in the teacher's vocabulary, or return the reason why there are none.
    A policy with a padded vocabulary may sample IDs outside the teacher's vocabulary.

    Args:
        rollouts: The rollouts of one group.
        vocab_size: Size of the teacher's vocabulary.
    """
    return [(rollout,) for rollout in rollouts if int(rollout.token_ids.max()) < vocab_size] or (
        f"every answer has a token id of {vocab_size:,} or more, which is not in its teacher's vocabulary"
    )


def select_best_answers(rollouts: Sequence[Rollout], *, num_answers: int, min_reward: float) -> list[LossUnit] | str:
    """Select the `num_answers` best rollouts (RAFT, arXiv 2304.06767), or return the reason why there are none.

    Args:
        rollouts: The rollouts of one group; ties go to the earlier rollout.
        num_answers: Maximum number of rollouts.
        min_reward: Minimum reward of a selected rollout.
    """
    rewards = _collect_rewards(rollouts)
    best = [int(i) for i in np.argsort(-rewards, kind="stable")[:num_answers] if rewards[i] >= min_reward]
    if not best:
        return f"the best reward {rewards.max():g} is below {min_reward:g}"
    return [(rollouts[i],) for i in sorted(best)]


def select_pairs(rollouts: Sequence[Rollout], *, pairing: Pairing, min_difference: float = 0.0) -> list[LossUnit] | str:
    """Select preference pairs of a better and a worse answer, or return the reason why a group has none.

    Args:
        rollouts: The rollouts of one group.
        pairing: `best_worst` pairs the best with the worst rollout (ties go to the first), `all` pairs every two
            rollouts with different rewards.
        min_difference: Smallest reward difference of a pair.
    """
    rewards = _collect_rewards(rollouts)
    if reason := find_filter_reason(rewards):
        return reason
    order = np.argsort(-rewards, kind="stable").tolist()
    best, worst = order[0], int(np.argmin(rewards))
    found = (
        [(best, worst)] if pairing == "best_worst" else [(b, w) for i, b in enumerate(order) for w in order[i + 1 :]]
    )
    kept = [(b, w) for b, w in found if rewards[b] > rewards[w] and rewards[b] - rewards[w] >= min_difference]
    if not kept:
        return f"the rewards differ by {np.ptp(rewards):g}, less than {min_difference:g}"
    kept = [(b, w) for b, w in kept if not np.array_equal(rollouts[b].token_ids, rollouts[w].token_ids)]
    if not kept:
        return "the chosen and rejected answers have identical tokens"
    return [(rollouts[b], rollouts[w]) for b, w in kept]


def _collect_rewards(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Return the rewards of scored rollouts before shaping, shape [G]."""
    return np.array([r.reward.value for r in rollouts if r.reward is not None], dtype=np.float64)
