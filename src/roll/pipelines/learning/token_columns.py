"""Per-token values of the trainer for the rollout table, which need no extra computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.algorithms.minibatches import split_into_minibatches
from roll.config.algorithm_parts import UpdateConfig
from roll.types import FloatArray, StepResult, TrainingBatch

__all__ = ["build_token_columns"]


def build_token_columns(
    batch: TrainingBatch, results: Sequence[StepResult], updates: UpdateConfig, seed: tuple[int, int]
) -> dict[str, dict[str, FloatArray]]:
    """Return columns of `roll.tracking.rollout_table` by rollout id; each array aligns with the rollout's tokens.

    `trainer_logprobs` are the log-probs before the first update; `update_logprobs` are the log-probs before the last
    update, if there are several. Both are NaN outside the loss mask, and absent if the back-end does not return
    log-probs.

    Args:
        batch: The batch that `add_advantages` completed.
        results: Results of the updates on this batch, in order.
        updates: The split of the batch into mini-batches.
        seed: Seeds of the run and of the step, which determine the mini-batches.
    """
    latest = _collect_latest_logprobs(batch, results, updates, seed)
    single = len(results) == 1
    found: dict[str, dict[str, FloatArray]] = {}
    for places in batch.sequences:
        samples = [batch.samples[place] for place in places]
        if samples[0].expert:
            continue
        old = [latest.get(s.sample_id) if single and s.old_logprobs is None else s.old_logprobs for s in samples]
        columns = {
            "trainer_logprobs": old,
            "update_logprobs": [None if single else latest.get(s.sample_id) for s in samples],
            "ref_logprobs": [s.ref_logprobs for s in samples],
            "token_advantages": [s.advantages for s in samples],
        }
        whole = {name: [part for part in parts if part is not None] for name, parts in columns.items()}
        found[samples[0].sample_id] = {
            name: np.concatenate(
                [
                    np.where(sample.loss_mask, part, np.nan)[sample.prefix_length :]
                    for sample, part in zip(samples, parts, strict=True)
                ]
            )
            for name, parts in whole.items()
            if len(parts) == len(samples)
        }
    return found


def _collect_latest_logprobs(
    batch: TrainingBatch, results: Sequence[StepResult], updates: UpdateConfig, seed: tuple[int, int]
) -> dict[str, FloatArray]:
    """Return each sample's log-probs [L] before the last update that included the sample, by sample ID."""
    found: dict[str, FloatArray] = {}
    remaining = iter(results)
    for epoch in range(updates.num_epochs):
        for part in split_into_minibatches(batch, updates.num_minibatches, (*seed, 0, epoch)):
            result = next(remaining, None)
            if result is not None and result.logprobs:
                found |= {
                    s.sample_id: own for s, own in zip(part.samples, result.logprobs, strict=True) if not s.expert
                }
    return found
