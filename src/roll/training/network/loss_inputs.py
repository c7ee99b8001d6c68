"""Build a loss's inputs from a network's predictions and the samples' arrays."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.models.transfers import move_to_device, to_tensor
from roll.training.network.distributions import Predictions
from roll.training.packing.layout import Int64Array, PackedLayout
from roll.types import (
    AttentionStatistics,
    BatchCounts,
    FloatArray,
    LossInputs,
    SequenceAttention,
    TrainingBatch,
    TrainingSample,
)

__all__ = ["build_loss_inputs", "collect_teacher_top_ids"]


def build_loss_inputs(
    layout: PackedLayout,
    batch: TrainingBatch,
    predicted: Predictions,
    counts: BatchCounts,
    attention: Mapping[int, AttentionStatistics] | None = None,
) -> LossInputs:
    """Build the loss inputs of a micro-batch, with its loss tokens in the order of sequences.

    Args:
        layout: The layout of the micro-batch, built for the tokens in the loss.
        batch: The global batch.
        predicted: The network's outputs at the layout's predictions, with gradient.
        counts: The global counts by which the loss is divided.
        attention: The current attention statistics by sample index, if the loss needs them and the samples have none.

    Raises:
        ValueError: Some samples of the batch have a column and others do not.
    """
    like = predicted.tensors[0]
    layout, numbers = _group_by_sequence(layout, batch)
    samples = [batch.samples[span.index] for span in layout.spans]
    columns = move_to_device(_collect_columns(predicted, layout, numbers, batch, like.dtype), like.device)
    order = columns.pop("order")
    chosen = Predictions(*(None if tensor is None else tensor.index_select(0, order) for tensor in predicted))
    recorded, missing, behavior = (columns.pop(name, None) for name in ("old_logprobs", "missing", "behavior_logprobs"))
    old = None
    if chosen.logprobs is not None:
        old = _fill(recorded, chosen.logprobs.detach(), missing)
        # NaN marks tokens without a recorded value.
        behavior = _fill(behavior, old, None if behavior is None else behavior.isnan())
    return LossInputs(
        **columns,
        **asdict(counts),
        logprobs=chosen.logprobs,
        old_logprobs=old,
        behavior_logprobs=behavior,
        entropy=chosen.entropy,
        full_kl=chosen.full_kl,
        attention=_gather_attention(samples, layout, attention),
        values=chosen.values,
        divergence=chosen.divergence,
        top_logprobs=chosen.top_logprobs,
    )


def _collect_columns(
    predicted: Predictions, layout: PackedLayout, numbers: Int64Array, batch: TrainingBatch, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the columns of the loss that do not depend on the network, as CPU tensors: all that exist.

    Columns have the names of `LossInputs`, except for `order`, the prediction of each loss token [N], and `missing`,
    which is true for tokens without old log-probs [N].
    """
    spans = layout.spans
    samples = [batch.samples[span.index] for span in spans]
    firsts = [samples[i] for i in np.unique(numbers, return_index=True)[1]]
    lengths = np.array([len(span.token_index) for span in spans])
    expert = np.repeat([s.expert for s in samples], lengths)
    gather = functools.partial(_gather_column, batch=batch, layout=layout, dtype=dtype)
    by_sequence = functools.partial(_gather_by_sequence, batch=batch, firsts=firsts)
    found = {
        "order": to_tensor(np.concatenate([span.prediction_index for span in spans])),
        "unit_ids": to_tensor(np.unique([s.unit for s in firsts], return_inverse=True)[1]),
        "sequence_ids": to_tensor(np.repeat(numbers, lengths)),
        "sequence_lengths": _compute_sequence_lengths(batch, layout, firsts).to(dtype),
        "max_lengths": torch.tensor([s.max_length for s in firsts]).to(dtype),
        "chunk_ids": _number_chunks(samples, layout),
        "expert": to_tensor(expert) if expert.any() else None,
        "entropy_mask": _gather_entropy_mask(samples, layout),
        "preferred": by_sequence("preferred", dtype=torch.bool),
        "targets": by_sequence("target", dtype=dtype),
    }
    found |= {name: gather(name) for name in ("rollout_logprobs", "advantages", "ref_logprobs", "teacher_logprobs")}
    if predicted.logprobs is not None:
        for name in ("old_logprobs", "behavior_logprobs"):
            found[name] = _gather_optional([getattr(s, name) for s in samples], layout, dtype)
        without = np.array([s.old_logprobs is None for s in samples])
        found["missing"] = to_tensor(np.repeat(without, lengths)) if without.any() and not without.all() else None
    if predicted.values is not None:
        found |= {name: gather(name, required_for_experts=False) for name in ("old_values", "returns")}
    if predicted.top_logprobs is not None:
        found["teacher_top_logprobs"] = _gather_teacher_top(batch, layout, dtype)
    return {name: column for name, column in found.items() if column is not None}


