"""On-disk store of a model's outputs for trained tokens, keyed by a digest of the tokens.

The key of an entry depends on the tokens and the loss mask, so a change of data, template or lengths can make an entry
miss, but never wrong.

    NAME.npy   a row for each loss token, one sample after the other; memory-mapped, not loaded
    NAME.npz   keys and lengths of the samples, and the checksum of the rows; written last, so that it implies the rows

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

from roll.tracking import atomic
from roll.types import TrainingSample, sequence_key

__all__ = ["OutputStore", "Rows", "rows_of"]

logger = logging.getLogger(__name__)

Rows: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.void]]"
"""[N] a model's outputs for a sample's loss tokens, in named columns."""


def rows_of(**columns: np.ndarray[Any, Any]) -> Rows:
    """Combine columns [N] or [N, k] into rows."""
    size = len(next(iter(columns.values())))
    rows = np.empty(size, dtype=[(name, column.dtype, column.shape[1:]) for name, column in columns.items()])
    for name, column in columns.items():
        rows[name] = column
    return rows


class OutputStore:
    """Stored outputs of one model for samples; files are only ever added.

    Args:
        directory: Directory for this model and kind of output; `None` keeps everything in memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._found: dict[bytes, Rows] = {}
        if directory is not None and directory.is_dir():
            for index in sorted(directory.glob("*.npz")):
                self._read(index)

    def find_missing(self, samples: Iterable[TrainingSample]) -> list[TrainingSample]:
        """Return the samples without stored outputs; of equal samples only the first."""
        new: dict[bytes, TrainingSample] = {}
        for sample in samples:
            if (key := _key(sample)) not in self._found:
                new.setdefault(key, sample)
        return list(new.values())

    def add(self, samples: Sequence[TrainingSample], said: Sequence[Rows]) -> None:
        """Add the outputs of new samples, and write them to disk."""
        new = {_key(sample): rows for sample, rows in zip(samples, said, strict=True)}
        self._found |= new
        if self._directory is None or not new:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        keys = b"".join(new)
        index = self._directory / f"{hashlib.blake2b(keys, digest_size=8).hexdigest()}.npz"
        rows, about = io.BytesIO(), io.BytesIO()
        np.save(rows, np.concatenate([*new.values()]))
        np.savez(
            about,
            keys=np.frombuffer(keys, np.uint8).reshape(len(new), -1),
            lengths=[len(own) for own in new.values()],
            checksum=xxhash.xxh3_64_hexdigest(rows.getvalue()),
        )
        atomic.write_bytes(index.with_suffix(".npy"), rows.getvalue())
        atomic.write_bytes(index, about.getvalue())
        self._read(index)

    def of(self, sample: TrainingSample) -> Rows:
        """Return the stored outputs of a sample."""
        return self._found[_key(sample)]

    def _read(self, index: Path) -> None:
        path = index.with_suffix(".npy")
        try:
            with np.load(index, allow_pickle=False) as about:
                keys, lengths, checksum = about["keys"], about["lengths"], str(about["checksum"])
            if xxhash.xxh3_64_hexdigest(path.read_bytes()) != checksum:
                raise ValueError("its checksum is another one")
            rows = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            parts = np.split(rows, np.cumsum(lengths)[:-1])
            self._found |= {key.tobytes(): said for key, said in zip(keys, parts, strict=True)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("'%s' cannot be read (%s): what a model said is computed again", path, error)


def _key(sample: TrainingSample) -> bytes:
    key = sequence_key(sample.token_ids.astype(np.int32), sample.media)
    digest = hashlib.blake2b(key.tobytes(), digest_size=16)
    if sample.positions is not None:
        digest.update(sample.positions.astype(np.int32).tobytes())
    digest.update(np.packbits(sample.loss_mask).tobytes())
    return digest.digest()
