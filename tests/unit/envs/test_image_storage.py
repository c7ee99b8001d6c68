"""Images that environments and agents send: each is decoded once, however many rollouts send it."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

import roll.media.store
from roll.envs.image_storage import ImageStorage
from roll.errors import DataError, InfraError
from roll.media import MediaStore, compute_digest
from roll.media.images import decode_image
from roll.models.multimodal import MediaInputs, ProcessedMedia
from roll.protocols import WorkerPool
from roll.types import ImageData, ImagePart


class Processor:
    """Processes every image to one token."""

    def process(self, image: Image.Image) -> ProcessedMedia:
        inputs: Any = {"pixels": np.asarray(image)}
        return ProcessedMedia(token_ids=np.array([7], np.int32), num_features=1, grid=None, inputs=inputs)


class Pool:
    """Runs functions in threads, like a worker pool in processes."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        self.num_calls += 1
        return await asyncio.wait_for(asyncio.to_thread(function, *args), time_limit_s)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each image that is decoded."""
    found: list[int] = []

    def count(data: bytes, what: str, limits: Any = None) -> Image.Image:
        found.append(len(data))
        return decode_image(data, what, limits)

    monkeypatch.setattr(roll.media.store, "decode_image", count)
    return found


@pytest.fixture
def inputs(tmp_path: Path) -> MediaInputs:
    return MediaInputs(MediaStore(tmp_path / "media"), cast(Any, Processor()))


def encode(image: Image.Image) -> ImageData:
    data = io.BytesIO()
    image.save(data, "PNG")
    return ImageData.from_bytes(data.getvalue())


def draw(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8))


@pytest.mark.parametrize("with_pool", [True, False])
async def test_image_storage_images_of_many_rollouts_are_decoded_once(
    inputs: MediaInputs, decoded: list[int], with_pool: bool
) -> None:
    pool = Pool()
    storage = ImageStorage(inputs, cast(WorkerPool, pool) if with_pool else None)
    images = [draw(number) for number in range(5)]
    contents = [(encode(images[number % 5]),) for number in range(40)]
    stored = await asyncio.gather(*(storage.store(content, "the image") for content in contents))
    assert stored == [(ImagePart(digest=compute_digest(images[number % 5])),) for number in range(40)]
    assert len(decoded) == 5 and pool.num_calls == (5 if with_pool else 0)
    assert inputs.num_processed == 5
    assert all(np.array_equal(inputs.store.get(compute_digest(image)), image) for image in images)
    assert len(decoded) == 5  # the pixels came back from the worker
    await ImageStorage(inputs).store(contents[0], "the image")
    assert len(decoded) == 5  # another part of the run has seen it


async def test_image_storage_a_bad_image_is_reported_to_every_rollout(inputs: MediaInputs, decoded: list[int]) -> None:
    storage = ImageStorage(inputs, cast(WorkerPool, Pool()))
    bad = (ImageData.from_bytes(b"<svg></svg>"),)
    found = await asyncio.gather(*(storage.store(bad, "the image") for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [DataError] * 3 and len(decoded) == 1
    assert "not an image in a supported format" in str(found[0])
    with pytest.raises(DataError):
        await storage.store(bad, "the image")  # not remembered as good


async def test_image_storage_a_canceled_rollout_leaves_the_image_to_the_others(inputs: MediaInputs) -> None:
    storage = ImageStorage(inputs, cast(WorkerPool, Pool()))
    first, second = (asyncio.create_task(storage.store((encode(draw(0)),), "the image")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == (ImagePart(digest=compute_digest(draw(0))),)
    assert first.cancelled()


def test_media_store_threads_that_need_the_same_image_decode_it_once(tmp_path: Path, decoded: list[int]) -> None:
    digest = MediaStore(tmp_path).add_image(draw(0))
    store, start = MediaStore(tmp_path), threading.Barrier(6)
    found: list[Image.Image] = []

    def get() -> None:
        start.wait()
        found.append(store.get(digest))

    threads = [threading.Thread(target=get) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(decoded) == 1


def test_media_store_pixels_of_another_image_are_refused(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    digest = store.add_image(draw(0))
    with pytest.raises(DataError, match="do not match the digest of image"):
        store.cache_image(digest, (32, 24), draw(1).tobytes())
    store.cache_image(digest, (32, 24), draw(0).tobytes())


async def test_image_storage_too_many_images_at_once_are_refused(inputs: MediaInputs, decoded: list[int]) -> None:
    storage = ImageStorage(inputs, cast(WorkerPool, Pool()))
    with pytest.raises(DataError, match=r"the image: at most 1000 images are allowed per observation, got 1001"):
        await storage.store((encode(draw(0)),) * 1001, "the image")
    assert decoded == []


async def test_image_storage_few_images_are_decoded_at_once(inputs: MediaInputs) -> None:
    running, most = 0, 0

    class Counting(Pool):
        async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().submit(function, *args, time_limit_s=time_limit_s)

    storage = ImageStorage(inputs, cast(WorkerPool, Counting()))
    await asyncio.gather(*(storage.store((encode(draw(number)),), "the image") for number in range(12)))
    assert 1 <= most <= 4


async def test_image_storage_an_image_that_takes_too_long_is_reported(inputs: MediaInputs) -> None:
    class Hanging(Pool):
        async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
            raise TimeoutError(f"took longer than {time_limit_s:g} s")

    storage = ImageStorage(inputs, cast(WorkerPool, Hanging()))
    with pytest.raises(DataError, match=r"the image could not be decoded within 30 s\."):
        await storage.store((encode(draw(0)),), "the image")
    result = ((encode(draw(0)),), {})
    with pytest.raises(
        InfraError, match=r"environment 'e': the image of an observation could not be decoded within 30 s\."
    ):
        await storage.store_result(result, "e")
