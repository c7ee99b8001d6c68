"""Rows of prompts and images, and their stream of draws.

The header of every image is read at the start, and all unusable rows are reported at once. An image is decoded when its
row is drawn. If an image cannot be decoded, or has changed since the run began, the error names the row; a blank image
is never substituted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from roll.config.diffusion import DiffusionDataConfig
from roll.data import WeightedSource, WeightedStream
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow, Row, read_column
from roll.data.files import open_table
from roll.errors import DataError, shorten
from roll.media.images import decode_image, read_image_size

__all__ = ["ImageReader", "ImageRow", "ImageRows", "RowDraw", "RowStream", "read_rows"]

CACHE_BYTES = 256 * 2**20
"""Maximum total size of the decoded images that a run caches."""


class FileIdentity(NamedTuple):
    """Values that identify a file's content: they change when the file is replaced."""

    num_bytes: int
    time_ns: int
    """Time of the last change, in nanoseconds since the epoch."""

    @classmethod
    def read(cls, path: Path) -> FileIdentity:
        """Read the identity of an existing file."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRow:
    """One row of a data file."""

    uid: str
    prompt: str
    location: str
    """File and line, for messages."""
    images: Mapping[str, Path] = field(default_factory=dict)
    """Paths of its images: `image`, `chosen`, `rejected`, `first_frame`."""
    identities: Mapping[str, FileIdentity] = field(default_factory=dict)
    """Size and time of each image file, when the rows were read."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other columns, for rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDraw:
    """One use of a row for training, whose outcome the ledger records."""

    draw_id: int
    row: ImageRow
    position: int

    @property
    def uid(self) -> str:
        """UID of the row."""
        return self.row.uid


