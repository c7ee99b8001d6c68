"""Log-probs that a reference said once, on the disk of the run: by what was said of which tokens.

An entry is found by the tokens themselves and by which of them count. So nothing that changes the data, the template
or the lengths can make an entry wrong, only miss.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from roll.tracking import atomic
from roll.types import FloatArray, TrainingSample

__all__ = ["KeptLogprobs"]

logger = logging.getLogger(__name__)


class KeptLogprobs:
    """What one model said of samples; kept in memory, and in files that are only ever added.

    Args:
        directory: of this model; `None` keeps them in memory alone.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._found: dict[bytes, FloatArray] = {}
        self._num_parts = 0
        if directory is not None and directory.is_dir():
            for path in sorted(directory.glob("part-" + "[0-9]" * 6 + ".npz")):
                self._num_parts = int(path.stem.removeprefix("part-")) + 1
                self._read(path)

    def missing(self, samples: Iterable[TrainingSample]) -> list[TrainingSample]:
        """Those of which nothing is kept, each once."""
        return list({key: s for s in samples if (key := _key(s)) not in self._found}.values())

    def add(self, samples: Sequence[TrainingSample], logprobs: Sequence[FloatArray]) -> None:
        """Keep what was said, and write it.

        Args:
            samples: of which nothing is kept yet.
            logprobs: [L] of each.
        """
        new = {_key(s): p[s.loss_mask].astype(np.float32) for s, p in zip(samples, logprobs, strict=True)}
        self._found |= new
        if self._directory is None or not new:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        keys = np.frombuffer(b"".join(new), np.uint8).reshape(len(new), -1)
        np.savez(buffer, keys=keys, lengths=[len(p) for p in new.values()], logprobs=np.concatenate([*new.values()]))
        atomic.write_bytes(self._directory / f"part-{self._num_parts:06d}.npz", buffer.getvalue())
        self._num_parts += 1

    def of(self, sample: TrainingSample) -> FloatArray:
        """[L] as it was said; 0 where the loss does not count."""
        said = np.zeros(len(sample), np.float32)
        said[sample.loss_mask] = self._found[_key(sample)]
        return said

    def _read(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as part:
                keys, lengths, logprobs = part["keys"], part["lengths"], part["logprobs"]
            if (keys.dtype, lengths.dtype, logprobs.dtype) != (np.uint8, np.int64, np.float32):
                raise ValueError("its arrays are of other types")
            if (lengths < 1).any() or lengths.sum() != len(logprobs) or not np.isfinite(logprobs).all():
                raise ValueError("its log-probs are not those that were written")
            parts = np.split(logprobs, np.cumsum(lengths)[:-1])
            self._found |= {key.tobytes(): said for key, said in zip(keys, parts, strict=True)}
        except Exception as error:  # a damaged archive makes its readers fail with almost anything
            logger.warning("'%s' cannot be read (%s): what the reference said is computed again", path, error)


def _key(sample: TrainingSample) -> bytes:
    digest = hashlib.blake2b(sample.token_ids.astype(np.int32).tobytes(), digest_size=16)
    digest.update(np.packbits(sample.loss_mask).tobytes())
    return digest.digest()
