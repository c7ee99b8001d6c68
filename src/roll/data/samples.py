"""Converts scored rollouts to training samples: flat token sequences with aligned loss masks and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.types import IntArray, MediaSpan, Rollout, TrainingBatch, TrainingSample, slice_media

__all__ = ["build_batch", "build_samples"]


def build_samples(rollout: Rollout, *, max_new_tokens: int = 1) -> tuple[TrainingSample, ...]:
    """Build one training sample per context of a rollout, as the engine saw it; train only on the policy's tokens.

    >>> # prompt of 3 tokens, answer of 2:                     loss_mask [F F F T T]
    >>> # then a new context of 4 tokens, answer of 1:         loss_mask [F F F F T]

    The tokens that follow each sample's context, concatenated in order, are the rollout's tokens. The first sample has
    the rollout's ID; each later sample has this ID with the sample's number appended.

    Args:
        rollout: The rollout.
        max_new_tokens: Maximum length of one turn's answer.
    """
    num_tokens = len(rollout.token_ids)
    written = np.zeros(num_tokens, dtype=np.bool_)
    chunks = np.full(num_tokens, -1, dtype=np.int32)
    for index, turn in enumerate(rollout.spans):
        written[turn.start : turn.end] = True
        chunks[turn.start : turn.end] = index

    # Where the template rewrote earlier turns, the engine saw another context. Each context becomes one sample, so that
    # every token is trained after the tokens that it was sampled after.
    cuts = rollout.contexts
    ends = [start for start, _ in cuts[1:]] + [num_tokens]

    def build_sample(index: int, context: IntArray, media: Sequence[MediaSpan], trained_slice: slice) -> TrainingSample:
        def prepend_context(values: NDArray[Any], context_value: Any) -> NDArray[Any]:
            return np.concatenate([np.full(len(context), context_value, values.dtype), values[trained_slice]])

        logprobs = np.where(written, rollout.logprobs, 0.0).astype(np.float32)
        experts = rollout.experts[index] if index < len(rollout.experts) else None
        return TrainingSample(
            sample_id=f"{rollout.sample_id}.{index}" if index else rollout.sample_id,
            unit=rollout.draw_id,
            sequence=str(rollout.rollout_id) if len(cuts) > 1 else "",
            prefix_length=len(context),
            token_ids=np.concatenate([context, rollout.token_ids[trained_slice]]).astype(np.int32, copy=False),
            loss_mask=prepend_context(written, False),
            media=(*media, *slice_media(rollout.media, trained_slice.start, trained_slice.stop, len(context))),
            advantages=np.zeros(len(context) + trained_slice.stop - trained_slice.start, np.float32),
            rollout_logprobs=prepend_context(logprobs, 0.0),
            policy_versions=prepend_context(rollout.policy_versions.astype(np.int32), -1),
            chunk_ids=prepend_context(chunks, -1) if rollout.turns else None,
            max_length=max_new_tokens * rollout.prompt.turns,
            expert=rollout.expert,
            experts=experts
            if experts is not None and len(experts) == len(context) + trained_slice.stop - trained_slice.start
            else None,
        )

    return tuple(
        build_sample(number, context, media, slice(start, end))
        for number, ((start, context), media, end) in enumerate(zip(cuts, rollout.context_media, ends, strict=True))
    )


def build_batch(rollouts: Sequence[Rollout], *, temperature: float, max_new_tokens: int) -> TrainingBatch:
    """Build a batch of all rollouts of a step, with advantages of 0."""
    return TrainingBatch(
        samples=tuple(s for rollout in rollouts for s in build_samples(rollout, max_new_tokens=max_new_tokens)),
        temperature=temperature,
    )
