"""What a loss sees, and what it returns.

A loss runs once per micro-batch on the *loss tokens* of its sequences, concatenated: shape [N]. It divides by
counts of the global batch, which are given, so its gradient does not depend on how the batch was cut into
micro-batches, packed, ordered, or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["LossInputs", "LossOutputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Tokens of one micro-batch that the loss counts; all [N] tensors are aligned."""

    logprobs: Tensor
    """[N] float32, of the current policy; carries the gradient."""
    old_logprobs: Tensor
    """[N] float32, of the policy before the update; no gradient."""
    rollout_logprobs: Tensor
    """[N] float32, of the inference engine."""
    advantages: Tensor
    """[N] float32."""
    sequence_ids: Tensor
    """[N] int64 in 0 … S-1: which sequence of this micro-batch a token belongs to, ascending."""
    sequence_lengths: Tensor
    """[S] float32: loss tokens of each sequence. A sequence is never split over micro-batches."""
    num_tokens: float
    """Loss tokens of the global batch."""
    num_sequences: float
    """Sequences of the global batch that have a loss token."""
    max_length: float
    """Longest possible answer, for constant-length aggregation."""
    ref_logprobs: Tensor | None = None
    """[N] float32, of the reference model, where one is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """A micro-batch's share of the loss and of the metrics."""

    loss: Tensor
    """Scalar; shares of all micro-batches add up to the loss of the global batch."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient that add up over micro-batches and ranks; `max/…` ones are maximised
    instead.
    """