def _fill(recorded: Tensor | None, others: Tensor, missing: Tensor | None) -> Tensor:
    """Return the recorded log-probs [N], and `others` where they are missing: all if `recorded` is `None`, none if only
    `missing` is `None`.
    """
    if recorded is None:
        return others
    return recorded if missing is None else torch.where(missing, others, recorded)


def _group_by_sequence(layout: PackedLayout, batch: TrainingBatch) -> tuple[PackedLayout, Int64Array]:
    """Return the layout with the spans of each sequence adjacent, and the sequence number [n] of each span."""
    names = [batch.samples[span.index].sequence or span.index for span in layout.spans]
    known: dict[str | int, int] = {}
    numbers = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)
    if len(known) == len(names):
        return layout, numbers
    order = sorted(range(len(names)), key=lambda i: (numbers[i], layout.spans[i].index))
    return replace(layout, spans=tuple(layout.spans[i] for i in order)), numbers[order]


def _compute_sequence_lengths(
    batch: TrainingBatch, layout: PackedLayout, first_samples: Sequence[TrainingSample]
) -> Tensor:
    """Return the number of loss tokens [S] of each sequence, summed over its samples in the whole batch."""
    if len(first_samples) == len(layout.spans) and not any(s.sequence for s in first_samples):
        return torch.tensor([len(span.token_index) for span in layout.spans])
    counts: Counter[str] = Counter()
    for sample in batch.samples:
        counts[sample.sequence] += int(sample.loss_mask.sum())
    return torch.tensor([counts[s.sequence] if s.sequence else int(s.loss_mask.sum()) for s in first_samples])


def collect_teacher_top_ids(layout: PackedLayout, batch: TrainingBatch) -> Int64Array:
    """Return the teacher's top-k tokens [M, k] at every prediction of a micro-batch.

    Raises:
        ValueError: A sample of the batch has no top-k tokens, or the samples differ in k.
    """
    tops = [s.teacher_top for s in batch.samples if s.loss_mask.any()]
    sizes = {None if top is None else top.token_ids.shape[1] for top in tops}
    if len(sizes) != 1 or (size := sizes.pop()) is None:
        raise ValueError(
            "the loss requires teacher_top for every sample of the batch, with the same number of tokens k"
        )
    ids = np.zeros((len(layout.rows), size), dtype=np.int64)
    for span in layout.spans:
        top = batch.samples[span.index].teacher_top
        assert top is not None
        ids[span.prediction_index] = top.token_ids[span.token_index]
    return ids


