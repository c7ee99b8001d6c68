"""From scored groups to a training batch: which rollouts are trained, with which advantage, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.algorithms.advantages import group_advantages, has_zero_variance
from roll.config.algorithm import AlgorithmConfig
from roll.rollout import DataLedger, Fate
from roll.types import Group, Rollout

__all__ = ["Selection", "select", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a step learns from, and what became of every group."""

    rollouts: tuple[Rollout, ...]
    advantages: dict[str, float]
    """By rollout id."""
    fates: dict[int, tuple[Fate, str]]
    """By draw id, with the reason where it is not trained."""

    def count(self, fate: Fate) -> int:
        """Groups with this fate."""
        return sum(found is fate for found, _ in self.fates.values())


def select(groups: Sequence[Group], algorithm: AlgorithmConfig) -> Selection:
    """Compute advantages and leave out groups that carry no gradient.

    A rollout that infrastructure failed is in no baseline; a group in which all failed has fate `failed`.
    """
    scored = [group.scored for group in groups]
    rewards = [np.array([r.reward.value for r in rollouts if r.reward], np.float32) for rollouts in scored]
    advantages = group_advantages(rewards, mean=algorithm.advantage_mean, std=algorithm.advantage_std)
    fates: dict[int, tuple[Fate, str]] = {}
    chosen: list[Rollout] = []
    weights: dict[str, float] = {}
    for group, rollouts, values, weight in zip(groups, scored, rewards, advantages, strict=True):
        trainable = [(r, float(a)) for r, a in zip(rollouts, weight, strict=True) if len(r.token_ids)]
        if not trainable:
            causes = sorted({r.cause for r in group.rollouts if r.cause})
            fates[group.draw.draw_id] = (Fate.FAILED, "; ".join(causes) or "no rollout has a token")
        elif algorithm.skip_zero_variance and has_zero_variance(values):
            fates[group.draw.draw_id] = (Fate.FILTERED, f"zero variance: every reward is {values[0]:g}")
        else:
            fates[group.draw.draw_id] = (Fate.TRAINED, "")
            chosen += [r for r, _ in trainable]
            weights |= {r.rollout_id: a for r, a in trainable}
    return Selection(rollouts=tuple(chosen), advantages=weights, fates=fates)


def settle(ledger: DataLedger, selection: Selection, step: int) -> None:
    """Write every group's fate into the ledger."""
    for draw_id, (fate, why) in selection.fates.items():
        ledger.settle(draw_id, fate, step, why)
