"""Stores images from environments and agents in the run's media store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.errors import DataError, InfraError
from roll.media import ImageLimits, MediaStore
from roll.protocols import WorkerPool
from roll.running import run_in_thread, submit_with_retries
from roll.types import Content, ImageData, ImagePart, Part, list_media

if TYPE_CHECKING:
    from PIL.Image import Image

    from roll.models.multimodal import MediaInputs

__all__ = ["ImageStorage"]

LIMITS = ImageLimits(num_bytes=32 * 2**20, num_pixels=2**25)
"""Limits of an image of an environment or agent: 32 Mi pixels, a screen of 7680 × 4320, take 96 MiB as RGB."""
MAX_IMAGES = 1_000
"""Maximum number of images in an observation or a request: each is decoded before its tokens can be counted."""
MAX_CONCURRENT_DECODES = 4
"""Maximum number of images that are decoded concurrently, so that other work of the pool does not wait for many large
images."""
DECODE_TIME_LIMIT_S = 30.0
MAX_CACHED_DIGESTS = 10_000
"""Maximum number of images whose digests are remembered, because an agent sends its whole history with each request."""


@dataclass(frozen=True, eq=False)
class ImageStorage:
    """Stores images that environments and agents send.

    Images are decoded in the worker pool with a time limit, because they may come from a program that a model controls.
    """

    inputs: MediaInputs
    """The run's media store, and the processed images of its model."""
    pool: WorkerPool | None = None
    """The worker pool; without a pool, images are decoded in a thread."""
    _decoding: dict[str, asyncio.Task[str]] = field(default_factory=dict, init=False, repr=False)
    """Images that are being decoded, by the digest of the encoded image."""
    _decode_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_DECODES), init=False, repr=False
    )

    async def store_result(self, result: Any, environment: str) -> Any:
        """Return the result of `reset` or `step` with the images of the observation and of `tool_results` stored.

        Raises:
            InfraError: An image cannot be decoded, or the model's processor rejects it.
        """
        label = f"environment '{environment}': the image of an observation"
        observation, *rest, info = result
        try:
            observation = await self.store(observation, label)
            if results := info.get("tool_results"):
                stored = [{**one, "content": await self.store(one["content"], label)} for one in results]
                info = {**info, "tool_results": stored}
        except DataError as error:
            raise InfraError(f"{error} Correct the environment.") from error
        return (observation, *rest, info)

    async def store(self, content: Content, label: str) -> Content:
        """Return the content with each `ImageData` stored and replaced by an `ImagePart`.

        Args:
            content: The content.
            label: The name of the image, for messages.

        Raises:
            DataError: An image cannot be decoded in time, or the model's processor rejects it.
            InfraError: An image cannot be stored, or its worker died in every attempt.
        """
        if isinstance(content, str) or not (media := list_media(content)):
            return content
        if len(media) > MAX_IMAGES:
            raise DataError(f"{label}: at most {MAX_IMAGES} images are allowed per observation, got {len(media)}.")
        return tuple([await self.store_part(part, label) for part in content])

    def count_tokens(self, part: Part) -> int:
        """Return the number of tokens of an image that was stored; 0 for text."""
        return len(self.inputs.get_without_inputs(part.digest).token_ids) if isinstance(part, ImagePart) else 0

    async def store_part(self, part: Part, label: str) -> Part:
        """Store a content part if it is an `ImageData`, and return the part for the observation; see `store`.

        Raises:
            DataError: See `store`.
        """
        if not isinstance(part, ImagePart):
            return part
        digest = await self._store_image(part, label) if isinstance(part, ImageData) else part.digest
        try:
            if not self.inputs.has_tokens(digest):
                # In a thread: rendering needs the number of the image's tokens, and must not wait for the processor.
                await run_in_thread(self.inputs.get_without_inputs, digest)
        except DataError as error:
            raise DataError(f"{label} cannot be used: {error}") from error
        return ImagePart(digest=digest)

    async def _store_image(self, part: ImageData, label: str) -> str:
        """Store an encoded image, and return the digest of its pixels."""
        known = self.inputs.store.known
        if part.digest in known:
            known.move_to_end(part.digest)
            return known[part.digest]
        # The rollouts of a group often send the same image at the same time; it is decoded once.
        if (task := self._decoding.get(part.digest)) is None:
            task = self._decoding[part.digest] = asyncio.create_task(self._decode(part, label))
            task.add_done_callback(lambda done: self._finish(part.digest, done))
        return await asyncio.shield(task)  # a caller that is canceled must not cancel the others

    def _finish(self, key: str, task: asyncio.Task[str]) -> None:
        del self._decoding[key]
        if task.cancelled() or task.exception() is not None:
            return
        known = self.inputs.store.known
        known[key] = task.result()
        if len(known) > MAX_CACHED_DIGESTS:
            known.popitem(last=False)

    async def _decode(self, part: ImageData, label: str) -> str:
        store = self.inputs.store
        if store.directory is None:
            return await run_in_thread(store.add, part.data, label)
        arguments = store.directory, part.data, label
        async with self._decode_slots:
            try:
                if self.pool is None:
                    found = await run_in_thread(_store_image, *arguments)
                else:
                    found = await submit_with_retries(
                        self.pool, _store_image, *arguments, time_limit_s=DECODE_TIME_LIMIT_S
                    )
            except TimeoutError:
                raise DataError(f"{label} could not be decoded within {DECODE_TIME_LIMIT_S:g} s.") from None
            except MemoryError:
                raise DataError(f"{label} requires more memory to decode than the limit of a worker.") from None
            digest, size, pixels = found
            await run_in_thread(store.cache_image, digest, size, pixels)
        return digest


def _store_image(directory: Path, data: bytes, label: str) -> tuple[str, tuple[int, int], bytes]:
    """Decode and store an image in a worker process; return its digest, its size, and its RGB pixels.

    Returning the pixels ensures that the caller never decodes untrusted images.
    """
    store = MediaStore(directory, LIMITS, cache_bytes=0)
    digest = store.add(data, label)
    image = cast("Image", store.get(digest))  # from the cache, which keeps the last one
    return digest, image.size, image.tobytes()
