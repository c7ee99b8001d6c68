"""Samples on disk: an image grid with a row per prompt, and a table with the reward and the digest of every sample.

samples/step-000020.png       the first samples of a step       samples/evaluation-step-000020.png
samples/step-000020.parquet   prompt, index, seed, reward, parts, advantage, media (digests in the run's media store)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roll.media import MediaStore

__all__ = ["SampleRecord", "draw_grid", "write_samples"]

logger = logging.getLogger(__name__)

MAX_ROWS, MAX_COLUMNS = 10, 10
MIN_CELL_SIZE = 48
"""Minimum size of a cell of the grid, in pixels; smaller images are enlarged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """One sample of a step."""

    draw_id: int
    index: int
    prompt: str
    seed: int
    image: NDArray[np.uint8]
    """[H, W, C], or [F, H, W, C] for a video."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    advantage: float = float("nan")


def draw_grid(records: Sequence[SampleRecord]) -> NDArray[np.uint8]:
    """Return one image [H, W, 3]: a row per draw, at most `MAX_ROWS` rows and `MAX_COLUMNS` columns.

    For a video, the last frame is drawn.
    """
    rows: dict[int, list[NDArray[np.uint8]]] = {}
    for record in records:
        rows.setdefault(record.draw_id, []).append(record.image if record.image.ndim == 3 else record.image[-1])
    shown = [images[:MAX_COLUMNS] for images in list(rows.values())[:MAX_ROWS]]
    height, width = shown[0][0].shape[:2]
    factor = max(-(-MIN_CELL_SIZE // min(height, width)), 1)
    size, columns = (height * factor + 2, width * factor + 2), max(map(len, shown))
    grid = np.full((size[0] * len(shown), size[1] * columns, 3), 255, np.uint8)
    for i, images in enumerate(shown):
        for j, image in enumerate(images):
            large = image.repeat(factor, axis=0).repeat(factor, axis=1)
            grid[i * size[0] : i * size[0] + large.shape[0], j * size[1] : j * size[1] + large.shape[1]] = large
    return grid


def write_samples(directory: Path, stem: str, records: Sequence[SampleRecord], store: MediaStore | None) -> None:
    """Write the image grid and the table of samples and, with a store, every image. Errors are logged, not raised."""
    if not records:
        return
    try:
        _write(directory, stem, records, store)
    except Exception as error:  # records are not worth a run
        logger.warning("samples were not written to '%s/%s': %s", directory, stem, error, exc_info=True)


def _write(directory: Path, stem: str, records: Sequence[SampleRecord], store: MediaStore | None) -> None:
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    directory.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw_grid(records)).save(directory / f"{stem}.png")
    digests = [[] if store is None else [store.add_image(_to_rgb(frame)) for frame in _get_frames(r)] for r in records]
    names = sorted({name for record in records for name in record.parts})
    table = {
        "draw_id": [record.draw_id for record in records],
        "index": [record.index for record in records],
        "prompt": [record.prompt for record in records],
        "seed": [str(record.seed) for record in records],
        "reward": [record.reward for record in records],
        "advantage": [record.advantage for record in records],
        "media": pa.array(digests, pa.list_(pa.string())),
        **{f"reward/{name}": [record.parts.get(name) for record in records] for name in names},
    }
    parquet.write_table(pa.table(table), directory / f"{stem}.parquet")


def _get_frames(record: SampleRecord) -> list[NDArray[np.uint8]]:
    return list(record.image) if record.image.ndim == 4 else [record.image]


def _to_rgb(frame: NDArray[np.uint8]):
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else frame))
