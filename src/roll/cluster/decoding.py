"""Decodes the media of rows in a worker process, with limits on time and memory.

    MediaReader ─► MediaStore.add ─► worker process: decoder ─► pixels or samples ─► digest, file

This worker is not part of the run's worker pool, because rows are read before a run starts its roles. Rows are read one
by one, so one worker is enough; it starts with the first medium and ends after the last row. Runs without media start
no process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roll.cluster.pool import MEMORY_LIMIT_BYTES, LocalWorkerPool
from roll.errors import DataError, WorkerDiedError
from roll.media import DECODER, ImageLimits, MediaContent, decode_medium
from roll.running import submit_with_retries, wait_for_future
from roll.types import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DecodingWorker", "decode_in_worker"]

TIME_LIMITS_S: Mapping[MediaKind, float] = {"image": 30.0, "audio": 120.0, "video": 300.0}
"""Maximum time to decode one medium; the largest ones that are allowed take a tenth of it."""


@contextmanager
def decode_in_worker() -> Iterator[None]:
    """Decode all media in a worker process within the `with` block; the first medium starts the process."""
    if isinstance(DECODER.get(), DecodingWorker):
        yield
        return
    worker = DecodingWorker()
    token = DECODER.set(worker)
    try:
        yield
    finally:
        DECODER.reset(token)
        worker.close()


class DecodingWorker:
    """A `roll.media.Decoder` that decodes media in a worker process; a process that hangs or dies is replaced.

    If the process dies, the medium is decoded again, so that a row is not rejected or skipped only because the kernel
    killed the process.

    Args:
        memory_limit_bytes: The memory limit of the process.
    """

    def __init__(self, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._started: tuple[asyncio.AbstractEventLoop, threading.Thread, LocalWorkerPool] | None = None
        self._lock = threading.Lock()

    def __call__(self, data: bytes, name: str, kind: MediaKind, limits: ImageLimits, audio_rate: int) -> MediaContent:
        """Decode a medium; see `decode_medium`.

        Raises:
            DataError: The medium cannot be decoded, or needs too much time or memory.
        """
        loop, _, pool = self._start()
        arguments = data, name, kind, limits, audio_rate
        work = submit_with_retries(pool, _decode, *arguments, time_limit_s=TIME_LIMITS_S[kind])
        try:
            found = wait_for_future(asyncio.run_coroutine_threadsafe(work, loop))
        except TimeoutError:
            raise DataError(f"{name} could not be decoded within {TIME_LIMITS_S[kind]:g} s.") from None
        except MemoryError:
            raise DataError(
                f"{name} requires more than {self._memory_limit_bytes / 2**30:g} GiB of memory to decode."
            ) from None
        except WorkerDiedError as error:
            raise DataError(f"{name} cannot be decoded: {error}.") from error
        return _build_image(*found) if kind == "image" else found

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            started, self._started = self._started, None
        if started is not None:
            loop, thread, pool = started
            asyncio.run_coroutine_threadsafe(pool.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread, LocalWorkerPool]:
        with self._lock:
            if self._started is None:
                # An event loop of its own: rows are read by plain functions, some of which block the run's loop.
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="decoding", daemon=True)
                thread.start()
                self._started = loop, thread, LocalWorkerPool(1, memory_limit_bytes=self._memory_limit_bytes)
            return self._started


def _decode(data: bytes, name: str, kind: MediaKind, limits: ImageLimits, audio_rate: int) -> Any:
    """Decode a medium in the worker; return an image as its size and its RGB pixels."""
    content: Any = decode_medium(data, name, kind, limits, audio_rate)
    return (content.size, content.tobytes()) if kind == "image" else content


def _build_image(size: tuple[int, int], pixels: bytes) -> Image:
    from PIL import Image

    return Image.frombytes("RGB", size, pixels)
