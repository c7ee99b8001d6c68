"""Log-probs of stale tokens under the policy version that sampled them, and metrics of mismatch and staleness.

    before an update    keep the weights of version V; drop those that no later batch can need
    before learning     tokens of versions below V ─ forward passes of their snapshots ─► behavior_logprobs

A batch at version V has tokens of versions V - ⌈async_ratio⌉ … V. Tokens of version V need no separate pass: the policy
before the update sampled them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.protocols import TrainerGroup
from roll.types import BoolArray, FloatArray, ForwardOptions, StepResult, TrainingBatch, TrainingSample

__all__ = ["PolicySnapshots", "compute_train_inference_metrics"]

logger = logging.getLogger(__name__)
Float64Array = NDArray[np.float64]


class PolicySnapshots:
    """Snapshots of a policy's latest versions; the trainer stores them.

    Args:
        policy: The trainer.
        num_versions: Number of earlier policy versions to keep, which is the maximum staleness of a token in a batch.
    """

    def __init__(self, policy: TrainerGroup, num_versions: int) -> None:
        self._policy = policy
        self._num = num_versions
        self.versions: tuple[int, ...] = ()
        """Versions of the snapshots, ascending."""

    async def store_weights(self, version: int) -> None:
        """Store the current weights as `version` before the update that makes them stale."""
        if self._num == 0:
            return
        wanted = tuple(v for v in sorted({*self.versions, version}) if version - self._num < v <= version)
        await self._policy.keep_snapshot(version, wanted)
        self.versions = wanted

    async def compute_logprobs(self, batch: TrainingBatch, version: int) -> list[FloatArray | None]:
        """Compute each token's log-prob under the snapshot of the policy version that sampled it.

        Args:
            batch: Batch with the policy versions of its tokens.
            version: Version of the current weights.

        Returns:
            An array of shape [L] for each sample, with NaN for tokens that were sampled by the current version or by a
            version without a snapshot; `None` if all values of the sample would be NaN.
        """
        found: list[FloatArray | None] = [None] * len(batch.samples)
        stale = [_mask_stale(sample, version) for sample in batch.samples]
        versions = {
            int(v) for s, old in zip(batch.samples, stale, strict=True) for v in np.unique(_get_versions(s)[old])
        }
        missing = sorted(versions - set(self.versions))
        if missing:
            logger.warning(
                "snapshots of policy versions %s are missing (a resumed run or a replay begins without snapshots): "
                "tokens of these versions are treated as sampled by the current version %d, see "
                "train_inference/known_share",
                missing,
                version,
            )
        for each in sorted(versions & set(self.versions)):
            own = [old & (_get_versions(s) == each) for s, old in zip(batch.samples, stale, strict=True)]
            places = [i for i, mask in enumerate(own) if mask.any()]
            part = replace(batch, samples=tuple(batch.samples[i] for i in places))
            outputs = (await self._policy.forward(part, ["logprobs"], ForwardOptions(version=each)))["logprobs"]
            for i, logprobs in zip(places, outputs, strict=True):
                before = found[i]
                column = np.full(len(own[i]), np.nan, np.float32) if before is None else before
                column[own[i]] = logprobs[own[i]]
                found[i] = column
        return found


def compute_train_inference_metrics(
    batch: TrainingBatch, results: Sequence[StepResult], version: int
) -> dict[str, float]:
    """Compute metrics of mismatch (engine against trainer) and staleness (policy against the sampling version).

    Both are computed over the trained tokens of the current version and of older versions that have a snapshot. If
    there are tokens of older versions and no snapshot of these versions, the staleness metrics are left out.
    Divergences are `k3` estimates in nats per token: for mismatch KL(engine || trainer), for staleness KL(sampling
    version || policy).

    Args:
        batch: The batch that was trained on.
        results: Results of the policy's updates, whose log-probs are used if samples have no `old_logprobs`.
        version: Policy version before the update.
    """
    given = [s.old_logprobs for s in batch.samples]
    trainer = given if all(x is not None for x in given) else (results[0].logprobs if len(results) == 1 else ())
    rows: list[Float64Array] = []
    for sample, old in zip(batch.samples, trainer, strict=bool(trainer)):
        if old is None or sample.rollout_logprobs is None or sample.expert:
            continue
        stale, recorded = _mask_stale(sample, version), sample.behavior_logprobs
        known = ~stale if recorded is None else ~stale | ~np.isnan(recorded)
        behavior = old if recorded is None else np.where(np.isnan(recorded), old, recorded)
        columns = np.stack([behavior - sample.rollout_logprobs, old - behavior, stale, known], axis=1, dtype=np.float64)
        rows.append(columns[sample.loss_mask])
    together = np.concatenate(rows) if rows else np.zeros((0, 4))
    if not len(together):
        return {}
    stale, known = together[:, 2] > 0, together[:, 3] > 0
    found = {"stale_share": float(stale.mean()), "known_share": float(known.mean())}
    if known.any():
        found |= _compute_log_ratio_metrics("mismatch", together[known, 0])
        if (stale & known).any() or not stale.any():
            found |= _compute_log_ratio_metrics("staleness", together[known, 1])
    return {f"train_inference/{name}": value for name, value in found.items()}


def _compute_log_ratio_metrics(name: str, log_ratios: Float64Array) -> dict[str, float]:
    limited = np.clip(log_ratios, -20.0, 20.0)
    return {
        f"{name}/log_ratio_mean": float(log_ratios.mean()),
        f"{name}/log_ratio_mean_abs": float(np.abs(log_ratios).mean()),
        f"{name}/log_ratio_max_abs": float(np.abs(log_ratios).max()),
        f"{name}/kl": float((np.expm1(limited) - limited).mean()),
    }


def _get_versions(sample: TrainingSample) -> NDArray[Any]:
    """Return the policy version of every token, shape [L]; -1 for tokens that were not sampled."""
    return np.full(len(sample), -1, np.int32) if sample.policy_versions is None else sample.policy_versions


def _mask_stale(sample: TrainingSample, version: int) -> BoolArray:
    """Return a mask, shape [L], of the tokens that were sampled by a version older than `version`."""
    if sample.expert:
        return np.zeros(len(sample), np.bool_)
    versions = _get_versions(sample)
    return sample.loss_mask & (versions >= 0) & (versions < version)
