"""Images of a run as PNG, for the page.

Files of a run are untrusted: they are read inside the run directory only, decoded with limits, and encoded again.
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
_LONGEST_SIDE: Mapping[ImageSize, int] = {"thumbnail": 256, "full": 2048}
"""Maximum width and height of a PNG, in pixels; larger images are scaled down."""
_CACHE_BYTES = 32 * 2**20


def render_png(inside: SafeDirectory, digest: str, size: ImageSize) -> bytes:
    """Return a stored image as PNG, scaled down if it is larger than `size` allows.

    Raises:
        RunDirectoryError: The file is missing, is behind a link, cannot be decoded, or has another digest.
    """
    encoded = inside.read("media", digest[:2], digest, limit=ImageLimits().num_bytes)
    try:
        image = decode_image(encoded, f"image {digest[:12]}")
    except DataError as error:
        raise RunDirectoryError(str(error)) from error
    if compute_digest(image) != digest:
        raise RunDirectoryError(f"the content of image {digest[:12]} does not match its digest: restore its file.")
    return encode_thumbnail(image, _LONGEST_SIDE[size])


class Thumbnails:
    """A cache of small PNGs by digest, shared by all runs: equal digests mean equal images."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def render(self, inside: SafeDirectory, digest: str) -> bytes:
        """Return the thumbnail of an image that `find_image` found in the run.

        Raises:
            RunDirectoryError: As `render_png`.
        """
        with self._lock:
            if digest in self._found:
                self._found.move_to_end(digest)
                return self._found[digest]
        rendered = render_png(inside, digest, "thumbnail")
        with self._lock:
            if digest not in self._found:
                self._found[digest] = rendered
                self._num_bytes += len(rendered)
            while self._num_bytes > _CACHE_BYTES:
                _, dropped = self._found.popitem(last=False)
                self._num_bytes -= len(dropped)
        return rendered
