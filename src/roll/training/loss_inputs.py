"""From a micro-batch's log-probs and its samples' arrays to what a loss sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.inputs import LossInputs, SequenceAttention
from roll.training.layout import PackedLayout
from roll.types import AttentionStatistics, FloatArray, TrainingBatch, TrainingSample

__all__ = ["loss_inputs", "value_inputs"]


def loss_inputs(
    layout: PackedLayout,
    batch: TrainingBatch,
    predicted: Tensor,
    *,
    entropy: Tensor | None = None,
    full_kl: Tensor | None = None,
    values: Tensor | None = None,
    attention: Mapping[int, AttentionStatistics] | None = None,
) -> LossInputs:
    """The loss tokens of a micro-batch, sequence after sequence.

    Args:
        layout: of the micro-batch, built for the tokens in the loss.
        batch: the global batch.
        predicted: [M] log-probs of the layout's predictions, with gradient.
        entropy: [M] of their distributions, with gradient, where the loss asks for it.
        full_kl: [M] their distributions' divergence from the reference's, likewise.
        values: [M] of the states before them, with gradient, where the loss asks for it; samples then have `returns`.
        attention: by the samples' index in their batch, where the loss asks for it and samples do not bring it.

    Raises:
        ValueError: some samples have `ref_logprobs`, `attention`, `old_values`, or of a loss with values `returns`, and
            others do not.
    """
    device, dtype = predicted.device, predicted.dtype
    spans = layout.spans
    samples = [batch.samples[span.index] for span in spans]

    def tokens(array_of: Callable[[TrainingSample], FloatArray | None]) -> Tensor:
        return _tokens(array_of, samples, layout, predicted)

    order = torch.from_numpy(np.concatenate([span.prediction_index for span in spans])).to(device)
    lengths = torch.tensor([len(span.token_index) for span in spans], device=device)
    logprobs = predicted.index_select(0, order)
    with_reference = [s.ref_logprobs is not None for s in samples]
    if any(with_reference) and not all(with_reference):
        raise ValueError("some samples of the batch have ref_logprobs and others do not")
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=_old_logprobs(logprobs.detach(), samples, layout),
        rollout_logprobs=tokens(lambda s: s.rollout_logprobs),
        advantages=tokens(lambda s: s.advantages),
        sequence_ids=torch.repeat_interleave(torch.arange(len(spans), device=device), lengths),
        sequence_lengths=lengths.to(dtype),
        num_tokens=float(batch.num_loss_tokens),
        num_sequences=float(batch.num_sequences),
        max_lengths=torch.tensor([s.max_length for s in samples], device=device, dtype=dtype),
        chunk_ids=_chunk_ids(samples, layout, device),
        ref_logprobs=tokens(lambda s: s.ref_logprobs) if all(with_reference) else None,
        expert=_repeated([s.expert for s in samples], lengths, device) if any(s.expert for s in samples) else None,
        entropy=None if entropy is None else entropy.index_select(0, order),
        entropy_mask=_entropy_mask(samples, layout, device),
        full_kl=None if full_kl is None else full_kl.index_select(0, order),
        attention=_attention(samples, layout, attention),
        values=None if values is None else values.index_select(0, order),
        old_values=None if values is None else _old_values(samples, layout, predicted),
        returns=None if values is None else _returns(samples, layout, predicted),
    )


def value_inputs(layout: PackedLayout, batch: TrainingBatch, predicted: Tensor) -> LossInputs:
    """As `loss_inputs`, for a critic: values and their targets in place of log-probs.

    Args:
        layout: of the micro-batch, built for the tokens in the loss.
        batch: the global batch; every sample has `returns`.
        predicted: [M] values of the states before the layout's predictions, with gradient.

    Raises:
        ValueError: a sample has no `returns`, or some have `old_values` and others do not.
    """
    samples = [batch.samples[span.index] for span in layout.spans]
    common = loss_inputs(layout, batch, predicted)
    return replace(
        common,
        logprobs=common.rollout_logprobs,
        old_logprobs=common.rollout_logprobs,
        values=common.logprobs,
        old_values=_old_values(samples, layout, predicted),
        returns=_returns(samples, layout, predicted),
    )


def _returns(samples: list[TrainingSample], layout: PackedLayout, like: Tensor) -> Tensor:
    """[N] What values should be; 0 for an expert that has no returns."""
    if any(s.returns is None and not s.expert for s in samples):
        raise ValueError("a critic learns from returns, which some samples of the batch do not have")
    return _tokens(lambda s: np.zeros(len(s), np.float32) if s.returns is None else s.returns, samples, layout, like)


def _old_values(samples: list[TrainingSample], layout: PackedLayout, like: Tensor) -> Tensor | None:
    """[N] What values were; 0 for an expert that has none."""
    with_old = [s.old_values is not None for s in samples if not s.expert]
    if any(with_old) and not all(with_old):
        raise ValueError("some samples of the batch have old_values and others do not")
    if with_old and not with_old[0]:
        return None
    return _tokens(
        lambda s: np.zeros(len(s), np.float32) if s.old_values is None else s.old_values, samples, layout, like
    )


def _tokens(
    array_of: Callable[[TrainingSample], FloatArray | None],
    samples: list[TrainingSample],
    layout: PackedLayout,
    like: Tensor,
) -> Tensor:
    """[N] one of the samples' arrays at the loss tokens."""
    parts = [np.asarray(array_of(s))[span.token_index] for s, span in zip(samples, layout.spans, strict=True)]
    return torch.from_numpy(np.concatenate(parts)).to(like.device, like.dtype)


