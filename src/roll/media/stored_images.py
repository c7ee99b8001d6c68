"""Finds stored images by their mentions in the text of rollouts, such as `[image 00ff00ff00ff]`.

The files are those of `roll.media.MediaStore`: `media/00/00ff…` in the run directory, named by digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from roll.errors import RunDirectoryError
from roll.media.images import read_image_size
from roll.tracking.reading.files import SafeDirectory

__all__ = ["StoredImage", "describe_images", "find_image", "find_mentions", "list_images", "remove_mentions"]

_IMAGE_MENTION_PATTERN = re.compile(r"\[image ([0-9a-f]{12})\]")
"""An image in the text of a message, as `roll.types.describe_content` writes it."""
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{12,64}")
_DIGEST_LENGTH = 64
"""Number of characters of a complete digest: SHA-256 in hexadecimal."""
_MAX_IMAGES = 1000
"""Maximum number of listed images per rollout."""


class StoredImage(NamedTuple):
    """An image of a run's media store."""

    digest: str
    num_bytes: int
    """Size of the file."""


def list_images(run_dir: SafeDirectory, texts: Iterable[str], digests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """List the images that the texts mention, by the first 12 characters of their digest.

    Args:
        run_dir: The run directory.
        texts: Texts with mentions such as `[image 00ff00ff00ff]`.
        digests: Digests recorded with the rollout; other images are looked up in the store.

    Returns:
        A dictionary per image with its digest, and its file size in bytes or an error message. Empty if the run has
        neither a media store nor recorded digests.
    """
    known = {digest[:12]: digest for digest in digests if _is_full_digest(digest)}
    if not known and run_dir.get_stamp("media") is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for prefix in find_mentions(texts)[:_MAX_IMAGES]:
        try:
            image = find_image(run_dir, known.get(prefix, prefix))
            found[prefix] = {"digest": image.digest, "bytes": image.num_bytes, "problem": None}
        except RunDirectoryError as error:
            found[prefix] = {"digest": known.get(prefix), "bytes": None, "problem": str(error)}
    return found


def find_mentions(texts: Iterable[str]) -> list[str]:
    """Return the first 12 characters of the digest of each distinct image that the texts mention, in order."""
    return list(dict.fromkeys(prefix for text in texts for prefix in _IMAGE_MENTION_PATTERN.findall(text)))


def remove_mentions(text: str) -> str:
    """Remove mentions of images, such as `[image 00ff00ff00ff]`, from a text."""
    return _IMAGE_MENTION_PATTERN.sub("", text)


def find_image(run_dir: SafeDirectory, digest: str) -> StoredImage:
    """Find a stored image by its digest, or by the first characters of its digest.

    Args:
        run_dir: The run directory.
        digest: The first 12 to 64 characters of the digest.

    Raises:
        RunDirectoryError: The value is not the start of a digest, or no image or several images match.
    """
    if not _DIGEST_PATTERN.fullmatch(digest):
        raise RunDirectoryError(f"'{digest[:80]}' is not a valid digest: expected 12 to 64 hexadecimal digits.")
    folder = digest[:2]
    if _is_full_digest(digest):
        stamp = run_dir.get_stamp("media", folder, digest)
        found = [] if stamp is None else [StoredImage(digest, stamp.size)]
    else:
        stamps = run_dir.list_stamps("media", folder)
        names = [name for name in stamps if name.startswith(digest) and _is_full_digest(name)]
        found = [StoredImage(name, stamps[name].size) for name in names]
    if len(found) > 1:
        raise RunDirectoryError(f"{len(found)} images have a digest that begins with '{digest}': use more characters.")
    if not found:
        raise RunDirectoryError(
            f"image {digest[:12]} is not in the run's media store: the run directory was copied without its folder "
            "`media`, or the file was removed."
        )
    return found[0]


def describe_images(run_dir: SafeDirectory, text: str) -> str:
    """Add the size of each image to its mention: `[image 00ff00ff00ff: 640 × 480 pixels, 12.5 KiB]`.

    Mentions of missing images are marked as missing. Without a media store, the text is unchanged.
    """
    if run_dir.get_stamp("media") is None:
        return text
    return _IMAGE_MENTION_PATTERN.sub(
        lambda mention: f"[image {mention[1]}: {_describe_size(run_dir, mention[1])}]", text
    )


def _describe_size(run_dir: SafeDirectory, prefix: str) -> str:
    try:
        image = find_image(run_dir, prefix)
        with run_dir.open("media", image.digest[:2], image.digest) as file:
            size = read_image_size(file)
    except RunDirectoryError:
        return "missing from the run's media store"
    pixels = "corrupted" if size is None else f"{size[0]} × {size[1]} pixels"
    return f"{pixels}, {image.num_bytes / 1024:.1f} KiB"


def _is_full_digest(digest: Any) -> bool:
    return isinstance(digest, str) and len(digest) == _DIGEST_LENGTH and _DIGEST_PATTERN.fullmatch(digest) is not None
