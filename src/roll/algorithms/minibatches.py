"""Splits a batch into mini-batches for several optimizer steps, or among several critics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from roll.algorithms.normalization import group_indices_by_key
from roll.types import TrainingBatch

__all__ = ["select_critic_batch", "split_into_minibatches"]


def split_into_minibatches(
    batch: TrainingBatch, num_minibatches: int, seed: tuple[int, ...]
) -> Iterator[TrainingBatch]:
    """Split a batch into `num_minibatches` mini-batches of whole groups, with nearly equal numbers of samples.

    A group is never split, so that its prompt is computed once. A batch with fewer groups than `num_minibatches` is
    split into fewer mini-batches. A mini-batch without a loss token is skipped.

    Args:
        batch: The batch of one step.
        num_minibatches: Number of mini-batches.
        seed: Seed for shuffling the groups.
    """
    if num_minibatches == 1:
        if batch.num_loss_tokens:
            yield batch
        return
    groups = list(group_indices_by_key([sample.unit for sample in batch.samples]).values())
    order = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    total, taken = len(batch.samples), 0
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for members in order:
        parts[min(taken * num_minibatches // total, num_minibatches - 1)] += members
        taken += len(members)
    for part in parts:
        cut = replace(batch, samples=tuple(batch.samples[i] for i in sorted(part)))
        if cut.num_loss_tokens:
            yield cut


def select_critic_batch(batch: TrainingBatch, critic: int, num_critics: int, first_critic: int = 0) -> TrainingBatch:
    """Return the samples for one of several critics: rollouts are assigned to the critics round-robin (AsyPPO).

    The round-robin assignment continues across groups, so the critics' numbers of rollouts differ by at most one, in
    each group and in the batch.

    Args:
        batch: The batch of one step.
        critic: Index of the critic.
        num_critics: Number of critics.
        first_critic: The batch's first rollout goes to critic `first_critic % num_critics`; pass the step number, so
            that the critics take turns.
    """
    rollouts = batch.sequences
    groups = group_indices_by_key([batch.samples[samples[0]].unit for samples in rollouts])
    dealt = [rollouts[place] for members in groups.values() for place in members]
    own = {
        i for place, samples in enumerate(dealt, start=first_critic) if place % num_critics == critic for i in samples
    }
    return replace(batch, samples=tuple(sample for index, sample in enumerate(batch.samples) if index in own))
