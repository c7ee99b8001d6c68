"""On-disk store of a model's outputs for trained tokens, keyed by a digest of the tokens.

The key of an entry depends on the tokens and the loss mask, so after a change of data, template or lengths, an entry
may be missing but is never incorrect.

    NAME.npy   a row for each loss token, one sample after the other; memory-mapped, not loaded
    NAME.npz   keys and lengths of the samples, and the checksum of the rows; written last, when the rows are complete

Names are derived from the keys, so several runs may share one directory.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from roll.errors import one_line_error
from roll.tracking import atomic
from roll.types import TrainingSample, build_sequence_key

__all__ = ["OutputStore", "Rows", "build_rows"]

logger = logging.getLogger(__name__)

Rows: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.void]]"
"""[N] a model's outputs for a sample's loss tokens, in named columns."""


def build_rows(**columns: np.ndarray[Any, Any]) -> Rows:
    """Combine arrays of shape [N] or [N, k] into a structured array of N rows, with argument names as columns."""
    size = len(next(iter(columns.values())))
    rows = np.empty(size, dtype=[(name, column.dtype, column.shape[1:]) for name, column in columns.items()])
    for name, column in columns.items():
        rows[name] = column
    return rows


class OutputStore:
    """Stores the outputs that one model computed for samples; only adds files, and never changes existing ones.

    Args:
        directory: Directory for this model and type of output; `None` keeps everything in memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._found: dict[bytes, Rows] = {}
        if directory is not None and directory.is_dir():
            for index in sorted(directory.glob("*.npz")):
                self._read(index)

    def find_missing(self, samples: Iterable[TrainingSample]) -> list[TrainingSample]:
        """Return the samples without stored outputs; identical samples are returned once."""
        new: dict[bytes, TrainingSample] = {}
        for sample in samples:
            if (key := _compute_key(sample)) not in self._found:
                new.setdefault(key, sample)
        return list(new.values())

    def add(self, samples: Sequence[TrainingSample], rows: Sequence[Rows]) -> None:
        """Add the outputs of new samples, and write them to disk."""
        new = {_compute_key(sample): rows for sample, rows in zip(samples, rows, strict=True)}
        self._found |= new
        if self._directory is None or not new:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        keys = b"".join(new)
        index = self._directory / f"{hashlib.blake2b(keys, digest_size=8).hexdigest()}.npz"
        blob, about = io.BytesIO(), io.BytesIO()
        np.save(blob, np.concatenate([*new.values()]))
        np.savez(
            about,
            keys=np.frombuffer(keys, np.uint8).reshape(len(new), -1),
            lengths=[len(own) for own in new.values()],
            checksum=xxhash.xxh3_64_hexdigest(blob.getvalue()),
        )
        atomic.write_bytes(index.with_suffix(".npy"), blob.getvalue())
        atomic.write_bytes(index, about.getvalue())
        self._read(index)

    def get_rows(self, sample: TrainingSample) -> Rows:
        """Return the stored outputs of a sample."""
        return self._found[_compute_key(sample)]

    def _read(self, index: Path) -> None:
        path = index.with_suffix(".npy")
        try:
            with np.load(index, allow_pickle=False) as about:
                keys, lengths, checksum = about["keys"], about["lengths"], str(about["checksum"])
            if xxhash.xxh3_64_hexdigest(path.read_bytes()) != checksum:
                raise ValueError("the checksum differs")
            rows = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            parts = np.split(rows, np.cumsum(lengths)[:-1])
            self._found |= {key.tobytes(): part for key, part in zip(keys, parts, strict=True)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("'%s' cannot be read (%s): recomputing the model outputs", path, one_line_error(error))


def _compute_key(sample: TrainingSample) -> bytes:
    key = build_sequence_key(sample.token_ids.astype(np.int32), sample.media)
    digest = hashlib.blake2b(key.tobytes(), digest_size=16)
    if sample.positions is not None:
        digest.update(sample.positions.astype(np.int32).tobytes())
    digest.update(np.packbits(sample.loss_mask).tobytes())
    return digest.digest()
