"""Media of rows are decoded in a worker process, with limits on time and memory."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from worlds.dying import decode_after_a_death, die
from worlds.vision_models import picture, write_vision_model

import roll.media.store
from roll.cluster import decoding
from roll.cluster.decoding import DecodingWorker, decode_in_worker
from roll.config.load import load_config
from roll.errors import DataError
from roll.media import DECODER, AudioClip, ImageLimits, MediaStore, VideoClip, decode_medium
from roll.pipelines.state import RunState
from roll.pipelines.supervised.preparation import count_planned_steps, prepare


@pytest.fixture(name="worker")
def _worker() -> Iterator[DecodingWorker]:
    worker = DecodingWorker()
    yield worker
    worker.close()


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def gif() -> bytes:
    frames = [Image.new("L", (8, 6), value) for value in (0, 100, 200)]
    data = io.BytesIO()
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=500)
    return data.getvalue()


def wav() -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.arange(800, dtype="<i2").tobytes())
    return data.getvalue()


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("decoded in this process")

    for name in ("decode_image", "decode_audio", "decode_video"):
        monkeypatch.setattr(roll.media.store, name, fail)


def test_decoding_worker_returns_what_this_process_would_decode(
    worker: DecodingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ImageLimits()
    image, sound, video = picture(1, 20, 30), wav(), gif()
    clip, film = (decode_medium(data, "a", kind, limits, 8000) for data, kind in ((sound, "audio"), (video, "video")))
    forbid_decoding(monkeypatch)
    found: Any = worker(png(image), "a", "image", limits, 8000)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image))
    heard, seen = worker(sound, "a", "audio", limits, 8000), worker(video, "a", "video", limits, 8000)
    assert isinstance(heard, AudioClip) and isinstance(clip, AudioClip) and heard.digest == clip.digest
    assert isinstance(seen, VideoClip) and isinstance(film, VideoClip) and seen.digest == film.digest
    with pytest.raises(DataError, match="row 3: the image is not an image in a supported format"):
        worker(b"<svg/>", "row 3: the image", "image", limits, 8000)


def test_decoding_worker_is_replaced_after_its_time_limit(
    worker: DecodingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = png(picture(1, 20, 30))
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "TIME_LIMITS_S", {"image": 1e-6})
        with pytest.raises(DataError, match=r"row 3: the image could not be decoded within 1e-06 s\."):
            worker(data, "row 3: the image", "image", ImageLimits(), 16000)
    assert worker(data, "the image", "image", ImageLimits(), 16000)


def test_decoding_worker_decodes_again_if_its_process_is_killed(
    worker: DecodingWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the row would be rejected, or skipped with `on_bad_row: skip`."""
    image = picture(1, 20, 30)
    monkeypatch.setattr(decoding, "_decode", decode_after_a_death)
    found: Any = worker(png(image), str(tmp_path / "marker"), "image", ImageLimits(), 16000)
    assert (tmp_path / "marker").exists()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image))


def test_decoding_worker_reports_a_medium_whose_process_always_dies(
    worker: DecodingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_decode", die)
    with pytest.raises(DataError, match=r"row 3: the image cannot be decoded: .* ended with signal SIGKILL"):
        worker(png(picture(1, 20, 30)), "row 3: the image", "image", ImageLimits(), 16000)


def test_decoding_worker_has_a_memory_limit() -> None:
    """A file of a few KB with 64 million pixels, which take more than the limit."""
    worker = DecodingWorker(memory_limit_bytes=384 * 2**20)
    data = png(Image.new("1", (8192, 8192)))
    assert len(data) < 20_000
    try:
        with pytest.raises(DataError, match=r"row 3: the image .*(MemoryError|memory to decode)"):
            worker(data, "row 3: the image", "image", ImageLimits(), 16000)
        assert worker(png(picture(1, 20, 30)), "the image", "image", ImageLimits(), 16000)
    finally:
        worker.close()


def test_decoding_worker_starts_with_the_first_medium(tmp_path: Path) -> None:
    with decode_in_worker():
        worker = DECODER.get()
        assert isinstance(worker, DecodingWorker)
        with decode_in_worker():
            assert DECODER.get() is worker
        assert worker._started is None  # a run without media starts no process
        assert MediaStore(tmp_path).add(png(picture(1, 20, 30)), "a") == MediaStore(None).add_image(picture(1, 20, 30))
        assert worker._started is not None
    assert worker._started is None
    assert DECODER.get() is decode_medium


def test_decoding_worker_reads_the_rows_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vision_model(tmp_path / "model", "llava")
    rows: list[dict[str, Any]] = []
    for number in range(4):
        picture(number, 24, 24).save(tmp_path / f"{number}.png")
        asked, answer = {"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}
        rows.append({"images": [f"{number}.png"], "messages": [asked, answer]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "pipeline": "sft",
        "name": "run",
        "model": str(tmp_path / "model"),
        "data": [{"source": "file", "path": str(tmp_path / "rows.jsonl"), "held_out": 0}],
        "training": {"num_epochs": 1, "examples_per_step": 2},
        "output_dir": str(tmp_path),
    }
    config: Any = load_config(settings)
    forbid_decoding(monkeypatch)
    prepared = prepare(config, "supervised", media_dir=tmp_path / "media")
    assert prepared.examples.train.num_items == 4
    prepared.examples.train.draw(8)  # reads each row again
    assert count_planned_steps(config, "supervised", RunState()) == 2
