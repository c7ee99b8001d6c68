"""Renders the images of a run as PNG.

A run's files are untrusted: only files in the run directory are read, and images are decoded with limits and encoded
again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal, TypeAlias

from roll.errors import DataError, RunDirectoryError
from roll.media import ImageLimits, compute_digest, decode_image, encode_thumbnail
from roll.tracking.reading.files import SafeDirectory

__all__ = ["ImageSize", "Thumbnails", "render_png"]

ImageSize: TypeAlias = Literal["thumbnail", "full"]
_MAX_SIDE_PIXELS: Mapping[ImageSize, int] = {"thumbnail": 256, "full": 2048}
"""Maximum width and height of a PNG, in pixels; larger images are scaled down."""
_CACHE_BYTES = 32 * 2**20


def render_png(run_dir: SafeDirectory, digest: str, size: ImageSize) -> bytes:
    """Render a stored image as PNG, scaled down if it is larger than `size` allows.

    Raises:
        RunDirectoryError: The file is missing, is behind a link, cannot be decoded, or does not match the digest.
    """
    encoded = run_dir.read("media", digest[:2], digest, limit=ImageLimits().num_bytes)
    try:
        image = decode_image(encoded, f"image {digest[:12]}")
    except DataError as error:
        raise RunDirectoryError(str(error)) from error
    if compute_digest(image) != digest:
        raise RunDirectoryError(f"the content of image {digest[:12]} does not match its digest: restore its file.")
    return encode_thumbnail(image, _MAX_SIDE_PIXELS[size])


class Thumbnails:
    """A cache of thumbnails by digest. All runs share it, because identical digests mean identical images."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def render(self, run_dir: SafeDirectory, digest: str) -> bytes:
        """Render the thumbnail of an image that `find_image` found in the run, as PNG.

        Raises:
            RunDirectoryError: The image cannot be rendered; see `render_png`.
        """
        with self._lock:
            if digest in self._found:
                self._found.move_to_end(digest)
                return self._found[digest]
        rendered = render_png(run_dir, digest, "thumbnail")
        with self._lock:
            if digest not in self._found:
                self._found[digest] = rendered
                self._num_bytes += len(rendered)
            while self._num_bytes > _CACHE_BYTES:
                _, dropped = self._found.popitem(last=False)
                self._num_bytes -= len(dropped)
        return rendered
