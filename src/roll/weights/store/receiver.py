"""The engine's end of the transport `store`: fetch an update while the engine generates, then map the local copy."""

from __future__ import annotations

import asyncio
import atexit
import mmap
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from roll.running import run_in_thread
from roll.types import WeightUpdate
from roll.weights.receiver import RECEIVE_TIMEOUT_S, ReceiverLocation, TensorStream
from roll.weights.shared_memory import map_tensors
from roll.weights.store.handle import StoreHandle
from roll.weights.store.local_copy import LocalCopy, find_local_file

__all__ = ["WeightPrefetcher", "receive"]


class WeightPrefetcher:
    """Fetches updates of one engine before the engine is paused. Close the prefetcher together with the engine."""

    def __init__(self) -> None:
        self._copies: dict[Path, LocalCopy] = {}
        self._lock = threading.Lock()

    async def prefetch(self, update: WeightUpdate) -> None:
        """Fetch an update of the transport `store` in a thread; do nothing for other transports.

        Raises:
            WeightSyncError: the update cannot be fetched; the message names the file.
        """
        if not isinstance(update.handle, StoreHandle):
            return
        cancelled = threading.Event()
        try:
            await run_in_thread(self.fetch, update, RECEIVE_TIMEOUT_S, cancelled)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def fetch(self, update: WeightUpdate, timeout_s: float, cancelled: threading.Event | None = None) -> Path:
        """Fetch an update; return the local file with its tensors."""
        handle: StoreHandle = update.handle
        with self._lock:
            directory = find_local_file(handle).parent
            copy = self._copies.get(directory)
            if copy is None:
                copy = self._copies[directory] = LocalCopy(handle)
        return copy.fetch(
            handle,
            update.manifest,
            timeout_s + handle.max_fetch_s,
            (lambda: False) if cancelled is None else cancelled.is_set,
        )

    def close(self) -> None:
        """Delete the local copies that no other engine uses. Calling it twice is safe."""
        with self._lock:
            for copy in self._copies.values():
                copy.close()
            self._copies.clear()


_process_prefetcher = WeightPrefetcher()
"""Local copies of engines that do not prefetch, kept until this process ends."""
atexit.register(_process_prefetcher.close)


@contextmanager
def receive(update: WeightUpdate, location: ReceiverLocation) -> Generator[TensorStream]:
    """Fetch the local copy unless it was prefetched, map it, and yield the stream of tensors."""
    path = find_local_file(update.handle)
    if not path.exists():
        path = _process_prefetcher.fetch(update, location.timeout_s)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        num_bytes = os.fstat(descriptor).st_size
        # Copy-on-write, as in `shared_memory`; the mapping stays valid if the file is deleted.
        mapped = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY) if num_bytes else b""
    finally:
        os.close(descriptor)
    yield map_tensors(update, mapped)
