"""Parts of a batch: for several optimiser steps, and for several critics. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from roll.algorithms.normalise import places_by_key
from roll.types import TrainingBatch

__all__ = ["critic_share", "minibatches"]


def minibatches(batch: TrainingBatch, num: int, seed: tuple[int, ...]) -> Iterator[TrainingBatch]:
    """Cut a batch into `num` parts of whole groups, of nearly equal numbers of samples.

    A group stays together, so that its prompt is computed once; the order of groups is drawn from `seed`. Fewer groups
    than parts give fewer parts. A part without a token in the loss is left out.
    """
    if num == 1:
        if batch.num_loss_tokens:
            yield batch
        return
    groups = list(places_by_key([sample.unit for sample in batch.samples]).values())
    order = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    total, taken = len(batch.samples), 0
    parts: list[list[int]] = [[] for _ in range(num)]
    for members in order:
        parts[min(taken * num // total, num - 1)] += members
        taken += len(members)
    for part in parts:
        cut = replace(batch, samples=tuple(batch.samples[i] for i in sorted(part)))
        if cut.num_loss_tokens:
            yield cut


def critic_share(batch: TrainingBatch, critic: int, num_critics: int, first: int = 0) -> TrainingBatch:
    """What one of several critics learns from: each group's rollouts are dealt out in turn (AsyPPO).

    Each group's deal goes on where the one before it ended, so that no critic gets the odd rollout of every group: the
    shares of a batch, and of a group, differ by one rollout at most.

    Args:
        batch: of one step.
        critic: which one.
        num_critics: see there.
        first: which critic gets the batch's first rollout; the step's number, so that it is not always the same.
    """
    rollouts = batch.sequences
    groups = places_by_key([batch.samples[samples[0]].unit for samples in rollouts])
    dealt = [rollouts[place] for members in groups.values() for place in members]
    own = {i for place, samples in enumerate(dealt, start=first) if place % num_critics == critic for i in samples}
    return replace(batch, samples=tuple(sample for index, sample in enumerate(batch.samples) if index in own))
