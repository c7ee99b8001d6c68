"""Decoding of untrusted images, which may come from any dataset, model or environment.

Every image is converted to 8-bit RGB, rotated upright (EXIF), with transparent pixels on white. An image that cannot be
decoded raises an error and is never replaced by a blank image.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from roll.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "ImageLimits",
    "compute_digest",
    "convert_array_to_image",
    "convert_pillow_to_image",
    "decode_image",
    "encode_thumbnail",
    "read_image_size",
]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that Pillow decodes itself, without external programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """Limits of one image."""

    num_bytes: int = 64 * 2**20
    """Maximum encoded size, in bytes."""
    num_pixels: int = 2**26
    """Maximum number of pixels: 64 Mi, which take 192 MiB as RGB."""


def decode_image(data: bytes, label: str, limits: ImageLimits | None = None) -> Image:
    """Decode an image to mode RGB.

    Args:
        data: The encoded image.
        label: Name of the image in error messages, such as its row.
        limits: The limits; by default `ImageLimits()`.

    Raises:
        DataError: The image is too large, animated, corrupted, or not in a supported format.
    """
    from PIL import Image, UnidentifiedImageError

    limits = limits or ImageLimits()
    if not data:
        raise DataError(f"{label} is empty: 0 bytes.")
    if len(data) > limits.num_bytes:
        raise DataError(f"{label} has {len(data):,} bytes, but at most {limits.num_bytes:,} are allowed.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images, which are rejected below
            return _load_with_exif_rotation(Image.open(io.BytesIO(data), formats=FORMATS), label, limits)
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit on pixels, checked before any is decoded
        raise DataError(f"{label} has too many pixels; at most {limits.num_pixels:,} are allowed: {error}.") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{label} is not an image in a supported format ({', '.join(FORMATS)}); it begins with {data[:12]!r}."
        ) from error
    except Exception as error:  # decoders raise various errors for corrupted files
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error


def convert_pillow_to_image(image: Any, label: str, limits: ImageLimits | None = None) -> Image:
    """Convert a Pillow image, which may not be decoded yet, to mode RGB, like `decode_image` does for a file.

    Args:
        image: A Pillow image of any mode.
        label: Name of the image in error messages.
        limits: The limits; by default `ImageLimits()`.

    Raises:
        DataError: The image is too large, animated, empty or corrupted.
    """
    if not image.width * image.height:
        raise DataError(f"{label} has {image.width} × {image.height} pixels: it is empty.")
    try:
        return _load_with_exif_rotation(image, label, limits or ImageLimits())
    except DataError:
        raise
    except Exception as error:  # the decoders of a file that was opened lazily raise various errors
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error


def convert_array_to_image(array: Any, label: str) -> Image:
    """Convert an array to an image in mode RGB.

    Args:
        array: uint8 of shape [height, width], [height, width, 3] or [height, width, 4].
        label: Name of the image in error messages.

    Raises:
        DataError: The array's dtype or shape is not supported.
    """
    from PIL import Image

    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise DataError(
            f"{label} is an array of {array.dtype} with shape {array.shape}: it must be uint8 with shape "
            "[height, width], [height, width, 3] or [height, width, 4]."
        )
    if not array.size:
        raise DataError(f"{label} is an array with shape {array.shape}: it has no pixels.")
    if array.shape[0] * array.shape[1] > ImageLimits().num_pixels:
        raise DataError(
            f"{label} has {array.shape[0] * array.shape[1]:,} pixels, but at most {ImageLimits().num_pixels:,} are "
            "allowed: make it smaller."
        )
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array)), label)


def read_image_size(file: IO[bytes]) -> tuple[int, int] | None:
    """Return the width and height of an encoded image, in pixels, from its header; `None` if it is corrupted.

    The pixels are not decoded, and a rotation in the EXIF data is ignored.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(file, formats=FORMATS).size
    except Exception:  # decoders raise various errors for corrupted files
        return None


def encode_thumbnail(image: Image, max_side: int) -> bytes:
    """Encode an image as PNG, scaled down to at most `max_side` pixels in width and height."""
    if max(image.size) > max_side:
        image = image.copy()
        image.thumbnail((max_side, max_side))
    encoded = io.BytesIO()
    image.save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def compute_digest(image: Image) -> str:
    """Return the SHA-256 of an image's width, height and RGB pixels, in hexadecimal."""
    digest = hashlib.sha256(f"image RGB {image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def _load_with_exif_rotation(image: Any, label: str, limits: ImageLimits) -> Image:
    """Decode a Pillow image within the limits; return it upright and in mode RGB."""
    from PIL import ImageOps

    _check_header(image, label, limits)  # before any pixel is decoded
    image.load()
    upright = ImageOps.exif_transpose(image)
    return _to_rgb(upright if upright is not None else image, label)


def _check_header(image: Any, label: str, limits: ImageLimits) -> None:
    if image.width * image.height > limits.num_pixels:
        raise DataError(
            f"{label} has {image.width} × {image.height} pixels, but at most {limits.num_pixels:,} are allowed: make "
            "it smaller."
        )
    # Not `n_frames`, which reads a whole GIF to count: 30 s for one of 48 MB. The further images of an MPO file, which
    # some cameras write instead of JPEG, are previews or the view of the other eye.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise DataError(f"{label} is animated: choose one frame, and store it as an image.")


def _to_rgb(image: Image, label: str) -> Image:
    """Convert an image of any mode to RGB; transparent pixels become white."""
    from PIL import Image as Images

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":  # the range is unknown: values up to 1, for example, would all become black
        raise DataError(f"{label} has floating-point pixels: store it with 8 or 16 bits per channel.")
    if image.mode.startswith("I"):
        # Pillow clips 16-bit values at 255, so bright images would become white.
        values = np.asarray(image).astype(np.float64)
        return Images.fromarray(np.clip(values / 257.0 + 0.5, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Images.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        return Images.alpha_composite(white, with_alpha).convert("RGB")
    return image.convert("RGB")
