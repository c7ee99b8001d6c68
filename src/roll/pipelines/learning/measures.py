"""Metrics of a step's updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import StepResult, TrainingBatch

__all__ = [
    "compute_agreement_metrics",
    "compute_learning_metrics",
    "compute_mean_advantages",
    "compute_training_metrics",
]


def _compute_mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def compute_mean_advantages(batch: TrainingBatch) -> dict[str, float]:
    """Return the mean advantage of every rollout over its loss tokens, by id of the rollout's first sample."""
    found: dict[str, float] = {}
    for places in batch.sequences:
        samples = [batch.samples[i] for i in places]
        counted = [s.advantages[s.loss_mask] for s in samples if s.advantages is not None]
        if counted:
            found[samples[0].sample_id] = _compute_mean(np.concatenate(counted).tolist())
    return found


def compute_agreement_metrics(batch: TrainingBatch, results: Sequence[StepResult]) -> dict[str, float]:
    """Compute the differences between the log-probs of engine and trainer over all loss tokens.

    The trainer's log-probs are computed before the update or, with a single update, in its forward pass. The metrics
    are the mean and the largest absolute difference, an unbiased estimate of KL(engine || trainer) (k3 of
    https://joschu.net/blog/kl-approx.html), quantiles of the ratio old/rollout, and the effective sample size under
    these ratios as a fraction of tokens. The result is empty if no sample has both log-probs."""
    given = [s.old_logprobs for s in batch.samples]
    trainer = given if all(x is not None for x in given) else (results[0].logprobs if len(results) == 1 else ())
    differences = [
        (logprobs - sample.rollout_logprobs)[sample.loss_mask]
        for sample, logprobs in zip(batch.samples, trainer, strict=bool(trainer))
        if logprobs is not None and sample.rollout_logprobs is not None and not sample.expert
    ]
    if not differences:
        return {}
    together = np.concatenate(differences).astype(np.float64)
    bounded = np.clip(together, -20.0, 20.0)
    factors = np.exp(bounded)
    low, middle, high = np.quantile(factors, (0.01, 0.5, 0.99))
    return {
        "agreement/logprob_mean_abs": float(np.abs(together).mean()),
        "agreement/logprob_max_abs": float(np.abs(together).max()),
        "agreement/divergence": float((np.expm1(bounded) - bounded).mean()),
        "agreement/factor_p01": float(low),
        "agreement/factor_p50": float(middle),
        "agreement/factor_p99": float(high),
        "agreement/effective_sample_share": float(factors.sum() ** 2 / (len(factors) * np.square(factors).sum())),
    }


def compute_training_metrics(results: Sequence[StepResult], prefix: str = "training") -> dict[str, float]:
    """Return the metrics of optimizer steps: means over the steps, maxima (`max/…`), and sums of counts and times."""
    if not results:
        return {}
    metrics = {
        "loss": _compute_mean([r.loss for r in results]),
        "grad_norm": _compute_mean([r.grad_norm for r in results]),
        "learning_rate": results[-1].learning_rate,
        "num_tokens": float(sum(r.num_tokens for r in results)),
        "num_loss_tokens": float(sum(r.num_loss_tokens for r in results)),
        "stepped": _compute_mean([float(r.stepped) for r in results]),
    }
    if len(results) > 1:
        metrics["num_updates"] = float(len(results))
    for name in dict.fromkeys(name for r in results for name in r.metrics):
        metrics[name] = _compute_mean([float(r.metrics[name]) for r in results if name in r.metrics])
    for name in dict.fromkeys(name for r in results for name in r.maxima):
        metrics[f"max/{name}"] = max(float(r.maxima[name]) for r in results if name in r.maxima)
    found = {f"{prefix}/{name}": value for name, value in metrics.items()}
    if prefix == "training":
        for name in dict.fromkeys(name for r in results for name in r.timings_s):
            found[f"time/{name}_s"] = float(sum(r.timings_s.get(name, 0.0) for r in results))
    return found


def compute_learning_metrics(
    batch: TrainingBatch, results: Sequence[StepResult], critic_results: Sequence[StepResult]
) -> dict[str, float]:
    """Return the metrics of the updates of policy and critics, and the agreement of engines and trainer."""
    metrics = (
        compute_training_metrics(results)
        | compute_training_metrics(critic_results, "critic")
        | compute_agreement_metrics(batch, results)
    )
    place = "critic" if critic_results else "training"  # a shared value head is trained in the policy's updates
    if f"{place}/value/return" in metrics:
        mean, squared, error = (metrics[f"{place}/value/{name}"] for name in ("return", "return_squared", "error"))
        variance = squared - mean * mean
        metrics["critic/explained_variance"] = 1.0 - error / variance if variance > 1e-8 else 0.0
    return metrics
