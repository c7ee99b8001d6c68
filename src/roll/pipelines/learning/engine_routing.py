"""Metrics of updates that replay the MoE experts that engines chose (`training.router_replay: engine`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll.protocols import Scorer
from roll.types import FloatArray, IntArray, TrainingBatch, TrainingSample

__all__ = ["MEASURED_BATCH_DIVISOR", "compute_router_replay_metrics", "drop_recorded_experts", "score_with_own_routing"]

MEASURED_BATCH_DIVISOR = 8
"""Denominator of the fraction of samples that are also scored with the trainer's routing: a forward pass over the first
eighth of the batch, about 4 % of an update's compute.
"""


def drop_recorded_experts(batch: TrainingBatch) -> TrainingBatch:
    """Return the batch without recorded experts, so that a model's routers choose experts themselves."""
    if all(s.experts is None for s in batch.samples):
        return batch
    return replace(batch, samples=tuple(replace(s, experts=None) for s in batch.samples))


async def score_with_own_routing(policy: Scorer, batch: TrainingBatch) -> tuple[list[FloatArray], list[IntArray]]:
    """Compute log-probs and expert choices of the batch's first samples under the policy without router replay."""
    first = tuple(s for s in batch.samples if s.experts is not None)[: -(-len(batch.samples) // MEASURED_BATCH_DIVISOR)]
    if not first:
        return [], []
    found = await policy.forward(drop_recorded_experts(replace(batch, samples=first)), ["logprobs", "experts"])
    return list(found["logprobs"]), list(found["experts"])


def compute_router_replay_metrics(
    batch: TrainingBatch,
    own_results: tuple[Sequence[FloatArray], Sequence[IntArray]],
    replayed_logprobs: Sequence[FloatArray | None],
) -> dict[str, float]:
    """Compute the router-replay metrics of a step, below `agreement/`.

    `replayed_share` is the fraction of tokens in the forward pass with recorded experts, and `expert_overlap` the
    fraction of these choices that the trainer's routers also make. `own_routing/…` and `engine_routing/…` compare
    log-probs of engine and trainer over the same tokens, with the trainer's or the engine's routing: the mean and the
    largest absolute difference, and an unbiased estimate of the KL divergence (k3 of
    http://joschu.net/blog/kl-approx.html).

    Args:
        batch: The batch of the step.
        own_results: Log-probs and experts of the first samples with recorded experts, from `score_with_own_routing`.
        replayed_logprobs: Log-probs of all samples in the pass with router replay; empty without such a pass.
    """
    known, inputs = 0, 0
    for sample in batch.samples:
        inputs += len(sample) - 1
        known += 0 if sample.experts is None else int((sample.experts[:-1] >= 0).all(axis=(1, 2)).sum())
    metrics = {"agreement/replayed_share": known / max(inputs, 1)}
    chosen = [(i, s) for i, s in enumerate(batch.samples) if s.experts is not None][: len(own_results[0])]
    samples = [s for _, s in chosen]
    metrics |= _compute_distance("own_routing", samples, own_results[0])
    alike = [
        _match_choices(s.experts, experts)
        for s, experts in zip(samples, own_results[1], strict=True)
        if s.experts is not None
    ]
    if alike and sum(map(len, alike)):
        metrics["agreement/expert_overlap"] = float(np.concatenate(alike).mean())
    if replayed_logprobs:
        metrics |= _compute_distance("engine_routing", samples, [replayed_logprobs[i] for i, _ in chosen])
    return metrics


def _compute_distance(
    name: str, samples: Sequence[TrainingSample], logprobs_by_sample: Sequence[FloatArray | None]
) -> dict[str, float]:
    differences = [
        (logprobs - sample.rollout_logprobs)[sample.loss_mask].astype(np.float64)
        for sample, logprobs in zip(samples, logprobs_by_sample, strict=True)
        if logprobs is not None and sample.rollout_logprobs is not None
    ]
    together = np.concatenate(differences) if differences else np.zeros(0)
    if not len(together):
        return {}
    bounded = np.clip(together, -20.0, 20.0)
    return {
        f"agreement/{name}/logprob_mean_abs": float(np.abs(together).mean()),
        f"agreement/{name}/logprob_max_abs": float(np.abs(together).max()),
        f"agreement/{name}/divergence": float((np.expm1(bounded) - bounded).mean()),
    }


def _match_choices(engine: IntArray, trainer: IntArray) -> IntArray:
    """Return a flat boolean array with an entry for each expert that the engine chose.

    An entry is True if the trainer chose the same expert for the same token and layer.

    Both arguments have the shape [L, layers, k]. Tokens without known experts in one of the arguments are left out.
    """
    both = (engine[..., 0] >= 0) & (trainer[..., 0] >= 0)
    return (engine[both][..., None] == trainer[both][..., None, :]).any(-1).ravel()