def _repeated(values: list[bool], lengths: Tensor, device: torch.device) -> Tensor:
    """A value per sequence as one per token."""
    return torch.repeat_interleave(torch.tensor(values, device=device), lengths)


def _chunk_ids(samples: list[TrainingSample], layout: PackedLayout, device: torch.device) -> Tensor | None:
    """Chunks of all sequences, numbered through."""
    if all(s.chunk_ids is None for s in samples):
        return None
    parts, total = [], 0
    for sample, span in zip(samples, layout.spans, strict=True):
        own = sample.chunk_ids
        ids = np.zeros(len(span.token_index), np.int64) if own is None else own[span.token_index].astype(np.int64)
        dense = np.unique(ids, return_inverse=True)[1].reshape(-1)
        parts.append(dense + total)
        total += int(dense.max()) + 1 if len(dense) else 0
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _entropy_mask(samples: list[TrainingSample], layout: PackedLayout, device: torch.device) -> Tensor | None:
    if all(s.entropy_mask is None for s in samples):
        return None
    parts = [
        np.ones(len(span.token_index), np.bool_) if s.entropy_mask is None else s.entropy_mask[span.token_index]
        for s, span in zip(samples, layout.spans, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _attention(
    samples: list[TrainingSample], layout: PackedLayout, found: Mapping[int, AttentionStatistics] | None
) -> tuple[SequenceAttention, ...] | None:
    """Those that samples bring; where they bring none, the current ones."""
    if found is None and all(s.attention is None for s in samples):
        return None
    result = []
    for sample, span in zip(samples, layout.spans, strict=True):
        own = sample.attention if found is None else found[span.index]
        if own is None:
            raise ValueError("some samples of the batch have attention and others do not")
        result.append(SequenceAttention(own, sample.loss_mask))
    return tuple(result)


def _old_logprobs(current: Tensor, samples: list[TrainingSample], layout: PackedLayout) -> Tensor:
    """Those that samples bring; for the others the current ones, which they equal before the first update."""
    if all(s.old_logprobs is None for s in samples):
        return current
    parts = current.split([len(span.token_index) for span in layout.spans])
    return torch.cat([
        part if s.old_logprobs is None else torch.from_numpy(s.old_logprobs[span.token_index]).to(part)
        for part, s, span in zip(parts, samples, layout.spans, strict=True)
    ])  # fmt: skip
