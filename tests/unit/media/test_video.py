"""Videos from frames, arrays and animated images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from roll.errors import DataError
from roll.media import MediaStore, VideoClip, VideoLimits, build_video, decode_video

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 6, 8, 3), dtype=np.uint8)


def animation(*durations: int, form: str = "WEBP", frames: Any = FRAMES) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    target = io.BytesIO()
    options = {"lossless": True} if form == "WEBP" else {}
    images[0].save(target, form, save_all=True, append_images=images[1:], duration=list(durations), **options)
    return target.getvalue()


def test_video_frames_arrays_and_lossless_files_are_the_same_video(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    digest = store.add_clip(build_video(FRAMES, 4, "a"))
    assert store.add_clip(build_video([Image.fromarray(frame) for frame in FRAMES], 4.0, "a")) == digest
    assert store.add(animation(*[250] * 5), "a", "video") == digest
    assert store.add_clip(build_video(FRAMES, 2, "a")) != digest  # other timing
    assert store.add_clip(build_video(FRAMES[::-1], 4, "a")) != digest  # other order
    read = MediaStore(tmp_path).get(digest)
    assert isinstance(read, VideoClip) and read.fps == 4.0
    np.testing.assert_array_equal(read.frames, FRAMES)


def test_video_gif_has_its_frames() -> None:
    gray = np.repeat(np.arange(0, 200, 40, dtype=np.uint8), 6 * 8 * 3).reshape(5, 6, 8, 3)
    clip = decode_video(animation(*[100] * 5, form="GIF", frames=gray), "a")
    assert clip.fps == 10.0
    np.testing.assert_array_equal(clip.frames, gray)


def test_video_gif_that_is_too_long_is_refused_without_counting_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    gray = np.repeat(np.arange(0, 200, 10, dtype=np.uint8), 6 * 8 * 3).reshape(20, 6, 8, 3)
    data, seen = animation(*[100] * 20, form="GIF", frames=gray), []

    def count(_: Any) -> int:
        raise AssertionError("counts all frames")

    seek = GifImageFile.seek
    monkeypatch.setattr(GifImageFile, "n_frames", property(count))
    monkeypatch.setattr(GifImageFile, "seek", lambda self, frame: (seen.append(frame), seek(self, frame))[1])
    with pytest.raises(DataError, match="at least 6 frames of 48 pixels, but at most 5 frames"):
        decode_video(data, "a", VideoLimits(num_frames=5))
    assert max(seen) == 5
    assert len(decode_video(data, "a").frames) == 20


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (FRAMES, None, "frame rate None: `fps` must be"),
        (FRAMES, 0, "frame rate 0"),
        (FRAMES, float("nan"), "frame rate nan"),
        (FRAMES.astype(np.float32), 2, "array of float32"),
        (FRAMES[..., :1], 2, r"shape \(5, 6, 8, 1\)"),
        (FRAMES[:0], 2, "no frames"),
        ([], 2, "no frames"),
        ([Image.new("RGB", (8, 6)), Image.new("RGB", (6, 8))], 2, "frames of 8 × 6 and of 6 × 8 pixels"),
        (np.zeros((9, 2, 2, 3), np.uint8), 2, "at least 9 frames of 4 pixels, but at most 8 frames"),
        (np.zeros((5, 20, 20, 3), np.uint8), 2, "at least 5 frames of 400 pixels, but at most 8 frames and 1,000"),
    ],
)
def test_video_that_cannot_be_read_is_reported(frames: Any, fps: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"row 3: the video .*{message}"):
        build_video(frames, fps, "row 3: the video", VideoLimits(num_frames=8, num_pixels=1000))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: 0 bytes"),
        (animation(100, 100, 300, 100, 100), "frame durations of 100 to 300 ms"),
        (animation(*[100] * 5)[:200], "cannot be decoded"),
        (b"\0\0\0\x18ftypmp42" + bytes(50), "not an animated image; it begins with .*`av`"),
    ],
)
def test_video_files_that_cannot_be_read_are_reported(data: bytes, message: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(DataError, match=f"row 3: the video .*{message}"):
        decode_video(data, "row 3: the video")
    still = io.BytesIO()
    Image.new("RGB", (4, 4)).save(still, "PNG")
    with pytest.raises(DataError, match="an image with one frame, not a video"):
        decode_video(still.getvalue(), "a")


def test_video_archive_that_is_corrupted_is_reported(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    digest = store.add_clip(build_video(FRAMES, 4, "a"))
    path = tmp_path / digest[:2] / digest
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=f"video {digest[:12]} is corrupted"):
        MediaStore(tmp_path).get(digest)
