"""What a loss sees, and what it returns.

A loss runs once per micro-batch on the *loss tokens* of its sequences, concatenated: shape [N]. It divides by
counts of the global batch, which are given, so its gradient does not depend on how the batch was cut into
micro-batches, packed, ordered, or spread over ranks.
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
    """Of one sample, with all of its tokens: also those that the loss does not count."""

    statistics: AttentionStatistics
    """[L]"""
    mask: BoolArray
    """[L] the tokens that the loss counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Tokens of one micro-batch that the loss counts; all [N] tensors are aligned.

    Every loss has sequences and counts; the other columns are there where the network predicts them, or all samples of
    the batch bring them.
    """

    sequence_ids: Tensor
    """[N] int64 in 0 … S-1: which sequence of this micro-batch a token belongs to, ascending."""
    sequence_lengths: Tensor
    """[S] float32: loss tokens of each sequence. One that is several samples, since its history was rewritten, may have
    some of them in other micro-batches, but not where the loss `Needs.whole_sequences`."""
    num_tokens: float
    """Loss tokens of the global batch."""
    num_expert_tokens: float = 0.0
    """Those of them that an expert wrote."""
    num_sequences: float
    """Sequences of the global batch that have a loss token."""
    num_units: float
    """Units (groups, pairs) of the global batch that have a loss token."""
    num_preferred: float = 0.0
    """Preferred sequences of the global batch that have a loss token."""
    num_preferred_tokens: float = 0.0
    """Their loss tokens."""
    max_lengths: Tensor
    """[S] float32: the longest possible answer to each sequence's prompt, for constant-length aggregation."""
    unit_ids: Tensor | None = None
    """[S] int64 in 0 … U-1: which unit of samples a sequence belongs to; whole ones, where the loss needs them."""
    logprobs: Tensor | None = None
    """[N] float32, of the current policy; carries the gradient. `None` for a critic."""
    old_logprobs: Tensor | None = None
    """[N] float32, of the policy before the update; no gradient. `None` for a critic."""
    rollout_logprobs: Tensor | None = None
    """[N] float32, of the inference engine."""
    behavior_logprobs: Tensor | None = None
    """[N] float32, of the policy version that sampled each token, as the trainer computes it; no gradient. Equal to
    `old_logprobs` where that is the policy before the update, or is not known. `None` for a critic."""
    advantages: Tensor | None = None
    """[N] float32."""
    chunk_ids: Tensor | None = None
    """[N] int64 in 0 … C-1: which chunk (turn) a token belongs to, ascending; `None`: a sequence is one chunk."""
    ref_logprobs: Tensor | None = None
    """[N] float32, of the reference model, where one is used."""
    expert: Tensor | None = None
    """[N] bool: the token is not the policy's but an expert's, to be imitated; `None`: none is."""
    entropy: Tensor | None = None
    """[N] float32, of the current policy over the vocabulary, with gradient; where the loss asks for it."""
    entropy_mask: Tensor | None = None
    """[N] bool: the token gets an entropy bonus; `None`: every one."""
    full_kl: Tensor | None = None
    """[N] float32, KL(policy || reference) over the vocabulary, with gradient; where the loss asks for it."""
    attention: tuple[SequenceAttention, ...] | None = None
    """Of every sample, in the order of tokens, what the policy's attention says of it; where the loss asks for it."""
    values: Tensor | None = None
    """[N] float32, of the critic, with gradient; in a critic's loss."""
    old_values: Tensor | None = None
    """[N] float32, of the critic before the update."""
    returns: Tensor | None = None
    """[N] float32, what the critic should say."""
    preferred: Tensor | None = None
    """[S] bool: a sequence is the better one of its pair; alone, it is wanted."""
    targets: Tensor | None = None
    """[S] float32: the margin of its pair, or the score that a reward model should give."""
    teacher_logprobs: Tensor | None = None
    """[N] float32, of the model that is imitated."""
    divergence: Tensor | None = None
    """[N] float32, of the policy from a teacher over the vocabulary, with gradient; where the loss asks for it."""
    teacher_top_logprobs: Tensor | None = None
    """[N, k] float32, of the likeliest tokens of the model that is imitated."""
    top_logprobs: Tensor | None = None
    """[N, k] float32, of the same tokens, of the current policy, with gradient; where the loss asks for it."""

    @property
    def num_own_tokens(self) -> float:
        """Return the loss tokens of the global batch that the policy itself sampled."""
        return self.num_tokens - self.num_expert_tokens

    def need(self, name: str) -> Tensor:
        """The column of this name, for a loss that cannot do without it.

        Raises:
            ValueError: the batch does not have it, or the network does not predict it.
        """
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"this loss needs {name}, which the batch does not have")
        return column


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """A micro-batch's share of the loss and of the metrics."""

    loss: Tensor
    """Scalar; shares of all micro-batches add up to the loss of the global batch."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient that add up over micro-batches and ranks."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient of which the largest counts. They are reported below `max/`."""
