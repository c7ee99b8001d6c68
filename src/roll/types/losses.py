"""Inputs and outputs of a loss.

A loss runs once per micro-batch on the *loss tokens* of its sequences, concatenated: shape [N]. It divides by counts of
the global batch, which are inputs, so its gradient does not depend on how the batch was split into micro-batches,
packed, ordered, or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from roll.types.arrays import BoolArray
from roll.types.training import AttentionStatistics

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossInputs", "LossOutputs", "SequenceAttention"]


class SequenceAttention(NamedTuple):
    """Attention statistics of one sample, for all of its tokens, including those outside the loss mask."""

    statistics: AttentionStatistics
    """Shape [L]."""
    mask: BoolArray
    """[L] bool: True for loss tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The loss tokens of one micro-batch; all [N] tensors are aligned.

    Sequences and counts are always present. Any other column is present if the network predicts it or if all samples of
    the batch have it.
    """

    sequence_ids: Tensor
    """[N] int64 in 0 … S-1: sequence of this micro-batch that a token belongs to, ascending."""
    sequence_lengths: Tensor
    """[S] float32: number of loss tokens of each sequence. A sequence whose history was rewritten has several samples,
    which may be in different micro-batches unless the loss sets `LossRequirements.whole_sequences`."""
    num_tokens: float
    """Number of loss tokens of the global batch."""
    num_expert_tokens: float = 0.0
    """Number of loss tokens of the global batch in demonstrations."""
    num_sequences: float
    """Number of sequences of the global batch with a loss token."""
    num_units: float
    """Number of units (groups, pairs) of the global batch with a loss token."""
    num_preferred: float = 0.0
    """Number of preferred sequences of the global batch with a loss token."""
    num_preferred_tokens: float = 0.0
    """Number of loss tokens of the global batch in preferred sequences."""
    max_lengths: Tensor
    """[S] float32: the longest possible answer to each sequence's prompt, for constant-length aggregation."""
    unit_ids: Tensor | None = None
    """[S] int64 in 0 … U-1: unit (group, pair) that a sequence belongs to. A unit may be incomplete unless the loss
    sets `LossRequirements.whole_units`."""
    logprobs: Tensor | None = None
    """[N] float32 log-probs of the current policy; carries the gradient. `None` for a critic."""
    old_logprobs: Tensor | None = None
    """[N] float32 log-probs of the policy before the update; no gradient. `None` for a critic."""
    rollout_logprobs: Tensor | None = None
    """[N] float32 log-probs of the inference engine."""
    behavior_logprobs: Tensor | None = None
    """[N] float32 log-probs of the policy version that sampled each token, computed by the trainer; no gradient. Equal
    to `old_logprobs` if that version is the policy before the update, or is unknown. `None` for a critic."""
    advantages: Tensor | None = None
    """[N] float32 advantages."""
    chunk_ids: Tensor | None = None
    """[N] int64 in 0 … C-1: chunk (turn) that a token belongs to, ascending. If `None`, each sequence is one chunk."""
    ref_logprobs: Tensor | None = None
    """[N] float32 log-probs of the reference model, if one is used."""
    expert: Tensor | None = None
    """[N] bool: True for tokens of demonstrations, which the policy imitates; `None` without demonstrations."""
    entropy: Tensor | None = None
    """[N] float32 entropy of the current policy over the vocabulary, with gradient; if the loss needs it."""
    entropy_mask: Tensor | None = None
    """[N] bool: True for tokens with an entropy bonus; `None` means all tokens."""
    full_kl: Tensor | None = None
    """[N] float32 KL(policy || reference) over the vocabulary, with gradient; if the loss needs it."""
    attention: tuple[SequenceAttention, ...] | None = None
    """Attention statistics of every sample, in the order of tokens; if the loss needs them."""
    values: Tensor | None = None
    """[N] float32 values of the critic, with gradient; in a critic's loss."""
    old_values: Tensor | None = None
    """[N] float32 values of the critic before the update."""
    returns: Tensor | None = None
    """[N] float32 returns, the critic's targets."""
    preferred: Tensor | None = None
    """[S] bool: True for the better sequence of a pair, and for a desirable single answer."""
    targets: Tensor | None = None
    """[S] float32: margin of the sequence's pair, or target score of a reward model."""
    teacher_logprobs: Tensor | None = None
    """[N] float32 log-probs of the teacher."""
    divergence: Tensor | None = None
    """[N] float32 divergence of the policy from a teacher over the vocabulary, with gradient; if the loss needs it."""
    teacher_top_logprobs: Tensor | None = None
    """[N, k] float32 top-k log-probs of the teacher."""
    top_logprobs: Tensor | None = None
    """[N, k] float32 log-probs of the current policy for the teacher's top-k tokens, with gradient; if the loss needs
    them."""

    @property
    def num_own_tokens(self) -> float:
        """Number of loss tokens of the global batch that the policy sampled."""
        return self.num_tokens - self.num_expert_tokens

    def require(self, name: str) -> Tensor:
        """Return the field of this name, such as `advantages`.

        Raises:
            ValueError: The field is `None`: the batch lacks it, or the network does not predict it.
        """
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"this loss requires {name}, but the batch has none")
        return column


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """A micro-batch's contributions to the loss and the metrics."""

    loss: Tensor
    """Scalar; the contributions of all micro-batches add up to the loss of the global batch."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient that add up over micro-batches and ranks."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient; their maximum over micro-batches and ranks is reported under `max/`."""
