"""A file of rows with every bad image: each is reported with its line and counted, and no blank image replaces it."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from worlds.vision_models import VISION_MODELS, VisionWorld, picture, write_vision_model

from roll.config.data import FileData, HuggingFaceData
from roll.config.examples import FileExamples
from roll.data import PromptData, build_data
from roll.data.examples import ExampleData, build_examples
from roll.errors import DataError, InfraError
from roll.media import MediaStore, compute_digest
from roll.models import load_tokenizer
from roll.models.multimodal import open_media

MAX_TOKENS = 120


def encode(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **settings)
    return data.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that announces a size and has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (24, 24), (i * 80, 0, 0)) for i in range(3)]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:])


NOISE = picture(1, 24, 24)
BAD: dict[str, tuple[bytes | None, str]] = {
    "missing.png": (None, "is not a file in"),
    "empty.png": (b"", "is empty: 0 bytes"),
    "truncated.png": (encode(NOISE)[:300], "cannot be decoded"),
    "truncated.jpg": (encode(NOISE, "JPEG")[:300], "cannot be decoded"),
    "header.png": (png_header(24, 24), "cannot be decoded"),
    "huge.png": (png_header(50_000, 50_000), "pixels; at most 67,108,864 are allowed"),
    "long.png": (encode(Image.new("1", (70_000, 1000))), "has 70000 × 1000 pixels, but at most 67,108,864"),
    "animated.gif": (animation("GIF"), "is animated"),
    "animated.webp": (animation("WEBP"), "is animated"),
    "pages.tiff": (animation("TIFF"), "is animated"),
    "float.tiff": (encode(Image.fromarray(np.zeros((24, 24), np.float32)), "TIFF"), "floating-point pixels"),
    "svg.png": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image in a supported format"),
    "page.png": (b"<!DOCTYPE html><html>404</html>", "is not an image in a supported format"),
}
"""Files that are no images, and what is reported; `None`: there is no such file."""
NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "more": ({"prompt": "<image> and?", "images": ["0.png", "1.png"]}, "has 2 images, but its messages have 1 placeho"),
    "fewer": ({"prompt": "<image> and <image>?", "images": ["0.png"]}, "has 1 image, but its messages have 2 placeho"),
    "none": ({"prompt": "<image> and?", "images": []}, "has 0 images, but its messages have 1 placeholder <image>"),
    "null": ({"prompt": "<image> and?", "images": None}, "has 0 images, but its messages have 1 placeholder <image>"),
    "part": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
        "has 0 images, but its messages have 1 placeholder <image>",
    ),
    "long": ({"prompt": "<image>" * 12, "images": ["0.png"] * 12}, "tokens, but the context leaves 120 for prompts"),
}
"""Rows with other numbers of images than placeholders, or with more than fit the context, and what is reported."""
GOOD: dict[str, tuple[bytes, Callable[[np.ndarray[Any, Any]], bool]]] = {
    "cmyk.jpg": (encode(Image.new("CMYK", (24, 24), (0, 255, 255, 0)), "JPEG"), lambda p: near(p, (255, 0, 0))),
    "sixteen.png": (encode(Image.fromarray(np.full((24, 24), 257 * 100, np.uint16))), lambda p: near(p, (100,) * 3)),
    "palette.png": (encode(NOISE.convert("P")), lambda p: p.std() > 30),
    "transparent.png": (encode(Image.new("RGBA", (24, 24), (0, 0, 0, 0))), lambda p: near(p, (255, 255, 255))),
    "one.png": (encode(Image.new("RGB", (1, 1), (9, 90, 200))), lambda p: near(p, (9, 90, 200))),
    "rotated.jpg": (encode(Image.new("RGB", (48, 24)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0"
        b"\0\x01\0\x06\0\0\0\0\0\0"), lambda p: p.shape == (48, 24, 3)),
}  # fmt: skip
"""Unusual images, and what their pixels must be."""


def near(pixels: np.ndarray[Any, Any], color: tuple[int, ...]) -> bool:
    return bool((abs(pixels.astype(int) - color) < 12).all())


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> VisionWorld:
    directory = tmp_path_factory.mktemp("vision")
    world = VisionWorld.create(write_vision_model(directory / "model", "llava"), directory / "media")
    for number in range(3):
        picture(number, 24, 24).save(directory / f"{number}.png")
    for name, (data, _) in (BAD | GOOD).items():
        if data is not None:
            (directory / name).write_bytes(data)
    return world


def read_prompts(world: VisionWorld, rows: list[dict[str, Any]], **settings: Any) -> PromptData:
    path = world.model.parent / "rows.jsonl"
    path.write_text("".join(json.dumps({"answer": "a", **row}) + "\n" for row in rows))
    entry = {"source": "file", "path": str(path), "held_out": 0, "reward": "exact", **settings}
    media = open_media(world.model, world.store.directory)
    return build_data([FileData.model_validate(entry)], load_tokenizer(world.model), 0, MAX_TOKENS, media=media)


def read_examples(world: VisionWorld, rows: list[dict[str, Any]], **settings: Any) -> ExampleData:
    path = world.model.parent / "examples.jsonl"
    answered = [row | {"completion": "a"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in answered))
    entry = {"source": "file", "path": str(path), "held_out": 0, **settings}
    media = open_media(world.model, world.store.directory)
    config = FileExamples.model_validate(entry)
    return build_examples([config], "supervised", load_tokenizer(world.model), 0, MAX_TOKENS, media=media)


def show(name: str) -> dict[str, Any]:
    return {"prompt": "<image>What?", "images": [name]}


def test_bad_images_of_prompts_are_reported_by_line_and_counted(world: VisionWorld) -> None:
    rows = [show("0.png"), *map(show, BAD), *(row for row, _ in NUMBERS.values()), show("1.png")]
    with pytest.raises(DataError) as raised:
        read_prompts(world, [row for row in rows if len(row.get("images") or ()) < 12])
    text = str(raised.value)
    assert f"{len(BAD) + len(NUMBERS) - 1} of {len(rows) - 1} rows of data source 'file' cannot be used" in text
    for row, reason in [*((show(name), reason) for name, (_, reason) in BAD.items()), *NUMBERS.values()]:
        with pytest.raises(DataError) as alone:
            read_prompts(world, [show("0.png"), row])
        assert reason in str(alone.value) and "1 of 2 rows" in str(alone.value)
        assert "rows.jsonl', line 2" in str(alone.value)


def test_bad_images_of_prompts_are_skipped_and_the_others_kept(
    world: VisionWorld, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [show("0.png"), *map(show, BAD), *(row for row, _ in NUMBERS.values()), *map(show, GOOD), show("1.png")]
    data = read_prompts(world, rows, on_bad_row="skip")
    assert f"{len(BAD) + len(NUMBERS) - 1} of {len(rows)} rows of data source 'file' cannot be used" in caplog.text
    assert "1 × too long" in caplog.text
    assert data.train.num_items == 2 + len(GOOD)
    drawn = data.train.draw(data.train.num_items)
    shown = [span.digest for draw in drawn for span in draw.media]
    assert {compute_digest(picture(number, 24, 24)) for number in (0, 1)} < set(shown)
    assert len(shown) == len(set(shown)) == 2 + len(GOOD)  # every prompt has its image


def test_bad_images_unusual_ones_are_read_as_they_look(world: VisionWorld) -> None:
    for name, (_, is_right) in GOOD.items():
        (draw,) = read_prompts(world, [show(name)]).train.draw(1)
        image: Any = world.store.get(draw.media[0].digest)
        assert image.mode == "RGB" and is_right(np.asarray(image)), name


def test_bad_images_of_examples_are_reported_by_line_and_skipped(world: VisionWorld) -> None:
    rows = [show("0.png"), *map(show, BAD), *(row for row, _ in NUMBERS.values())]
    with pytest.raises(DataError) as raised:
        read_examples(world, rows)
    assert f"{len(BAD) + len(NUMBERS)} of {len(rows)} rows" in str(raised.value)
    for row, reason in [*((show(name), reason) for name, (_, reason) in BAD.items()), *NUMBERS.values()][:-1]:
        with pytest.raises(DataError, match=r"examples\.jsonl', line 1") as alone:
            read_examples(world, [row, show("0.png")])
        assert reason in str(alone.value)
    examples = read_examples(world, [*rows, show("1.png")], on_bad_row="skip", too_long="skip")
    assert examples.train.num_items == 2
    assert sum(found.counts.total() for found in examples.report.bad.values()) == len(BAD) + len(NUMBERS)


def test_bad_images_a_placeholder_without_a_column_is_text(world: VisionWorld) -> None:
    (draw,) = read_prompts(world, [{"prompt": "What does <video> mean?", "images": []}]).train.draw(1)
    assert draw.media == ()


def test_bad_images_a_named_column_that_no_row_has_is_an_error(world: VisionWorld) -> None:
    """A misspelled name must not remove the images of all rows."""
    for read in (read_prompts, read_examples):
        with pytest.raises(DataError) as raised:
            read(world, [{"prompt": "What?", "picture": "0.png"}], images_key="pictures", ignored_fields=["picture"])
        text = str(raised.value)
        assert "data source 'file' has no column 'pictures' (`images_key`)." in text
        assert "Did you mean 'picture'?" in text and "Set `images_key` to the correct column" in text
        mixed = read(world, [{"prompt": "What?"}, {"prompt": "And?", "pictures": "0.png"}], images_key="pictures")
        assert mixed.train.num_items == 2  # some rows have no images


def test_bad_images_a_vision_model_without_images_is_a_warning(
    world: VisionWorld, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "What?", "path": "0.png"}]
    for read in (read_prompts, read_examples):
        read(world, rows, ignored_fields=["path"])
        assert "the model supports images, but no row of data source 'file' contains any" in caplog.text
        assert "Columns of the first row: 'prompt', 'path'" in caplog.text.replace("'answer', ", "")
        caplog.clear()
        read(world, rows, images_key="path")
        read(world, rows, ignored_fields=["path"], images_key=None, audios_key=None, videos_key=None)
        assert "the model reads images" not in caplog.text


def test_bad_images_a_special_token_that_marks_an_image_names_the_key(world: VisionWorld) -> None:
    for read in (read_prompts, read_examples):
        with pytest.raises(
            DataError, match=r"If it stands for an image, .* set `images_key` to the name of the column"
        ):
            read(world, [{"prompt": "<image>What?", "picture": "0.png"}], ignored_fields=["picture"])


def test_bad_images_of_a_dataset_are_rows_not_the_whole_dataset(world: VisionWorld, tmp_path: Path) -> None:
    """A library that decodes images itself would raise an error for the whole split."""
    files = [encode(NOISE), encode(NOISE)[:300], encode(picture(2, 24, 24))]
    rows = {
        "prompt": ["<image>What?"] * 3,
        "answer": ["a"] * 3,
        "images": [[{"bytes": data, "path": None}] for data in files],
    }
    features = {"prompt": datasets.Value("string"), "answer": datasets.Value("string")}
    features |= {"images": datasets.List(datasets.Image())}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "set")
    entry = {"source": "huggingface", "path": str(tmp_path / "set"), "held_out": 0, "reward": "exact"}
    media = open_media(world.model, world.store.directory)
    tokenizer = load_tokenizer(world.model)
    with pytest.raises(DataError, match=r"1 of 3 rows(?s:.)*row 2, image 1 of column 'images'(?s:.)*cannot be decoded"):
        build_data([HuggingFaceData.model_validate(entry)], tokenizer, 0, media=media)
    config = HuggingFaceData.model_validate(entry | {"on_bad_row": "skip"})
    drawn = build_data([config], tokenizer, 0, media=media).train.draw(2)
    assert {draw.media[0].digest for draw in drawn} == {compute_digest(NOISE), compute_digest(picture(2, 24, 24))}


def test_bad_images_of_a_file_that_is_too_large_is_not_read(
    world: VisionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world.model.parent / "sparse.png"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # takes no space on the disk
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the file was read"))
    with pytest.raises(DataError, match=r"'.*sparse\.png' has 10,737,418,240 bytes, but at most 67,108,864"):
        read_prompts(world, [show("sparse.png")])


EXTREME = [(1, 1), (1, 2000), (2000, 1), (3, 3), (2, 1)]


@pytest.mark.parametrize("name", VISION_MODELS)
def test_bad_images_extreme_shapes_are_seen_or_refused(tmp_path: Path, name: str) -> None:
    """No processor may replace an image that it cannot read, or mistake its width for its channels."""
    inputs = open_media(write_vision_model(tmp_path / "model", name), None)
    assert inputs is not None
    num_read = 0
    for size in EXTREME:
        colors = [Image.new("RGB", size, color) for color in ((250, 10, 10), (10, 10, 250))]
        try:
            red, blue = (inputs.get(inputs.store.add_image(image)).inputs["pixel_values"] for image in colors)
        except DataError as error:
            assert f"an image of {size[0]} × {size[1]} pixels" in str(error)
            continue
        num_read += 1
        assert red.shape == blue.shape and float((red - blue).abs().max()) > 1.0, size
    assert num_read >= 2


@pytest.mark.parametrize("read", [read_prompts, read_examples])
def test_bad_images_an_infrastructure_error_ends_the_reading_and_skips_no_row(
    world: VisionWorld, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any]
) -> None:
    """A full disk or a network file system that fails for a moment says nothing about a row."""
    rows = [show("0.png"), show("1.png")]

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(InfraError, match=r"line 1, image 1 .*: the image '.*0\.png' cannot be read: Input/output"):
            read(world, rows, on_bad_row="skip")

    def fill(*_: Any) -> None:
        raise InfraError("the disk is full")

    monkeypatch.setattr(MediaStore, "_write", fill)
    with pytest.raises(InfraError, match="the disk is full"):
        read(world, rows, on_bad_row="skip")
