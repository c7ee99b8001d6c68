"""From scored rollouts to what the trainer takes: flat token sequences with everything aligned to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roll.types import FloatArray, Rollout, TrainingBatch, TrainingSample

__all__ = ["build_batch", "build_sample"]


def build_sample(rollout: Rollout, advantage: float) -> TrainingSample:
    """One rollout as a training sample: prompt, then answer; the loss counts the answer.

    >>> # prompt of 3 tokens, answer of 2:  loss_mask [F F F T T],  advantages [0 0 0 a a]
    """
    num_prompt, num_answer = len(rollout.prompt_token_ids), len(rollout.token_ids)

    def aligned(values: FloatArray) -> FloatArray:
        return np.concatenate([np.zeros(num_prompt, np.float32), values.astype(np.float32, copy=False)])

    return TrainingSample(
        sample_id=rollout.rollout_id,
        group_id=rollout.draw_id,
        prefix_length=num_prompt,
        token_ids=np.concatenate([rollout.prompt_token_ids, rollout.token_ids]).astype(np.int32, copy=False),
        loss_mask=np.arange(num_prompt + num_answer) >= num_prompt,
        advantages=aligned(np.full(num_answer, advantage, np.float32)),
        rollout_logprobs=aligned(rollout.logprobs),
        policy_versions=np.concatenate([np.full(num_prompt, -1, np.int32), rollout.policy_versions]).astype(np.int32),
    )


def build_batch(
    rollouts: Sequence[Rollout], advantages: Mapping[str, float], *, temperature: float, max_length: int
) -> TrainingBatch:
    """All rollouts of a step as one batch; `advantages` by rollout id."""
    return TrainingBatch(
        samples=tuple(build_sample(rollout, advantages[rollout.rollout_id]) for rollout in rollouts),
        temperature=temperature,
        max_length=max_length,
    )
