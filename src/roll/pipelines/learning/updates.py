"""Updates of policy and critics on a step's selected rollouts.

batch ─ reference, old log-probs, values ─► weigh ─► critics learn ─► policy updates

Attention credit is computed in the loss. The attention maps come from the forward pass for the old log-probs if there
are several updates, otherwise from the forward pass of the single update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roll.algorithms.kl import adapt_coefficient, estimate_kl
from roll.algorithms.minibatches import select_critic_batch, split_into_minibatches
from roll.algorithms.selection import Selection
from roll.algorithms.token_weights import add_advantages, compute_kl_token_rewards
from roll.config.algorithm import AlgorithmConfig
from roll.config.rollout import RolloutConfig
from roll.data.samples import build_batch
from roll.pipelines.learner import Learner, train_policy, update
from roll.pipelines.learning.engine_routing import (
    compute_router_replay_metrics,
    drop_recorded_experts,
    score_with_own_routing,
)
from roll.pipelines.learning.gradient_stream import GradientStream
from roll.pipelines.learning.losses import build_policy_loss, build_value_loss, get_attention_range
from roll.pipelines.learning.state import LearningState
from roll.pipelines.run import Run
from roll.pipelines.snapshots import compute_train_inference_metrics
from roll.types import FloatArray, ForwardOptions, OutputName, StepResult, TrainingBatch

__all__ = ["UpdateResults", "learn"]


@dataclass(kw_only=True, slots=True)
class UpdateResults:
    """A step's batch with all columns, and the results of its updates of policy and critics."""

    batch: TrainingBatch
    results: list[StepResult] = field(default_factory=list)
    """Results of the policy's updates, in order; empty while critics warm up."""
    critic_results: list[StepResult] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def has_new_weights(self) -> bool:
        """True if the policy's weights changed."""
        return any(result.stepped for result in self.results)


async def learn(
    run: Run[LearningState],
    learner: Learner,
    algorithm: AlgorithmConfig,
    selection: Selection,
    rollout_config: RolloutConfig,
    stream: GradientStream | None = None,
) -> UpdateResults:
    """Compute the columns that the algorithm needs, then update critics and policy; the step is `run.state.step + 1`.

    Args:
        run: Run at a step's boundary.
        learner: The trainers.
        algorithm: The algorithm's settings.
        selection: Selected rollouts of the step.
        rollout_config: Sampling settings of the rollouts.
        stream: Stream that has already added the gradients of some groups.
    """
    batch = build_batch(
        selection.rollouts, temperature=rollout_config.temperature, max_new_tokens=rollout_config.max_new_tokens
    )
    columns = await _compute_logprobs(run, learner, algorithm, batch, stream.ref_logprobs if stream else {})
    own = await score_with_own_routing(learner.policy, batch) if learner.replays_engine else ([], [])
    coefficient = run.state.kl_coefficient
    coefficient = algorithm.kl.coefficient if coefficient is None else coefficient
    penalties: list[FloatArray] = []
    if algorithm.uses_reference and algorithm.kl.apply_to == "reward":
        penalties = compute_kl_token_rewards(
            batch, columns["old_logprobs"], columns["ref_logprobs"], algorithm, coefficient
        )
    critics = (learner.policy,) if algorithm.shares_critic else learner.critics
    with run.spans.phase("values" if critics else "advantages"):
        values = [(await critic.forward(batch, ["values"]))["values"] for critic in critics]
    version, snapshots = run.state.policy_version, learner.snapshots
    if snapshots is not None:
        with run.spans.phase("snapshots"):
            columns["behavior_logprobs"] = await snapshots.compute_logprobs(batch, version)
    batch = add_advantages(batch, selection, algorithm, values=values, token_rewards=penalties, **columns)
    learned = UpdateResults(batch=batch)
    await _train_critics(run, learner, algorithm, learned, values)
    if run.state.step >= (algorithm.critic.warmup_steps if algorithm.uses_critic else 0):
        if snapshots is not None:
            with run.spans.phase("snapshots"):
                await snapshots.store_weights(version)
        with run.spans.phase("train"):
            loss = build_policy_loss(algorithm, coefficient)
            if stream is not None:
                learned.results.append(await stream.apply(batch, loss))
            else:
                learned.results += await train_policy(run, learner.policy, batch, loss, algorithm.updates)
    learned.metrics |= compute_train_inference_metrics(batch, learned.results, version)
    if learner.replays_engine:
        replayed = columns.get("old_logprobs") or (learned.results[0].logprobs if learned.results else ())
        learned.metrics |= compute_router_replay_metrics(batch, own, replayed)
    _adapt_kl_coefficient(run, algorithm, learned, coefficient)
    return learned