def _gather_teacher_top(batch: TrainingBatch, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    """Return the teacher's top-k log-probs [N, k]; `collect_teacher_top_ids` has checked that every sample has them."""
    tops = [(batch.samples[span.index].teacher_top, span.token_index) for span in layout.spans]
    parts = [top.logprobs[places] for top, places in tops if top is not None]
    return to_tensor(np.concatenate(parts), dtype)


def _gather_by_sequence(
    name: str, batch: TrainingBatch, firsts: Sequence[TrainingSample], dtype: torch.dtype
) -> Tensor | None:
    """Return the values of the field `name` as a tensor [S]; `firsts` contains one sample per sequence.

    Return `None` if no sample of the batch has the field.

    Raises:
        ValueError: Some samples of the batch have a value and others do not.
    """
    lacking = {getattr(s, name) is None for s in batch.samples}
    if len(lacking) == 2:
        raise ValueError(f"`{name}` must be set for all samples of the batch or for none")
    return None if True in lacking else torch.tensor([getattr(s, name) for s in firsts], dtype=dtype)


def _gather_column(
    name: str, batch: TrainingBatch, layout: PackedLayout, dtype: torch.dtype, *, required_for_experts: bool = True
) -> Tensor | None:
    """Return a field's values at the loss tokens, shape [N]; `None` if no sample of the batch has the field.

    Args:
        name: The sample's field.
        batch: The global batch. It determines whether the column exists, so that all micro-batches agree.
        layout: The layout of the micro-batch.
        dtype: The dtype of the result.
        required_for_experts: Whether expert samples must have the field too; otherwise expert samples without it get 0.

    Raises:
        ValueError: Some samples have the field and others do not.
    """
    lacking = {getattr(s, name) is None for s in batch.samples if required_for_experts or not s.expert}
    if len(lacking) == 2:
        raise ValueError(f"`{name}` must be set for all samples of the batch or for none")
    if True in lacking:
        return None
    arrays = [(getattr(batch.samples[span.index], name), span.token_index) for span in layout.spans]
    parts = [np.zeros(len(places), np.float32) if array is None else array[places] for array, places in arrays]
    return to_tensor(np.concatenate(parts), dtype)


def _number_chunks(samples: list[TrainingSample], layout: PackedLayout) -> Tensor | None:
    """Return the chunk number [N] of each loss token, unique over all samples; `None` if no sample has chunks."""
    if all(s.chunk_ids is None for s in samples):
        return None
    parts, total = [], 0
    for sample, span in zip(samples, layout.spans, strict=True):
        chunk_ids = sample.chunk_ids
        ids = (
            np.zeros(len(span.token_index), np.int64)
            if chunk_ids is None
            else chunk_ids[span.token_index].astype(np.int64)
        )
        dense = np.unique(ids, return_inverse=True)[1].reshape(-1)
        parts.append(dense + total)
        total += int(dense.max()) + 1 if len(dense) else 0
    return to_tensor(np.concatenate(parts))


def _gather_entropy_mask(samples: list[TrainingSample], layout: PackedLayout) -> Tensor | None:
    if all(s.entropy_mask is None for s in samples):
        return None
    parts = [
        np.ones(len(span.token_index), np.bool_) if s.entropy_mask is None else s.entropy_mask[span.token_index]
        for s, span in zip(samples, layout.spans, strict=True)
    ]
    return to_tensor(np.concatenate(parts))


def _gather_attention(
    samples: list[TrainingSample], layout: PackedLayout, current: Mapping[int, AttentionStatistics] | None
) -> tuple[SequenceAttention, ...] | None:
    """Return the current attention statistics if given, else the samples' statistics; `None` if there are none."""
    if current is None and all(s.attention is None for s in samples):
        return None
    result = []
    for sample, span in zip(samples, layout.spans, strict=True):
        statistics = sample.attention if current is None else current[span.index]
        if statistics is None:
            raise ValueError("`attention` statistics must be set for all samples of the batch or for none")
        result.append(SequenceAttention(statistics, sample.loss_mask))
    return tuple(result)


def _gather_optional(arrays: Sequence[FloatArray | None], layout: PackedLayout, dtype: torch.dtype) -> Tensor | None:
    """Return the samples' values at the loss tokens [N], NaN where a sample has none; `None` if no sample has one."""
    if all(array is None for array in arrays):
        return None
    parts = [
        np.full(len(span.token_index), np.nan, np.float32) if array is None else array[span.token_index]
        for array, span in zip(arrays, layout.spans, strict=True)
    ]
    return to_tensor(np.concatenate(parts), dtype)
