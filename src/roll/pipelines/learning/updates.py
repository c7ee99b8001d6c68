"""From a selection to new weights.

batch ─ reference, old log-probs, values ─► weigh ─► critics learn ─► policy updates

Attention credit is the loss's: its maps come from the forward pass before the first of several updates, where one is
made for the old log-probs, else from the only update's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roll.algorithms.kl_controller import adapted_coefficient
from roll.algorithms.minibatches import critic_share, minibatches
from roll.algorithms.selection import Selection
from roll.algorithms.weighing import kl_token_rewards, weigh
from roll.config.algorithm import AlgorithmConfig
from roll.data.samples import build_batch
from roll.errors import HalfUpdatedError, InfraError
from roll.pipelines.learning.losses import attention_range, policy_loss, value_loss
from roll.pipelines.parts import Parts
from roll.protocols import LossFn, TrainerGroup
from roll.types import FloatArray, StepResult, TrainingBatch

__all__ = ["Learned", "learn"]


@dataclass(kw_only=True, slots=True)
class Learned:
    """What a step's updates did."""

    batch: TrainingBatch
    results: list[StepResult] = field(default_factory=list)
    """Of the policy, in order; empty while critics warm up."""
    critic_results: list[StepResult] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def stepped(self) -> bool:
        """Whether the policy's weights moved."""
        return any(result.stepped for result in self.results)


async def learn(parts: Parts, selection: Selection) -> Learned:
    """Compute what the algorithm asks for, then update critics and policy; the step is `parts.state.step + 1`."""
    config, algorithm = parts.config, parts.config.algorithm
    sampling = config.rollout
    batch = build_batch(selection.rollouts, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)
    columns = await _logprobs(parts, batch)
    coefficient = parts.state.kl_coefficient
    coefficient = algorithm.kl.coefficient if coefficient is None else coefficient
    penalties: list[FloatArray] = []
    if algorithm.uses_reference and algorithm.kl.place == "reward":
        penalties = kl_token_rewards(batch, columns["old_logprobs"], columns["ref_logprobs"], algorithm, coefficient)
    critics = (parts.trainer,) if algorithm.shares_critic else parts.critics
    with parts.spans.phase("values" if critics else "advantages"):
        values = [await critic.values(batch) for critic in critics]
    batch = weigh(batch, selection, algorithm, values=values, token_rewards=penalties, **columns)
    learned = Learned(batch=batch)
    if any(entry.has_demonstrations for entry in config.data):
        learned.metrics["data/demonstrations"] = float(sum(s.expert for s in batch.samples))
    await _train_critics(parts, learned, values)
    if parts.state.step >= (algorithm.critic.warmup_steps if algorithm.uses_critic else 0):
        await _train_policy(parts, learned, coefficient)
    _adapt(parts, learned, penalties, coefficient)
    return learned


def needs_old_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy before the update must be computed: otherwise it is the current one at the only update."""
    in_reward = algorithm.uses_reference and algorithm.kl.place == "reward"
    return algorithm.updates_per_step > 1 or in_reward


async def _logprobs(parts: Parts, batch: TrainingBatch) -> dict[str, Sequence[Any]]:
    """`old_logprobs` and `ref_logprobs` where something uses them, and what the same pass says of `attention`."""
    columns: dict[str, Sequence[Any]] = {}
    algorithm = parts.config.algorithm
    if needs_old_logprobs(algorithm):
        observed = attention_range(algorithm)
        with parts.spans.phase("old_logprobs"):
            if observed is None:
                columns["old_logprobs"] = await parts.trainer.logprobs(batch)
            else:
                old, seen = await parts.trainer.logprobs_and_attention(batch, observed)
                columns |= {"old_logprobs": old, "attention": seen}
    if parts.reference is not None:
        with parts.spans.phase("reference"):
            columns["ref_logprobs"] = await parts.reference.logprobs(batch)
    return columns


async def _train_critics(parts: Parts, learned: Learned, values: Sequence[Sequence[FloatArray]]) -> None:
    """Each critic learns from its share; a value clip is around what that critic itself said, not their mean."""
    if not parts.critics:
        return
    algorithm, step = parts.config.algorithm, parts.state.step
    with parts.spans.phase("train_critic"):
        for index, critic in enumerate(parts.critics):
            pairs = zip(learned.batch.samples, values[index], strict=True)
            batch = replace(
                learned.batch, samples=tuple(replace(s, old_values=said) for s, said in pairs if not s.expert)
            )
            own = critic_share(batch, index, len(parts.critics), first=step)
            for epoch in range(algorithm.critic.num_epochs):
                seed = (parts.config.seed, step, 1 + index, epoch)
                for part in minibatches(own, algorithm.updates.num_minibatches, seed):
                    learned.critic_results.append(await _update(parts, critic, part, value_loss(algorithm)))


async def _train_policy(parts: Parts, learned: Learned, coefficient: float) -> None:
    algorithm, step = parts.config.algorithm, parts.state.step
    loss = policy_loss(algorithm, coefficient)
    with parts.spans.phase("train"):
        for epoch in range(algorithm.updates.num_epochs):
            for part in minibatches(
                learned.batch, algorithm.updates.num_minibatches, (parts.config.seed, step, 0, epoch)
            ):
                learned.results.append(await _update(parts, parts.trainer, part, loss))


async def _update(parts: Parts, trainer: TrainerGroup, batch: TrainingBatch, loss: LossFn) -> StepResult:
    """One optimiser step; where the first of a step fails before it moved a weight, the last boundary still stands."""
    is_first, parts.mid_update = not parts.mid_update, True
    try:
        return await trainer.train_step(batch, loss)
    except (HalfUpdatedError, InfraError):
        raise
    except Exception:
        parts.mid_update = not (is_first and trainer.num_ranks == 1)  # other ranks would wait for the failed one
        raise


def _adapt(parts: Parts, learned: Learned, penalties: Sequence[FloatArray], coefficient: float) -> None:
    """Measure the divergence, and move the coefficient towards its target."""
    kl = parts.config.algorithm.kl
    if kl.coefficient == 0:
        return
    if penalties:
        own = [(p, s) for p, s in zip(penalties, learned.batch.samples, strict=True) if not s.expert]
        counted = [p[s.loss_mask] for p, s in own]
        measured = -float(np.concatenate(counted).mean()) / coefficient
    else:  # a loss of the user's own need not report it
        found = [r.metrics["policy/kl_reference"] for r in learned.results if "policy/kl_reference" in r.metrics]
        if not found:
            return
        measured = float(np.mean(found))
    learned.metrics |= {"training/kl/reference": measured, "training/kl/coefficient": coefficient}
    if kl.target is not None:
        parts.state.kl_coefficient = adapted_coefficient(
            coefficient, measured, target=kl.target, num_rollouts=len(learned.batch.samples), horizon=kl.horizon
        )