class RowList:
    """A list of rows from which a `RowStream` samples."""

    def __init__(self, rows: Sequence[ImageRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ImageRow:
        return self._rows[index]


class RowStream(WeightedStream[ImageRow, RowDraw]):
    """A stream that samples rows for training."""

    size_name = "num_rows"

    def _draw(self, draw_id: int, item: ImageRow, position: int) -> RowDraw:
        return RowDraw(draw_id=draw_id, row=item, position=position)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRows:
    """The rows of a run, for training and evaluation."""

    train: RowStream
    evaluation: Sequence[ImageRow]
    """Rows for evaluation: the held-out rows, or the training rows if no row is held out."""
    held_out: Sequence[ImageRow]
    """Rows that are not trained on."""
    fingerprints: Mapping[str, str]
    """Digests of the held-out rows, by source."""
    image_fingerprints: Mapping[str, str]
    """Digests of the sizes of the image files; the keys describe the files of a source."""


def read_rows(sources: Sequence[DiffusionDataConfig], seed: int, images: Sequence[str]) -> ImageRows:
    """Read the rows of all sources.

    Args:
        sources: The configurations of the sources.
        seed: Seed of the order.
        images: The images that the method needs: `image`, or `chosen` and `rejected`.

    Raises:
        DataError: A file cannot be read, a row is malformed, or an image file does not exist.
    """
    streams, held_out, first = list[WeightedSource[ImageRow]](), list[ImageRow](), list[ImageRow]()
    fingerprints, image_fingerprints = dict[str, str](), dict[str, str]()
    for config in sources:
        train, kept = _read_source(config, images)
        digest = _compute_digest(train)
        items = RowList(train)
        streams.append(WeightedSource(domain=config.domain, items=items, weight=config.weight, fingerprint=digest))
        fingerprints[config.domain] = _compute_digest(kept)
        image_fingerprints[f"the size of an image file of '{config.domain}'"] = _compute_size_digest([*train, *kept])
        held_out += kept
        first += train
    return ImageRows(
        train=RowStream(streams, seed),
        evaluation=_order_by_distinct_prompts(held_out or first),
        held_out=held_out,
        fingerprints=fingerprints,
        image_fingerprints=image_fingerprints,
    )


def _read_source(config: DiffusionDataConfig, images: Sequence[str]) -> tuple[list[ImageRow], list[ImageRow]]:
    """Return the training rows and the held-out rows of a source."""
    keys = {name: getattr(config, f"{name}_key") for name in images}
    if config.first_frame_key is not None:
        keys["first_frame"] = config.first_frame_key
    rows = _read_table(Path(config.path), config, keys)
    if config.held_out_path is not None:
        return rows, _read_table(Path(config.held_out_path), config, keys)
    held_out = [row for row in rows if _is_held_out(row, config.held_out)]
    train = [row for row in rows if not _is_held_out(row, config.held_out)]
    if not train:
        raise DataError(f"'{config.path}' has no rows to train on: lower its held_out, or add rows.")
    return train, held_out


def _order_by_distinct_prompts(rows: Sequence[ImageRow]) -> list[ImageRow]:
    """Return the rows ordered so that the first rows all have different prompts."""
    counts: dict[str, int] = {}
    order = []
    for place, row in enumerate(rows):
        counts[row.prompt] = counts.get(row.prompt, 0) + 1
        order.append((counts[row.prompt], place))
    return [rows[place] for _, place in sorted(order)]


def _read_table(path: Path, config: DiffusionDataConfig, keys: Mapping[str, str]) -> list[ImageRow]:
    table, rows, bad, sizes = open_table(path), list[ImageRow](), BadRowCollector(), _SizeCheck()
    for number, row in enumerate(table.scan(None)):
        location = table.describe_location(number)
        bad.num_rows += 1
        try:
            if isinstance(row, DataError):
                raise row
            rows.append(_read_row(row, config, keys, path, location, table.get_key(number)))
            sizes.check(rows[-1])
        except DataError as error:
            bad.add_error(error)
    if bad.counts:
        raise DataError("\n".join([*bad.format_lines(config.domain), "Correct these rows, or remove them."]))
    if not rows:
        raise DataError(f"{table.name} has no rows: at least one row is required.")
    return rows


def _read_row(
    row: Row, config: DiffusionDataConfig, keys: Mapping[str, str], path: Path, location: str, key: str
) -> ImageRow:
    prompt = read_column(row, config.prompt_key, location, "prompt_key")
    if not isinstance(prompt, str):
        raise BadRow(
            "prompt is not text",
            f"{location}: column '{config.prompt_key}' must be a string, got {shorten(prompt)}.",
        )
    images = {name: _find_image(row, name, column, path, location) for name, column in keys.items()}
    used = {config.prompt_key, *keys.values()}
    return ImageRow(
        uid=f"{config.domain}/{path.stem}-{key}",
        prompt=prompt,
        location=location,
        images=images,
        identities={name: FileIdentity.read(file) for name, file in images.items()},
        metadata={name: value for name, value in row.items() if name not in used},
    )


class _SizeCheck:
    """Checks that all image files of a data source can be read and have the same size."""

    def __init__(self) -> None:
        self._first: tuple[tuple[int, int], Path] | None = None

    def check(self, row: ImageRow) -> None:
        """Check the images of a row by reading their headers.

        Raises:
            BadRow: A file is not an image, or its size differs from the size of the first checked image.
        """
        for path in row.images.values():
            with path.open("rb") as file:
                size = read_image_size(file)
            if size is None:
                try:
                    decode_image(path.read_bytes(), f"{row.location}: the image '{path}'")
                except DataError as error:
                    raise BadRow("image", f"{error} Correct the image, or remove the row.") from error
                continue
            self._first = self._first or (size, path)
            # The rotation in the EXIF data is not read, so width and height may be exchanged.
            if sorted(size) != sorted(self._first[0]):
                width, height = self._first[0]
                raise BadRow(
                    "image of another size",
                    f"{row.location}: the image '{path}' has {size[0]} × {size[1]} pixels, but '{self._first[1]}' has "
                    f"{width} × {height}: resize the images to the model's size.",
                )


def _find_image(row: Row, name: str, key: str, table: Path, location: str) -> Path:
    value = read_column(row, key, location, f"{name}_key")
    if not isinstance(value, str) or not value:
        raise BadRow(
            "image is not a path",
            f"{location}: column '{key}' must be the path of an image, got {shorten(value)}.",
        )
    if "://" in value:
        raise BadRow(
            "image is a URL",
            f"{location}: column '{key}' is a URL, {value[:80]!r}: download the image and use its path.",
        )
    path = table.parent / value
    if not path.is_file():
        raise BadRow("image is missing", f"{location}: the image '{path}' does not exist.")
    return path


class ImageReader:
    """Reads and decodes images of rows, with a size-limited cache in memory.

    Args:
        cache_bytes: Maximum total size of cached images.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._left = cache_bytes
        self._cache: dict[Path, NDArray[np.uint8]] = {}

    def read(self, row: ImageRow, name: str) -> NDArray[np.uint8]:
        """Return an image of a row, [H, W, 3].

        Raises:
            DataError: The file cannot be read or decoded.
        """
        path = row.images[name]
        if path in self._cache:
            return self._cache[path]
        try:
            identity, data = FileIdentity.read(path), path.read_bytes()
        except OSError as error:
            raise DataError(f"{row.location}: the image '{path}' cannot be read: {error.strerror}.") from error
        if row.identities.get(name, identity) != identity:
            raise DataError(
                f"{row.location}: the image '{path}' changed while the run was using it: restore the file and resume "
                "the run, or start a new run."
            )
        image = np.asarray(decode_image(data, f"{row.location}: the image '{path}'"))
        if image.nbytes <= self._left:
            self._cache[path] = image
            self._left -= image.nbytes
        return image


def _is_held_out(row: ImageRow, fraction: float) -> bool:
    """Return whether a row is held out. Rows with equal prompts and images are in the same split."""
    if fraction == 0:
        return False
    digest = hashlib.blake2b(json.dumps(_get_content(row)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < fraction


def _get_content(row: ImageRow) -> list[str]:
    return [row.prompt, *(f"{name}={path.name}" for name, path in sorted(row.images.items()))]


def _compute_size_digest(rows: Sequence[ImageRow]) -> str:
    """Return a digest of the sizes of all image files; the files are too many to read their content at each start."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps([row.uid, *(each.num_bytes for each in row.identities.values())]).encode())
    return digest.hexdigest()


def _compute_digest(rows: Sequence[ImageRow]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        content = [row.uid, *_get_content(row), json.dumps(dict(row.metadata), sort_keys=True, default=str)]
        digest.update(json.dumps(content).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