def needs_old_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Return whether log-probs of the policy before the update need a separate forward pass.

    With a single update, its forward pass computes these log-probs.
    """
    in_reward = algorithm.uses_reference and algorithm.kl.apply_to == "reward"
    return algorithm.updates_per_step > 1 or in_reward


async def _compute_logprobs(
    run: Run[LearningState],
    learner: Learner,
    algorithm: AlgorithmConfig,
    batch: TrainingBatch,
    known_logprobs: Mapping[str, FloatArray],
) -> dict[str, Sequence[Any]]:
    """Return the columns `old_logprobs` and `ref_logprobs` if used, and other outputs of the same forward passes.

    `known_logprobs` maps sample IDs to the reference's log-probs that need not be computed again.
    """
    columns: dict[str, Sequence[Any]] = {}
    if needs_old_logprobs(algorithm):
        observed = get_attention_range(algorithm)
        with run.spans.phase("old_logprobs"):
            wanted: list[OutputName] = ["logprobs"] if observed is None else ["logprobs", "attention"]
            if learner.replays_experts:
                wanted.append("experts")
            old = await learner.policy.forward(batch, wanted, ForwardOptions(attention=observed))
        columns |= {"old_logprobs" if name == "logprobs" else name: column for name, column in old.items()}
    if learner.reference is not None:
        with run.spans.phase("reference"):
            plain = drop_recorded_experts(batch)
            rest = replace(plain, samples=tuple(s for s in plain.samples if s.sample_id not in known_logprobs))
            computed = (await learner.reference.forward(rest, ["logprobs"]))["logprobs"] if rest.samples else []
            ref_logprobs = {**known_logprobs, **{s.sample_id: x for s, x in zip(rest.samples, computed, strict=True)}}
            columns["ref_logprobs"] = [ref_logprobs[s.sample_id] for s in batch.samples]
    return columns


async def _train_critics(
    run: Run[LearningState],
    learner: Learner,
    algorithm: AlgorithmConfig,
    results: UpdateResults,
    values: Sequence[Sequence[FloatArray]],
) -> None:
    """Train each critic on its part of the batch. Values are clipped around the old values of the same critic
    (`values`), not around the mean over critics.
    """
    if not learner.critics:
        return
    step = run.state.step
    with run.spans.phase("train_critic"):
        for index, critic in enumerate(learner.critics):
            pairs = zip(results.batch.samples, values[index], strict=True)
            batch = replace(
                results.batch, samples=tuple(replace(s, old_values=values) for s, values in pairs if not s.expert)
            )
            own = select_critic_batch(batch, index, len(learner.critics), first_critic=step)
            for epoch in range(algorithm.critic.num_epochs):
                seed = (run.seed, step, 1 + index, epoch)
                for part in split_into_minibatches(own, algorithm.updates.num_minibatches, seed):
                    results.critic_results.append(await update(run, critic, part, build_value_loss(algorithm)))


def _adapt_kl_coefficient(
    run: Run[LearningState], algorithm: AlgorithmConfig, results: UpdateResults, coefficient: float
) -> None:
    """Measure the divergence from the reference, and adapt the KL coefficient toward its target.

    A step that trains only on demonstrations does not measure the divergence or change the coefficient.
    """
    kl = algorithm.kl
    if kl.coefficient == 0:
        return
    results.metrics["training/kl/coefficient"] = coefficient
    measured = _get_divergence(algorithm, results)
    if measured is None:
        return
    results.metrics["training/kl/reference"] = measured
    if kl.target is not None:
        samples = results.batch.samples
        num_rollouts = sum(not samples[places[0]].expert for places in results.batch.sequences)
        run.state.kl_coefficient = adapt_coefficient(
            coefficient, measured, target=kl.target, num_rollouts=num_rollouts, horizon=kl.horizon
        )


def _get_divergence(algorithm: AlgorithmConfig, results: UpdateResults) -> float | None:
    """Return the divergence from the reference, in nats per token that the policy sampled; `None` if not measured.

    With the penalty in the reward, this is the divergence of the policy before the update. With the penalty in the
    loss, it is the mean over the updates; a user-defined loss need not report one.
    """
    if algorithm.kl.apply_to == "loss":
        found = [r.metrics["policy/kl_reference"] for r in results.results if "policy/kl_reference" in r.metrics]
        return float(np.mean(found)) if found else None
    own = [s for s in results.batch.samples if not s.expert and s.loss_mask.any()]
    pairs = [(s.old_logprobs, s.ref_logprobs, s.loss_mask) for s in own]
    counted = [
        estimate_kl(old[mask].astype(np.float64), ref[mask].astype(np.float64), algorithm.kl.estimator)
        for old, ref, mask in pairs
        if old is not None and ref is not None
    ]
    return float(np.concatenate(counted).mean()) if counted else None
