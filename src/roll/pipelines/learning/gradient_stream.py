"""Streamed gradients: the trainer computes the gradients of finished groups while the other groups of the step run.

    groups finish ─► certain to be in the batch ─► select, weigh ─► forward_backward   (several times)
    batch complete ─► forward_backward of the other groups ─► gradient x scale ─► optim_step

This is the stream trainer of RollPacker (arXiv 2509.21009, section 4.3). If the trainer shares devices with engines,
they release these devices before the first part. A loss divides by the counts of the whole batch, which are unknown
until the batch is complete. So every part divides by the same provisional counts, and `scale`, the ratio of
provisional to actual counts, corrects the sum. The gradient is that of a plain step except for floating-point rounding:
parts are added in the order in which groups finish.

`stream_training` is rejected for algorithms in which another group can change a group's advantages
(`roll.config.streaming`). As an additional check, `apply` compares the advantages of every part with those of the
complete batch. If they differ, it discards the parts and trains on the complete batch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from roll.algorithms.selection import select_training_rollouts
from roll.algorithms.token_weights import add_advantages
from roll.config.algorithm import AlgorithmConfig
from roll.config.rollout import RolloutConfig
from roll.data.samples import build_batch
from roll.pipelines.learner import Learner, accumulate_gradients, apply_gradients, update
from roll.pipelines.learning.engine_routing import drop_recorded_experts
from roll.pipelines.learning.losses import build_policy_loss
from roll.pipelines.learning.state import LearningState
from roll.pipelines.run import Run
from roll.protocols import LossFn
from roll.rollout import Batch
from roll.rollout.streaming import GroupSource, StreamedEngines, collect_batch
from roll.types import (
    BatchCounts,
    FloatArray,
    ForwardBackwardResult,
    Group,
    PromptDraw,
    RolloutId,
    StepResult,
    TrainingBatch,
    TrainingSample,
)

__all__ = ["GradientStream", "StreamedSource"]

logger = logging.getLogger(__name__)

WEIGHTED_METRICS = ("policy/loss_scale",)
"""Metrics that are summed with the weights of the loss; all others are means over tokens."""


class StreamedSource(GroupSource, Protocol):
    """Source of the batches; `AsyncController` implements it."""

    async def complete_step(self, version: int, trained: Collection[RolloutId]) -> None: ...

    def list_in_flight(self) -> list[PromptDraw]: ...


@dataclass(frozen=True, slots=True)
class _BatchPart:
    """Groups of a batch whose gradient has already been accumulated."""

    batch: TrainingBatch
    result: ForwardBackwardResult


class GradientStream:
    """Accumulates the gradient of a step's finished groups while other groups still run; implements `BatchSource`.

    Args:
        source: Source of the batches.
        engines: Engines that generate the batches.
        run: The run.
        learner: The trainers.
        algorithm: The algorithm's settings.
        rollout: Settings of the rollouts.
    """

    def __init__(
        self,
        source: StreamedSource,
        engines: StreamedEngines,
        run: Run[LearningState],
        learner: Learner,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
    ) -> None:
        self._source = source
        self._engines = engines
        self._run = run
        self._learner = learner
        self._algorithm = algorithm
        self._rollout = rollout
        self._parts: list[_BatchPart] = []
        self._has_gradients = False
        num_sequences = float(rollout.prompts_per_step * rollout.group_size)
        self._counts = BatchCounts(
            num_tokens=num_sequences * rollout.max_new_tokens,
            num_sequences=num_sequences,
            num_units=float(rollout.prompts_per_step),
        )
        """Provisional counts. Their values are arbitrary, as long as the gradients do not overflow or underflow."""

    @property
    def ref_logprobs(self) -> Mapping[str, FloatArray]:
        """Log-probs of the reference that were already computed for the parts, by sample ID."""
        samples = (sample for part in self._parts for sample in part.batch.samples)
        return {sample.sample_id: sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None}

    async def next_batch(self) -> Batch:
        """Return the next batch; until it is complete, add the gradients of groups that it will certainly contain.

        Canceling this call leaves gradients in the trainer, which the next call discards.
        """
        await self._discard()
        return await collect_batch(self._source, self._engines, self._rollout.prompts_per_step, self._add)

    async def complete_step(self, version: int, trained: Collection[RolloutId]) -> None:
        """Finish the step, as `AsyncController.complete_step` does."""
        await self._source.complete_step(version, trained)

    def list_in_flight(self) -> list[PromptDraw]:
        """Return the draws whose outcome no batch has reported yet, sorted by draw ID."""
        return self._source.list_in_flight()

    async def apply(self, batch: TrainingBatch, loss: LossFn) -> StepResult:
        """Accumulate the gradient of the samples that are not in a part yet, and update the policy.

        Args:
            batch: The complete batch, with all columns.
            loss: The loss; it must equal the loss with which the parts' gradients were computed.
        """
        problem = _find_difference([part.batch for part in self._parts], batch)
        if problem:
            logger.warning("discarding the streamed gradients; the step is trained without streaming: %s", problem)
            await self._discard()
        parts, self._parts = self._parts, []
        if not parts:
            result = await update(self._run, self._learner.policy, batch, loss)
            return replace(result, metrics={**result.metrics, "streamed_share": 0.0})
        streamed = {sample.sample_id for part in parts for sample in part.batch.samples}
        rest = replace(batch, samples=tuple(s for s in batch.samples if s.sample_id not in streamed))
        if rest.samples:
            parts.append(_BatchPart(rest, await self._accumulate(rest, loss, last=True)))
        counts = batch.counts
        token_scale = self._counts.num_tokens / counts.num_tokens
        sequence_scale = self._counts.num_sequences / counts.num_sequences
        loss_scale = token_scale if self._algorithm.aggregation == "token_mean" else sequence_scale
        optimized = await apply_gradients(self._run, self._learner.policy, loss_scale)
        metrics = _sum_metrics(parts, loss_scale, token_scale)
        metrics["streamed_share"] = 1.0 - rest.num_loss_tokens / counts.num_tokens
        return StepResult(
            loss=sum(part.result.loss for part in parts) * loss_scale,
            num_tokens=sum(part.result.num_tokens for part in parts),
            num_loss_tokens=sum(part.result.num_loss_tokens for part in parts),
            metrics=metrics,
            maxima={name: max(p.result.maxima[name] for p in parts) for name in parts[0].result.maxima},
            logprobs=_collect_logprobs(parts, batch),
            grad_norm=optimized.grad_norm,
            learning_rate=optimized.learning_rate,
            stepped=optimized.stepped,
        )

    async def _add(self, groups: Sequence[Group]) -> None:
        """Add the gradient of finished groups; skip groups that a filter rejects."""
        algorithm, rollout = self._algorithm, self._rollout
        selection = select_training_rollouts(groups, algorithm, max_new_tokens=rollout.max_new_tokens)
        if not selection.trained_rollouts:
            return
        batch = build_batch(selection.rollouts, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        columns: dict[str, Sequence[Any]] = {}
        with self._run.spans.phase("stream"):
            if self._learner.reference is not None:
                plain = drop_recorded_experts(batch)
                columns["ref_logprobs"] = (await self._learner.reference.forward(plain, ["logprobs"]))["logprobs"]
            batch = add_advantages(batch, selection, algorithm, **columns)
            loss = build_policy_loss(algorithm, self._run.state.kl_coefficient)
            self._parts.append(_BatchPart(batch, await self._accumulate(batch, loss, last=False)))

    async def _accumulate(self, batch: TrainingBatch, loss: LossFn, *, last: bool) -> ForwardBackwardResult:
        self._has_gradients = True
        return await accumulate_gradients(self._run, self._learner.policy, batch, loss, self._counts, last=last)

    async def _discard(self) -> None:
        """Discard the gradients of an incomplete step."""
        if self._has_gradients:
            await self._learner.policy.discard_gradients()
        self._parts, self._has_gradients = [], False


def _find_difference(parts: Sequence[TrainingBatch], batch: TrainingBatch) -> str:
    """Describe how the samples of the parts differ from the samples of the complete batch; empty if they are equal."""
    complete = {sample.sample_id: sample for sample in batch.samples}
    for sample in (sample for part in parts for sample in part.samples):
        other = complete.get(sample.sample_id)
        if other is None:
            return f"{sample.sample_id} is not in the batch"
        if not np.array_equal(_get_advantages(sample), _get_advantages(other)):
            return f"the advantages of {sample.sample_id} changed when the batch was complete"
    return ""


def _get_advantages(sample: TrainingSample) -> FloatArray:
    assert sample.advantages is not None, "the advantages were added"
    return sample.advantages


def _sum_metrics(parts: Sequence[_BatchPart], loss_scale: float, token_scale: float) -> dict[str, float]:
    """Compute the metrics of the complete batch from the metrics of the parts, which use provisional counts."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.result.metrics):
        if name.startswith("experts/"):  # means over the tokens of a part, not shares of a sum over the batch
            weights = [float(part.result.num_tokens) for part in parts]
            metrics[name] = float(np.average([part.result.metrics[name] for part in parts], weights=weights))
            continue
        scale = loss_scale if name in WEIGHTED_METRICS else token_scale
        metrics[name] = sum(part.result.metrics.get(name, 0.0) for part in parts) * scale
    return metrics


def _collect_logprobs(parts: Sequence[_BatchPart], batch: TrainingBatch) -> tuple[FloatArray, ...]:
    """Return the log-probs of all samples in the order of the batch; empty if the back-end does not return them."""
    if not all(part.result.logprobs for part in parts):
        return ()
    pairs = (zip(part.batch.samples, part.result.logprobs, strict=True) for part in parts)
    found = {sample.sample_id: logprobs for own in pairs for sample, logprobs in own}
    return tuple(found[sample.sample_id] for sample in batch.samples)
