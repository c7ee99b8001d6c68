"""Audio and videos of rows: columns, placeholders and parts of messages."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from worlds.omni_models import moving_shape, tone

from roll.config.data import FileData
from roll.data.bad_rows import BadRowCollector
from roll.data.cells import BadRow
from roll.data.media import MediaReader, place_media
from roll.data.prompts import PromptReader
from roll.media import MediaStore
from roll.media.wav import write_wav
from roll.types import AudioPart, ImagePart, Message, TextPart, VideoPart

TONE = tone(440)
WAV = write_wav(TONE.samples, TONE.rate)
VIDEO = moving_shape("left")


@pytest.fixture(name="reader")
def _reader(tmp_path: Path) -> MediaReader:
    (tmp_path / "a.wav").write_bytes(WAV)
    for number, frame in enumerate(VIDEO.frames):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
    return MediaReader(MediaStore(None), tmp_path)


def test_clips_every_form_of_an_audio_is_the_same_audio(reader: MediaReader, tmp_path: Path) -> None:
    text = base64.b64encode(WAV).decode()
    forms = ["a.wav", tmp_path / "a.wav", WAV, text, f"data:audio/wav;base64,{text}", {"path": "a.wav"}]
    forms += [{"bytes": WAV, "path": None}, {"data": text, "format": "wav"}, {"input_audio": {"data": text}}]
    forms += [{"array": TONE.samples, "sampling_rate": 16000}, {"array": TONE.samples.tolist(), "sampling_rate": 16000}]
    assert {reader.read(form, "row 1", "audio") for form in forms} == {AudioPart(digest=TONE.digest)}


def test_clips_every_form_of_a_video_is_the_same_video(reader: MediaReader, tmp_path: Path) -> None:
    paths = [f"{number}.png" for number in range(len(VIDEO.frames))]
    encoded = []
    for frame in VIDEO.frames:
        target = io.BytesIO()
        Image.fromarray(frame).save(target, "PNG")
        encoded.append({"bytes": target.getvalue(), "path": None})
    images = [Image.fromarray(frame) for frame in VIDEO.frames]
    images[0].save(tmp_path / "a.webp", save_all=True, append_images=images[1:], duration=500, lossless=True)
    forms = [{"frames": frames, "fps": 2} for frames in (paths, encoded, images, VIDEO.frames, VIDEO.frames.tolist())]
    forms += [{"video": paths, "fps": 2.0}, "a.webp", {"path": "a.webp"}, (tmp_path / "a.webp").read_bytes()]
    assert {reader.read(form, "row 1", "video") for form in forms} == {VideoPart(digest=VIDEO.digest)}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("audio", "b.wav", "the audio 'b.wav' is not a file in"),
        ("audio", "http://a.org/b.wav", "audio files are not downloaded"),
        ("audio", [0.1, 0.2], "must be a path, bytes, base64, or an object with `array` and `sampling_rate`"),
        ("audio", {"array": [0.1, 0.2]}, "sampling rate from 1,000 to 1,000,000 Hz, got None"),
        ("audio", {"sound": 1}, "audio must have bytes or a path, got an object with sound"),
        ("audio", "0.png", "is not a WAV file"),
        ("video", ["0.png", "1.png"], "frame rate None: `fps` must be"),
        ("video", {"frames": ["0.png", "9.png"], "fps": 2}, "the image '9.png' is not a file"),
        ("video", {"frames": [], "fps": 2}, "no frames"),
        ("video", {"path": "a.wav", "fps": 2}, "the frame rate of a file cannot be set"),
        ("video", "0.png", "an image with one frame, not a video"),
        ("video", 7, "must be a path, bytes, base64, or an object with `frames` and `fps`"),
    ],
)
def test_clips_other_values_are_bad_rows(reader: MediaReader, kind: Any, value: Any, message: str) -> None:
    with pytest.raises(BadRow, match=f"row 1.*: .*{message}"):
        reader.read(value, "row 1", kind)


def test_clips_a_model_that_reads_only_images_makes_bad_rows() -> None:
    reader = MediaReader(MediaStore(None, kinds=("image",)))
    with pytest.raises(BadRow, match=r"row 1: the audio is of type 'audio', but the model supports only: image"):
        reader.read(WAV, "row 1", "audio")


def test_clips_replace_their_places_by_kind_and_the_others_come_first() -> None:
    image, first, second, video = (
        ImagePart(digest="aa"),
        AudioPart(digest="bb"),
        AudioPart(digest="cc"),
        VideoPart(digest="dd"),
    )
    message = Message(role="user", content="<audio> or <audio>, <image>?")
    (placed,) = place_media([message], [image, first, second, video], "row 1")
    texts = [TextPart(text=text) for text in (" or ", ", ", "?")]
    assert placed.content == (video, first, texts[0], second, texts[1], image, texts[2])
    with pytest.raises(BadRow, match="row 1: the row has 1 audio file, but its messages have 2 placeholders <audio>"):
        place_media([message], [first], "row 1")
    # A row without videos may speak of "<video>".
    text = Message(role="user", content="a <video> tag")
    assert place_media([text], [], "row 1") == (text,)


def read_prompt(directory: Path, row: dict[str, Any], **settings: Any) -> Any:
    config = FileData.model_validate(
        {"source": "file", "path": str(directory / "rows.jsonl"), "reward": "math", **settings}
    )
    reader = PromptReader(config, "d", BadRowCollector(), "rlvr", MediaReader(MediaStore(None), directory))
    return reader.read(json.loads(json.dumps({"answer": "1", **row})), "1", "row 1").messages


def test_clips_columns_and_parts_of_messages_are_read(reader: MediaReader, tmp_path: Path) -> None:
    paths = [f"{number}.png" for number in range(len(VIDEO.frames))]
    film = {"frames": paths, "fps": 2}
    audio, video = AudioPart(digest=TONE.digest), VideoPart(digest=VIDEO.digest)
    expected = (audio, TextPart(text=" "), video, TextPart(text=" which?"))
    rows = [
        {"prompt": "<audio> <video> which?", "audios": ["a.wav"], "videos": [film]},
        {"prompt": "<audio> <video> which?", "audio": "a.wav", "video": film},
    ]
    parts = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
        {"type": "text", "text": " "},
        {"type": "video", "video": paths, "fps": 2},
        {"type": "text", "text": " which?"},
    ]
    rows.append({"prompt": [{"role": "user", "content": parts}]})
    parts = [{"type": "audio"}, parts[1], {"type": "video"}, parts[3]]
    rows.append({"prompt": [{"role": "user", "content": parts}], "audios": ["a.wav"], "videos": [film]})
    for row in rows:
        (message,) = read_prompt(tmp_path, row)
        assert message.content == expected
    (message,) = read_prompt(tmp_path, {"prompt": "which?", "sound": "a.wav"}, audios_key="sound")
    assert message.content == (audio, TextPart(text="which?"))


def test_clips_frames_that_change_during_the_run_do_not_change_its_data(reader: MediaReader, tmp_path: Path) -> None:
    film = {"frames": ["0.png", "1.png"], "fps": 2}
    first = reader.read(film, "row 1", "video")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / "1.png")
    assert reader.read(film, "row 1", "video") == first
    assert reader.read({**film, "fps": 4}, "row 1", "video") != first
    assert MediaReader(MediaStore(None), tmp_path).read(film, "row 1", "video") != first  # a run that starts now
