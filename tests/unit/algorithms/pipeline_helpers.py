"""A step of learning, from rollouts to the loss, as the pipeline takes it; float64 where ROLL leaves the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cases import MAX_LENGTH, after_prompt, attention_of, inputs_of, to_groups
from reference_advantages import Attempt

from roll.algorithms.losses import AttentionCreditLoss
from roll.algorithms.selection import Selection, select_training_rollouts
from roll.algorithms.token_weights import add_advantages, compute_kl_token_rewards
from roll.config.algorithm import AlgorithmConfig
from roll.data.samples import build_batch
from roll.pipelines.learning.losses import build_policy_loss
from roll.types import LossInputs, LossOutputs, TrainingBatch


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step made of its rollouts."""

    algorithm: AlgorithmConfig
    selection: Selection
    batch: TrainingBatch
    attempts: dict[str, Attempt]

    @property
    def advantages(self) -> dict[str, list[float]]:
        """Of the loss tokens, by sample."""
        return {s.sample_id: s.advantages[s.loss_mask].tolist() for s in self.batch.samples}

    def weighted(self, sample_id: str) -> list[float]:
        """Advantages of a sample's loss tokens as they enter the loss, after attention credit."""
        batch = replace(self.batch, samples=tuple(s for s in self.batch.samples if s.sample_id == sample_id))
        seen: list[LossInputs] = []

        def look(inputs: LossInputs) -> LossOutputs:
            seen.append(inputs)
            return LossOutputs(loss=inputs.logprobs.sum())

        loss = build_policy_loss(self.algorithm)
        (replace(loss, loss=look) if isinstance(loss, AttentionCreditLoss) else look)(inputs_of(batch, self.attempts))
        return seen[0].advantages.tolist()

    def inputs(self, **given: Any) -> LossInputs:
        return inputs_of(self.batch, self.attempts, **given)

    def loss(self, **given: Any) -> tuple[LossOutputs, np.ndarray]:
        """Loss and gradient in every loss token's log-prob."""
        inputs = self.inputs(**given)
        outputs = build_policy_loss(self.algorithm)(inputs)
        outputs.loss.backward()
        assert inputs.logprobs.grad is not None
        return outputs, inputs.logprobs.grad.numpy()


def algorithm_of(name: str, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"type": name, **keys})


def take_step(algorithm: AlgorithmConfig, attempts: Sequence[Attempt]) -> Step:
    by_name = {attempt.name: attempt for attempt in attempts}
    own_attempts = [a for a in attempts if not a.expert]
    greedy = to_groups(own_attempts, greedy=True) if algorithm.advantage.mean == "greedy" else ()
    shown = [r for group in to_groups([a for a in attempts if a.expert]) for r in group.rollouts]
    selection = select_training_rollouts(
        to_groups(own_attempts), algorithm, max_new_tokens=MAX_LENGTH, greedy=greedy, demonstrations=shown
    )
    batch = build_batch(selection.rollouts, temperature=1.0, max_new_tokens=MAX_LENGTH)
    own = [by_name[s.sample_id] for s in batch.samples]
    old, ref = [after_prompt(a.old) for a in own], [after_prompt(a.ref) for a in own]
    rewards = []
    if algorithm.uses_reference and algorithm.kl.apply_to == "reward":
        rewards = compute_kl_token_rewards(batch, old, ref, algorithm, algorithm.kl.coefficient)
    critics = algorithm.critic.num_critics if algorithm.uses_critic else 0
    batch = add_advantages(
        batch,
        selection,
        algorithm,
        values=[[after_prompt(a.values[m]) for a in own] for m in range(critics)],
        token_rewards=rewards,
        old_logprobs=old,
        ref_logprobs=ref,
        attention=[attention_of(a) for a in own],
    )
    return Step(algorithm=algorithm, selection=selection, batch=batch, attempts=by_name)
