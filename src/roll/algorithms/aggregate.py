"""Loss aggregation: each token gets a weight, and the loss is the weighted sum of the per-token losses.

The weights count tokens and sequences of the global batch, so the losses of all micro-batches and ranks add up to the
loss of the global batch.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from roll.types import LossInputs

__all__ = ["Aggregation", "compute_aggregation_weights"]

Aggregation: TypeAlias = Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"]


def compute_aggregation_weights(inputs: LossInputs, aggregation: Aggregation) -> Tensor:
    """Compute the weight of every token in the loss of the global batch, shape [N].

    `sequence_mean`: 1 / (number of tokens in the sequence x number of sequences), GRPO, arXiv 2402.03300.
    `token_mean`: 1 / number of tokens, DAPO, arXiv 2503.14476.
    `constant_length`: 1 / (longest possible answer to the prompt x number of sequences), Dr. GRPO, arXiv 2503.20783.
    `sequence_sum`: 1 / number of sequences, which sums the log-probs of each sequence, REINFORCE.

    Raises:
        ValueError: The aggregation is unknown.
    """
    if aggregation == "sequence_mean":
        return (1.0 / (inputs.sequence_lengths * inputs.num_sequences))[inputs.sequence_ids]
    if aggregation == "token_mean":
        return inputs.sequence_lengths.new_full(inputs.sequence_ids.shape, 1.0 / inputs.num_tokens)
    if aggregation == "constant_length":
        return (1.0 / (inputs.max_lengths * inputs.num_sequences))[inputs.sequence_ids]
    if aggregation == "sequence_sum":
        return inputs.sequence_lengths.new_full(inputs.sequence_ids.shape, 1.0 / inputs.num_sequences)
    raise ValueError(
        f"unknown aggregation '{aggregation}': expected one of sequence_mean, token_mean, constant_length or "
        "sequence_sum"
    )
