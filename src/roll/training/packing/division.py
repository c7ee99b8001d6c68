"""Division of a batch's arrays over the ranks of a trainer: a rank receives the arrays of its own samples. NumPy only.

    batch ─ pack ─► samples of each data rank
      ├─► outline      tokens, loss masks and names of all samples: every rank packs them in the same way
      └─► columns      the other arrays of one data rank's samples: advantages, recorded experts, top-k log-probs, …
                         outline + columns ─ restore ─► batch, on the rank

The controller and the ranks pack the same token IDs with the same settings, so the controller knows which samples a
rank computes. In the restored batch, the arrays of other ranks' samples are placeholders without memory, which have the
shape and the dtype of the arrays. Therefore every rank raises the same errors for missing arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from roll.protocols import LossFn
from roll.training.packing.blocks import Block
from roll.training.packing.micro_batches import pack, pack_by_teacher
from roll.types import AttentionStatistics, LossRequirements, Outputs, TopLogprobs, TrainingBatch, TrainingSample

__all__ = ["BatchOutline", "Columns", "DividedBatch", "RankShare", "divide_batch", "restore_batch"]

Columns: TypeAlias = Mapping[int, Mapping[str, Any]]
"""The columns of some samples: arrays by field of `TrainingSample`, by index of the sample in its batch."""

_OUTLINE_FIELDS = ("token_ids", "loss_mask", "positions")
"""The arrays on which packing depends; every rank gets those of all samples."""

_UNUSED_FIELDS = ("policy_versions",)
"""The arrays that no trainer reads."""

_NETWORK_FIELDS = ("experts",)
"""The columns that are inputs of the network; all others are inputs of the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The part of every batch that one rank computes."""

    data_rank: int
    """The index of the rank's part of the samples."""
    data_size: int
    """The number of parts."""
    computes_loss: bool
    """False for a pipeline stage before the last one, which needs no inputs of the loss."""
    max_tokens: int
    """`training.max_tokens_per_micro_batch`."""
    share_prefix: bool
    """`training.share_prefix`."""

    def pack(
        self,
        samples: Sequence[TrainingSample],
        needs: LossRequirements,
        *,
        every_token: bool,
        unify_experts: bool = True,
    ) -> list[list[tuple[int, tuple[Block, ...]]]]:
        """Return the micro-batches of every data rank, as pairs of a teacher and blocks; see `pack`."""
        settings: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "share_prefix": self.share_prefix,
            "num_ranks": self.data_size,
            "every_token": every_token,
            "whole_units": needs.whole_units,
            "whole_sequences": needs.whole_sequences,
            "unify_experts": unify_experts,
        }
        if needs.divergence is not None:
            return pack_by_teacher(samples, **settings)
        return [[(0, blocks) for blocks in own] for own in pack(samples, **settings)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutline:
    """A batch without columns, and the shapes of the columns."""

    batch: TrainingBatch
    shapes: tuple[Mapping[str, _ColumnShape], ...]
    """The shapes of each sample's columns, by field."""


@dataclass(frozen=True, slots=True)
class _ColumnShape:
    """The dtypes and shapes of a column's arrays; the first dimension of each array is the number of tokens."""

    build: Callable[..., Any] | None
    """The type of the column, if the column is not an array."""
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    """The field, the dtype and the shape of each array without the first dimension."""

    @classmethod
    def of(cls, column: Any) -> _ColumnShape:
        if isinstance(column, np.ndarray):
            return cls(None, (("", column.dtype.str, column.shape[1:]),))
        arrays = ((each.name, getattr(column, each.name)) for each in fields(column))
        return cls(type(column), tuple((name, array.dtype.str, array.shape[1:]) for name, array in arrays))

    def build_placeholder(self, length: int, fill: int) -> Any:
        """Return a column of `length` tokens in which every entry is `fill`, without allocating memory for it."""
        arrays = {
            name: np.broadcast_to(np.array(fill, dtype=dtype), (length, *shape)) for name, dtype, shape in self.arrays
        }
        return arrays[""] if self.build is None else self.build(**arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedBatch:
    """A batch in the parts in which it is sent to the ranks."""

    outline: BatchOutline
    columns: Mapping[tuple[int, bool], Columns]
    """The columns for each data rank and each value of `RankShare.computes_loss`."""

    def get_columns(self, share: RankShare) -> Columns:
        """Return the columns that a rank needs."""
        return self.columns[share.data_rank, share.computes_loss]


def divide_batch(batch: TrainingBatch, work: LossFn | Outputs, shares: Collection[RankShare]) -> DividedBatch | None:
    """Divide a batch over the ranks of a trainer.

    Args:
        batch: The whole batch.
        work: The loss to compute, or the outputs of a forward pass.
        shares: The share of each rank.

    Returns:
        The parts of the batch. `None` if the controller cannot compute the division: a sample has media whose RoPE
        positions only the trainer computes, or experts were recorded in different shapes.
    """
    if any(s.media and s.positions is None for s in batch.samples):
        return None
    if len({s.experts.shape[1:] for s in batch.samples if s.experts is not None}) > 1:
        return None  # the ranks raise an error that names the sample
    is_loss = callable(work)
    needs = work.needs if is_loss else LossRequirements()
    packed = next(iter(shares)).pack(batch.samples, needs, every_token=not is_loss and "logprobs" in work)
    split = [_split_sample(sample) for sample in batch.samples]
    known: dict[_ColumnShape, _ColumnShape] = {}  # identical shapes are serialized once
    shapes = tuple(
        {name: known.setdefault(shape := _ColumnShape.of(column), shape) for name, column in columns.items()}
        for _, columns in split
    )
    outline = BatchOutline(batch=replace(batch, samples=tuple(sample for sample, _ in split)), shapes=shapes)
    parts: dict[tuple[int, bool], Columns] = {}
    for rank, computes_loss in {(share.data_rank, share.computes_loss and is_loss) for share in shares}:
        members = [m for _, blocks in packed[rank] for block in blocks for m in block.members]
        parts[rank, computes_loss] = {
            m.index: _select_columns(split[m.index][1], m.sample, computes_loss=computes_loss) for m in members
        }
    if not is_loss:
        parts |= {(rank, True): columns for (rank, _), columns in parts.items()}
    return DividedBatch(outline=outline, columns=parts)


def restore_batch(outline: BatchOutline, columns: Columns) -> TrainingBatch:
    """Return the batch of an outline, with the given columns and placeholders for all other columns."""
    samples = tuple(
        replace(
            sample,
            **{
                name: shape.build_placeholder(len(sample), -1 if name == "experts" else 0)
                for name, shape in outline.shapes[index].items()
            }
            | dict(columns.get(index, {})),
        )
        for index, sample in enumerate(outline.batch.samples)
    )
    return replace(outline.batch, samples=samples, held=frozenset(columns))


def _split_sample(sample: TrainingSample) -> tuple[TrainingSample, dict[str, Any]]:
    """Return a sample without its columns, and the columns."""
    types = np.ndarray, TopLogprobs, AttentionStatistics
    names = (each.name for each in fields(sample) if each.name not in _OUTLINE_FIELDS)
    columns = {name: column for name in names if isinstance(column := getattr(sample, name), types)}
    removed: dict[str, Any] = dict.fromkeys(columns)
    outline = replace(sample, **removed)
    return outline, {name: column for name, column in columns.items() if name not in _UNUSED_FIELDS}


def _select_columns(columns: Mapping[str, Any], packed: TrainingSample, *, computes_loss: bool) -> dict[str, Any]:
    """Return the columns to send; experts are those of the packed sample, on which the samples of a unit agree."""
    own = {name: column for name, column in columns.items() if computes_loss or name in _NETWORK_FIELDS}
    return own | ({} if packed.experts is None else {"experts": packed.experts})
