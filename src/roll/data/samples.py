"""From scored rollouts to what the trainer takes: flat token sequences with everything aligned to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.types import Rollout, TrainingBatch, TrainingSample

__all__ = ["build_batch", "build_sample"]


def build_sample(rollout: Rollout, *, max_new_tokens: int = 1) -> TrainingSample:
    """One rollout as a training sample: prompt, then answer; the loss counts what the policy wrote.

    >>> # prompt of 3 tokens, answer of 2:  loss_mask [F F F T T]

    Args:
        rollout: the attempt.
        max_new_tokens: longest answer of one turn.
    """
    num_prompt, num_answer = len(rollout.prompt_token_ids), len(rollout.token_ids)
    written = np.zeros(num_answer, dtype=np.bool_)
    chunks = np.full(num_answer, -1, dtype=np.int32)
    for index, turn in enumerate(rollout.spans):
        written[turn.start : turn.end] = True
        chunks[turn.start : turn.end] = index

    return TrainingSample(
        sample_id=rollout.sample_id,
        unit=rollout.draw_id,
        prefix_length=num_prompt,
        token_ids=np.concatenate([rollout.prompt_token_ids, rollout.token_ids]).astype(np.int32, copy=False),
        loss_mask=np.concatenate([np.zeros(num_prompt, np.bool_), written]),
        attachments=rollout.prompt.attachments,
        advantages=np.zeros(num_prompt + num_answer, np.float32),
        rollout_logprobs=np.concatenate([np.zeros(num_prompt), np.where(written, rollout.logprobs, 0.0)]).astype(
            np.float32
        ),
        policy_versions=np.concatenate([np.full(num_prompt, -1, np.int32), rollout.policy_versions]).astype(np.int32),
        chunk_ids=np.concatenate([np.full(num_prompt, -1, np.int32), chunks]) if rollout.turns else None,
        max_length=max_new_tokens * rollout.prompt.turns,
        expert=rollout.expert,
    )


def build_batch(rollouts: Sequence[Rollout], *, temperature: float, max_new_tokens: int) -> TrainingBatch:
    """All rollouts of a step as one batch, with advantages of 0."""
    return TrainingBatch(
        samples=tuple(build_sample(rollout, max_new_tokens=max_new_tokens) for rollout in rollouts),
        temperature=temperature,
    )
