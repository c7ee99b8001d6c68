"""Images of rows become parts of messages, and one placeholder of the template becomes the image's tokens."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from worlds.vision_models import VisionWorld, write_vision_model

from roll.config.data import FileData
from roll.data import build_data
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow
from roll.data.chat import ChatRenderer
from roll.data.media import MediaReader, place_media
from roll.data.media_text import MediaText
from roll.data.prompt_rendering import tokenize_prompt
from roll.data.prompts import PromptReader
from roll.errors import DataError
from roll.media import MediaStore, compute_digest
from roll.models import load_tokenizer
from roll.models.multimodal import open_media
from roll.types import ImagePart, Message, Prompt, TextPart

RED, BLUE = (Image.new("RGB", (32, 32), color) for color in ("red", "blue"))


def png(image: Image.Image = RED) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def user(content: Any) -> Message:
    return Message(role="user", content=content)


def part(image: Image.Image = RED) -> ImagePart:
    return ImagePart(digest=compute_digest(image))


@pytest.fixture(name="reader")
def _reader(tmp_path: Path) -> MediaReader:
    (tmp_path / "red.png").write_bytes(png())
    return MediaReader(MediaStore(None), tmp_path)


def test_image_reader_every_form_of_an_image_is_the_same_image(reader: MediaReader, tmp_path: Path) -> None:
    encoded = base64.b64encode(png()).decode()
    forms: list[Any] = [
        *("red.png", str(tmp_path / "red.png"), tmp_path / "red.png", png(), bytearray(png()), RED),
        *(np.asarray(RED), np.asarray(RED).tolist(), f"data:image/png;base64,{encoded}"),
        *({"bytes": png(), "path": None}, {"path": "red.png", "bytes": None}, {"image": RED}),
        *({"image_url": {"url": f"data:image/png;base64,{encoded}"}}, {"url": f"data:image/png;base64,{encoded}"}),
    ]
    assert {reader.read(form, "row 1").digest for form in forms} == {compute_digest(RED)}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("https://example.org/cat.png", "images are not downloaded"),
        ("file:///etc/passwd", "use a path without"),
        ("missing.png", "'missing.png' is not a file in"),
        (b"", "is empty"),
        (b"<svg/>", "not an image in a supported format"),
        ("data:image/png;base64,%%%", "not valid base64"),
        (None, "must be a path, bytes, base64, or an array"),
        (7, "must be a path, bytes, base64, or an array"),
        ({}, "must have bytes or a path"),
        ({"bytes": None, "path": None}, "must have bytes or a path"),
        (np.zeros((2, 2, 5), np.uint8), "must be uint8 with shape"),
        ([[0.5]], "must be uint8 with shape"),
    ],
)
def test_image_reader_other_values_are_bad_rows(reader: MediaReader, value: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        reader.read(value, "row 1")


def test_place_images_replace_their_places_in_order() -> None:
    messages = [user("a <image> b <image>"), Message(role="assistant", content="c")]
    placed = place_media(messages, [part(RED), part(BLUE)], "row 1")
    assert placed[0].content == (TextPart(text="a "), part(RED), TextPart(text=" b "), part(BLUE))
    assert placed[1] == messages[1]


def test_place_images_without_places_come_before_the_first_question() -> None:
    placed = place_media([Message(role="system", content="s"), user("a")], [part()], "row 1")
    assert placed[1].content == (part(), TextPart(text="a"))


def test_place_images_other_numbers_are_a_bad_row() -> None:
    for places, images, said in (
        (1, 2, "has 2 images, but its messages have 1 placeholder <image>: use one for each"),
        (2, 1, "has 1 image, but its messages have 2 placeholders <image>: use one for each"),
    ):
        with pytest.raises(BadRow, match=said):
            place_media([user("<image>" * places)], [part()] * images, "row 1")
    with pytest.raises(BadRow, match="no user message"):
        place_media([Message(role="system", content="s")], [part()], "row 1")


def read(directory: Path, row: dict[str, Any], **settings: Any) -> Prompt:
    (directory / "red.png").write_bytes(png())
    (directory / "blue.png").write_bytes(png(BLUE))
    config = FileData(source="file", path=str(directory / "rows.jsonl"), reward="math", **settings)
    reader = PromptReader(config, "d", BadRowCollector(), "rlvr", MediaReader(MediaStore(None), directory))
    return reader.read(json.loads(json.dumps(row)), "1", "row 1")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image> What is it?", "images": ["red.png"]},
        {"prompt": [{"role": "user", "content": "<image> What is it?"}], "image": "red.png"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, " What is it?"]}], "images": [{"path": "red.png"}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "path": "red.png"}, " What is it?"]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "red.png"}, " What is it?"]}]},
    ],
)
def test_prompt_images_published_forms_of_rows_are_read(tmp_path: Path, row: dict[str, Any]) -> None:
    prompt = read(tmp_path, row | {"answer": "7"})
    assert prompt.messages == (user((part(), TextPart(text=" What is it?"))),)
    assert "images" not in prompt.metadata
    assert "image" not in prompt.metadata


def test_prompt_images_equal_texts_with_other_images_are_other_prompts(tmp_path: Path) -> None:
    reader = PromptReader(FileData(source="file", path="x.jsonl", reward="math"), "d", BadRowCollector())
    rows = [{"prompt": "What?", "answer": "7", "images": [name]} for name in ("red.png", "blue.png")]
    keys = [list(reader.get_question(read(tmp_path, row))) for row in rows]
    assert keys[0] != keys[1]


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> VisionWorld:
    directory = tmp_path_factory.mktemp("vision")
    return VisionWorld.create(write_vision_model(directory / "model", "smolvlm"), directory / "media")


def renderer_of(world: VisionWorld) -> ChatRenderer:
    media = open_media(world.model, world.store.directory)
    assert media is not None
    return ChatRenderer(load_tokenizer(world.model), MediaText(media))


def test_chat_images_become_the_tokens_of_the_processor(world: VisionWorld) -> None:
    renderer = renderer_of(world)
    shown = [ImagePart(digest=digest) for digest in world.digests[:2]]
    prompt = Prompt(uid="d/1", domain="d", messages=(user((TextPart(text="Look: "), shown[0], shown[1])),))
    encoded = tokenize_prompt(prompt, renderer)
    processor = world.processor._processor
    text = "<|im_start|>user\nLook: <image><image><|im_end|>\n<|im_start|>assistant\n"
    images = [world.store.get(digest) for digest in world.digests[:2]]
    expected = processor(text=[text], images=[images], return_tensors="np", add_special_tokens=False)["input_ids"][0]
    assert encoded.token_ids.tolist() == expected.tolist()
    assert [span.digest for span in encoded.media] == list(world.digests[:2])


def test_chat_images_a_placeholder_in_a_text_stays_text(world: VisionWorld) -> None:
    renderer = renderer_of(world)
    for text in ("<image>", "a <image> b", "<fake_token_around_image><image>"):
        encoded = renderer.encode(renderer.render_text([user(text)]))
        assert world.processor.feature_ids["image"] not in encoded.token_ids
        assert encoded.media == ()
    shown = ImagePart(digest=world.digests[0])
    encoded = renderer.encode(renderer.render_text([user((TextPart(text="<image> is "), shown))]))
    assert len(encoded.media) == 1


def test_chat_images_a_conversation_is_masked_around_them(world: VisionWorld) -> None:
    renderer = renderer_of(world)
    messages = [
        user((ImagePart(digest=world.digests[0]), TextPart(text="what?"))),
        Message(role="assistant", content="x"),
    ]
    assert renderer.media is not None
    tokens, mask, media = renderer.media.expand_conversation(*renderer.tokenize_conversation(messages), messages)
    assert len(tokens) == len(mask)
    assert not mask[: media[0].end].any()
    assert renderer.decode_raw(tokens[mask]) == "x<|im_end|>"


def test_chat_images_a_missing_one_is_named(world: VisionWorld) -> None:
    renderer = renderer_of(world)
    with pytest.raises(DataError, match="medium abababababab is not in the run's media store"):
        renderer.encode(renderer.render_text([user((ImagePart(digest="ab" * 32),))]))


def test_image_prompts_are_refused_for_a_reward_that_reads_text(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "smolvlm")
    (tmp_path / "red.png").write_bytes(png())
    row = {"prompt": "<image>What is it?", "answer": "red", "images": ["red.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    judge = {"type": "judge", "url": "http://localhost:1/v1", "model": "m"}
    entry = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "held_out": 0, "reward": [judge]}
    config = FileData.model_validate(entry)
    media = open_media(model, None)
    with pytest.raises(DataError, match="has images, but the reward 'judge' of domain 'file' supports only text:"):
        build_data([config], load_tokenizer(model), 0, media=media)
    config = FileData.model_validate(entry | {"reward": [{"type": "exact"}]})
    assert build_data([config], load_tokenizer(model), 0, media=media).longest_prompt is not None


def test_image_reader_files_that_change_during_the_run_do_not_change_its_data(tmp_path: Path) -> None:
    """Rows are read again when they are drawn; the fingerprints in checkpoints are those of the first reading."""
    (tmp_path / "red.png").write_bytes(png())
    reader = MediaReader(MediaStore(tmp_path / "media"), tmp_path)
    assert reader.read("red.png", "row 1") == reader.read("red.png", "row 1")
    (tmp_path / "red.png").write_bytes(png(BLUE))
    assert reader.read("red.png", "row 1").digest == compute_digest(RED)
    (tmp_path / "red.png").unlink()
    assert reader.read("red.png", "row 1").digest == compute_digest(RED)
    assert MediaReader(MediaStore(None), tmp_path).read(png(BLUE), "row 1").digest == compute_digest(BLUE)
    with pytest.raises(BadRow, match=r"'red\.png' is not a file"):  # a run that starts now needs the file
        MediaReader(MediaStore(tmp_path / "media"), tmp_path).read("red.png", "row 1")
