"""Parts of a batch: for several optimiser steps, and for several critics. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

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
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        groups.setdefault(sample.group_id, []).append(index)
    order = [list(groups.values())[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    total, taken = len(batch.samples), 0
    parts: list[list[int]] = [[] for _ in range(num)]
    for members in order:
        parts[min(taken * num // total, num - 1)] += members
        taken += len(members)
    for part in parts:
        cut = replace(batch, samples=tuple(batch.samples[i] for i in sorted(part)))
        if cut.num_loss_tokens:
            yield cut


def critic_share(batch: TrainingBatch, critic: int, num_critics: int) -> TrainingBatch:
    """What one of several critics learns from: each group's rollouts are dealt out in turn (AsyPPO)."""
    seen: dict[int, int] = {}
    own = []
    for sample in batch.samples:
        place = seen.get(sample.group_id, 0)
        seen[sample.group_id] = place + 1
        if place % num_critics == critic:
            own.append(sample)
    return replace(batch, samples=tuple(own))
