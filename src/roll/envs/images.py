"""Images in observations: values that environments return are encoded as `ImageData` parts.

    environment ─► Pillow image, array or bytes ─► ImageData ─► the run's media store (`image_storage`)

Between processes, an `ImageData` is JSON with base64.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from roll.media import convert_array_to_image, convert_pillow_to_image
from roll.types import ImageData, TextPart

__all__ = ["encode_images", "has_images"]


def encode_images(observation: Any) -> Any:
    """Return an observation with its images encoded as `ImageData`; other values are returned unchanged.

    Args:
        observation: An observation: an image, or a list or tuple with images and strings. An image is a Pillow image, a
            uint8 array [height, width, 3], or the bytes of an image file.

    Raises:
        DataError: An array is not an image, for example because of its dtype, or a Pillow image cannot be decoded.
    """
    if _is_image(observation):
        return (_encode(observation),)
    if isinstance(observation, list | tuple) and any(map(_is_image, observation)):
        return tuple(
            _encode(part) if _is_image(part) else TextPart(text=part) if isinstance(part, str) else part
            for part in observation
        )
    return observation


def has_images(result: Any) -> bool:
    """Return whether the result of `reset` or `step` contains images that must be encoded."""
    observation = result[0] if isinstance(result, tuple) and result else None
    if isinstance(observation, list | tuple):
        return any(_is_image(part) or isinstance(part, ImageData) for part in observation)
    return _is_image(observation)


def _is_image(value: Any) -> bool:
    is_pillow = hasattr(value, "convert") and hasattr(value, "getexif")
    return is_pillow or isinstance(value, bytes | bytearray | np.ndarray)


def _encode(value: Any) -> ImageData:
    if isinstance(value, bytes | bytearray):
        return ImageData.from_bytes(bytes(value))
    convert = convert_array_to_image if isinstance(value, np.ndarray) else convert_pillow_to_image
    encoded = io.BytesIO()
    convert(value, "the image").save(encoded, "PNG", compress_level=1)
    return ImageData.from_bytes(encoded.getvalue())
