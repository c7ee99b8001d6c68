"""Images from anywhere are decoded to RGB, or refused with a reason; never replaced."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from roll.errors import DataError
from roll.media import (
    ImageLimits,
    MediaStore,
    compute_digest,
    convert_array_to_image,
    convert_pillow_to_image,
    decode_image,
)


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **settings)
    return data.getvalue()


def pixels(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(decode_image(data, "the image"))


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and has almost no data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_decode_image_a_plain_color_is_the_same_in_every_format(kind: str) -> None:
    found = pixels(encoded(Image.new("RGB", (3, 2), (255, 0, 0)), kind))
    assert found.shape == (2, 3, 3)
    assert (found == [255, 0, 0]).all()


def test_decode_image_modes_become_rgb() -> None:
    assert (pixels(encoded(Image.new("L", (2, 2), 100))) == 100).all()
    assert (pixels(encoded(Image.new("1", (2, 2), 1))) == 255).all()
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert (pixels(encoded(palette)) == [10, 20, 30]).all()
    cmyk = pixels(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert (abs(cmyk.astype(int) - [255, 0, 0]) < 12).all()


def test_decode_image_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    assert (pixels(encoded(Image.fromarray(values)))[..., 0] == [[0, 100], [200, 255]]).all()


def test_decode_image_transparency_shows_white() -> None:
    assert (pixels(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0)))) == 255).all()
    assert (pixels(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 255)))) == [255, 0, 0]).all()
    assert (pixels(encoded(Image.new("LA", (2, 2), (0, 0)))) == 255).all()


def test_decode_image_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the first row is the right side
    found = pixels(encoded(image, "PNG", exif=exif))
    assert found.shape == (4, 2, 3)
    assert (found[0, 1] == 255).all()


EXIF = Image.Exif()
EXIF[0x0112] = 6
SIXTEEN = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGBA", (2, 2), (0, 0, 0, 0)),
        Image.fromarray(SIXTEEN),
        Image.new("CMYK", (2, 2), (0, 255, 255, 0)),
        Image.open(io.BytesIO(encoded(Image.effect_noise((4, 2), 90).convert("RGB"), exif=EXIF))),
        Image.open(io.BytesIO(encoded(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3)))),
    ],
    ids=["transparent", "16 bits", "CMYK", "rotated", "one transparent color"],
)
def test_image_from_pillow_is_what_its_file_shows(image: Image.Image) -> None:
    kind = "TIFF" if image.mode == "CMYK" else "PNG"
    settings = {"exif": image.getexif()} if image.getexif() else {}
    expected = pixels(encoded(image, kind, **settings))
    np.testing.assert_array_equal(np.asarray(convert_pillow_to_image(image, "it")), expected)


def test_image_from_pillow_bad_images_are_refused() -> None:
    data = encoded(Image.effect_noise((64, 64), 90))[:300]
    with pytest.raises(DataError, match="it cannot be decoded"):
        convert_pillow_to_image(Image.open(io.BytesIO(data)), "it")
    with pytest.raises(DataError, match="it has 0 × 4 pixels"):
        convert_pillow_to_image(Image.new("RGB", (0, 4)), "it")
    with pytest.raises(DataError, match="it has floating-point pixels"):
        convert_pillow_to_image(Image.new("F", (4, 4), 0.5), "it")


def test_decode_image_of_a_camera_with_previews_is_its_first_image() -> None:
    first = Image.effect_noise((16, 16), 90).convert("RGB")
    data = encoded(first, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert pixels(data).shape == (16, 16, 3)
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(encoded(first, "JPEG")))))


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1)])
def test_decode_image_extreme_shapes_are_images(size: tuple[int, int]) -> None:
    assert pixels(encoded(Image.new("RGB", size))).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image in a supported format"),
        (b"<!DOCTYPE html><html>404</html>", "not an image in a supported format"),
        (b"%PDF-1.7", "not an image in a supported format"),
        (encoded(Image.effect_noise((64, 64), 90))[:200], "cannot be decoded"),
        (encoded(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")[:300], "cannot be decoded"),
        (png_header(50_000, 50_000), "too many pixels"),
        (png_header(8, 8), "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n", "the image"),
    ],
)
def test_decode_image_bad_data_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        decode_image(data, "the image")


def test_decode_image_animations_are_refused() -> None:
    frames = [Image.new("RGB", (4, 4), (i * 80, 0, 0)) for i in range(3)]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        with pytest.raises(DataError, match="is animated"):
            decode_image(data, "the image")


def test_decode_image_limits_hold_before_decoding() -> None:
    with pytest.raises(DataError, match=r"has 100 × 100 pixels, but at most 5,000"):
        decode_image(encoded(Image.new("RGB", (100, 100))), "the image", ImageLimits(num_pixels=5000))
    with pytest.raises(DataError, match=r"has 1,000 bytes, but at most 999"):
        decode_image(b"x" * 1000, "the image", ImageLimits(num_bytes=999))


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (4, 4, 4)])
def test_image_from_array_shapes_of_images_are_accepted(shape: tuple[int, ...]) -> None:
    assert convert_array_to_image(np.full(shape, 255, np.uint8), "it").size == (4, 4)


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8), np.zeros((0, 4), np.uint8), None],
)
def test_image_from_array_other_arrays_are_refused(array: Any) -> None:
    with pytest.raises(DataError, match="it "):
        convert_array_to_image(array, "it")


def test_media_store_equal_contents_are_stored_once(tmp_path: Path) -> None:
    image = Image.effect_noise((16, 16), 90).convert("RGB")
    store = MediaStore(tmp_path / "media")
    png, bmp = store.add(encoded(image), "a"), store.add(encoded(image, "BMP"), "b")
    assert png == bmp == store.add_image(image) == compute_digest(image)
    assert len([path for path in (tmp_path / "media").rglob("*") if path.is_file()]) == 1
    other = MediaStore(tmp_path / "media")
    assert png in other
    assert compute_digest(other.get(png)) == png


def test_media_store_a_size_is_part_of_the_content() -> None:
    assert compute_digest(Image.new("RGB", (2, 3))) != compute_digest(Image.new("RGB", (3, 2)))


def test_media_store_missing_and_changed_files_are_named(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    with pytest.raises(DataError, match="not in the run's media store"):
        store.get("ab" * 32)
    digest = store.add_image(Image.new("RGB", (2, 2)))
    (tmp_path / digest[:2] / digest).write_bytes(encoded(Image.new("RGB", (2, 2), (9, 9, 9))))
    with pytest.raises(DataError, match="the file was modified"):
        MediaStore(tmp_path).get(digest)


def test_media_store_memory_is_bounded(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, cache_bytes=4 * 16 * 16 * 3)
    digests = [store.add_image(Image.new("RGB", (16, 16), (i, 0, 0))) for i in range(20)]
    assert len(store._cache) == 4
    assert [store.get(digest).getpixel((0, 0)) for digest in digests] == [(i, 0, 0) for i in range(20)]
    assert store._cached_bytes == 4 * 16 * 16 * 3
