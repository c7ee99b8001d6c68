"""Conversion of micro-batch predictions to one array per sample, the result of a trainer's forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from roll.training.network.distributions import Predictions
from roll.training.packing.layout import PackedLayout
from roll.types import AttentionStatistics, FloatArray, OutputName, TopLogprobs, TrainingBatch

__all__ = [
    "collect_topk",
    "create_empty_top_logprobs",
    "fill_missing_outputs",
    "merge_outputs",
    "order_outputs",
    "split_by_sample",
]

T = TypeVar("T")


def split_by_sample(predicted: FloatArray, layout: PackedLayout, batch: TrainingBatch) -> dict[int, FloatArray]:
    """Return one array [L] of outputs for each sample of a micro-batch, keyed by the sample's index in the batch.

    The array is 0 at tokens that are not predicted.

    Args:
        predicted: The outputs [M] of the micro-batch's predictions.
        layout: The layout of the micro-batch.
        batch: The global batch.
    """
    outputs: dict[int, FloatArray] = {}
    for span in layout.spans:
        array = outputs[span.index] = np.zeros(len(batch.samples[span.index]), dtype=np.float32)
        array[span.token_index] = predicted[span.prediction_index]
    return outputs


def collect_topk(
    collected: dict[int, TopLogprobs], layout: PackedLayout, batch: TrainingBatch, predicted: Predictions
) -> None:
    """Add the top-k log-probs of a micro-batch's samples to `collected`; tokens outside the loss get 0."""
    assert predicted.top_ids is not None and predicted.top_logprobs is not None
    ids, logprobs = predicted.top_ids.cpu().numpy(), predicted.top_logprobs.float().cpu().numpy()
    for span in layout.spans:
        sample = batch.samples[span.index]
        counted = sample.loss_mask[span.token_index]
        top = collected[span.index] = create_empty_top_logprobs(len(sample), ids.shape[1])
        places, rows = span.token_index[counted], span.prediction_index[counted]
        top.token_ids[places], top.logprobs[places] = ids[rows], logprobs[rows]


def create_empty_top_logprobs(length: int, k: int) -> TopLogprobs:
    """Return all-zero top-k log-probs for a sample without tokens in the loss."""
    zeros = np.zeros((length, k))
    return TopLogprobs(token_ids=zeros.astype(np.int32), logprobs=zeros.astype(np.float32))


def merge_outputs(parts: Sequence[dict[int, T]]) -> dict[int, T]:
    """Merge the results of all ranks into one dictionary, by index of the sample in the batch."""
    return {index: value for part in parts for index, value in part.items()}


def order_outputs(collected: Mapping[int, Any], batch: TrainingBatch) -> list[Any]:
    """Return the results in batch order, with zeros for samples without a result."""
    return [collected[i] if i in collected else np.zeros(len(s), dtype=np.float32) for i, s in enumerate(batch.samples)]


def fill_missing_outputs(
    outputs: dict[OutputName, list[Any]], batch: TrainingBatch, *, every_token: bool, num_top: int | None = None
) -> None:
    """Replace the zero arrays of `order_outputs` with empty results in the format of each output, in place.

    If values were computed for every token, the values of tokens outside the loss are set to 0.
    """
    if every_token and "values" in outputs:
        outputs["values"] = [np.where(s.loss_mask, v, 0) for s, v in zip(batch.samples, outputs["values"], strict=True)]
    if num_top is not None:
        outputs["top_logprobs"] = [
            t if isinstance(t, TopLogprobs) else create_empty_top_logprobs(len(s), num_top)
            for s, t in zip(batch.samples, outputs["top_logprobs"], strict=True)
        ]
    if "experts" in outputs:
        outputs["experts"] = [experts if experts.ndim == 3 else None for experts in outputs["experts"]]
    if "attention" in outputs:
        outputs["attention"] = [
            a if isinstance(a, AttentionStatistics) else AttentionStatistics(waad=a, fai=a)
            for a in outputs["attention"]
        ]
