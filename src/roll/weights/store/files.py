"""Files of a weight store: a directory, or any file system of `fsspec`. Failed operations are repeated with a back-off.

`fsspec` is imported only for a URL whose scheme is not `file`.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import xxhash

from roll.errors import ConfigError, WeightSyncError, one_line_error
from roll.weights.store.handle import MIN_BYTES_PER_S

__all__ = ["StoreFiles", "check_store", "run_concurrently"]

NUM_ATTEMPTS = 5
BACKOFF_S = 0.5
"""Wait before the second attempt; it doubles before each further attempt."""
ATTEMPT_TIMEOUT_S = 60.0
"""Timeout of an attempt, in addition to the time for its bytes at `MIN_BYTES_PER_S`."""
NUM_CONNECTIONS = 4
PERMANENT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors that another attempt would not fix."""

T = TypeVar("T")
A = TypeVar("A")


class Backend(Protocol):
    """The operations of a file system, with paths relative to the store."""

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        ...

    def write(self, path: str, data: bytes | bytearray) -> None:
        """Write a file that does not exist yet."""
        ...

    def delete(self, path: str) -> None:
        """Delete a directory with its content, if it exists."""
        ...


class DirectoryBackend:
    """A directory that is mounted on all hosts. A file is renamed to its final name when it is complete."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        """Return a file's content; `Backend` documents all methods."""
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes | bytearray) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, path: str) -> None:
        if (self._root / path).exists():
            shutil.rmtree(self._root / path)


class FsspecBackend:
    """A file system of `fsspec`. Object stores show a file when its upload is complete."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = _open_filesystem(url)

    def read(self, path: str) -> bytes:
        """Return a file's content; `Backend` documents all methods."""
        return self._fs.cat_file(f"{self._root}/{path}")

    def write(self, path: str, data: bytes | bytearray) -> None:
        target = f"{self._root}/{path}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(target, bytes(data))

    def delete(self, path: str) -> None:
        target = f"{self._root}/{path}"
        self._fs.invalidate_cache()
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)


class StoreFiles:
    """Reads, writes and deletes files of a store, with retries.

    Args:
        url: A directory, or a URL of `fsspec`.
        is_cancelled: A function that returns True if the caller has canceled the operation, which then ends with an
            error.
    """

    def __init__(self, url: str, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self.url = url
        self._is_cancelled = is_cancelled
        self._backend: Backend = _open_backend(url)

    def read(self, path: str, num_bytes: int, checksum: int) -> bytes:
        """Return the content of a file after its size and checksum were verified.

        Raises:
            WeightSyncError: the file is missing, corrupted, or cannot be read; the message names file and store.
        """

        def read_and_verify() -> bytes:
            data = self._backend.read(path)
            if len(data) != num_bytes:
                raise ValueError(f"the file has {len(data)} bytes, expected {num_bytes}")
            if (found := xxhash.xxh3_64_intdigest(data)) != checksum:
                raise ValueError(f"the file is corrupted: its checksum is {found:016x}, expected {checksum:016x}")
            return data

        return self._attempt("read", path, num_bytes, read_and_verify)

    def write(self, path: str, data: bytes | bytearray) -> int:
        """Write a file, and return its checksum.

        Raises:
            WeightSyncError: the file cannot be written; the message names file and store.
        """
        self._attempt("written", path, len(data), lambda: self._backend.write(path, data))
        return xxhash.xxh3_64_intdigest(data)

    def delete(self, directory: str) -> None:
        """Delete a directory with its content, if it exists.

        Raises:
            WeightSyncError: the directory cannot be deleted; the message names directory and store.
        """
        self._attempt("deleted", directory, 0, lambda: self._backend.delete(directory))

    def _attempt(self, action: str, path: str, num_bytes: int, function: Callable[[], T]) -> T:
        timeout_s = ATTEMPT_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S
        for number in range(1, NUM_ATTEMPTS + 1):
            if self._is_cancelled():
                raise WeightSyncError(f"weight store '{self.url}': '{path}' was not {action}: the sync was aborted.")
            try:
                return _call_with_timeout(function, timeout_s)
            except Exception as error:
                if number < NUM_ATTEMPTS and getattr(error, "errno", None) not in PERMANENT_ERRNOS:
                    time.sleep(BACKOFF_S * 2 ** (number - 1))
                    continue
                attempts = f" after {number} attempts" if number > 1 else ""
                raise WeightSyncError(
                    f"weight store '{self.url}': '{path}' cannot be {action}{attempts}: {one_line_error(error)}. "
                    "Check that the store has free space and that trainer and engines can reach it, then resume "
                    "the run."
                ) from error
        raise AssertionError("unreachable")


def run_concurrently(function: Callable[[A], T], arguments: Iterable[A]) -> Iterator[T]:
    """Yield the results of a function in order; up to `NUM_CONNECTIONS` calls run ahead in threads."""
    with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="weight-store") as pool:
        running: deque[Future[T]] = deque()
        try:
            for argument in arguments:
                running.append(pool.submit(function, argument))
                if len(running) == NUM_CONNECTIONS:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def check_store(url: str) -> None:
    """Check that a store can be opened, written and read.

    Raises:
        ConfigError: the store cannot be used; the message has the key, the value and the remedy.
    """
    backend = _open_backend(url)
    directory = f".roll-check-{uuid.uuid4().hex}"

    def write_and_read() -> bytes:
        try:
            backend.write(f"{directory}/test", b"roll")
            return backend.read(f"{directory}/test")
        finally:
            backend.delete(directory)

    try:
        content = _call_with_timeout(write_and_read, ATTEMPT_TIMEOUT_S)
    except Exception as error:
        raise ConfigError(
            f"weight_sync.store '{url}' cannot be written: {one_line_error(error)}. Choose a directory or URL that the "
            "trainer can write and the engines can read, or set weight_sync.transport to auto."
        ) from error
    if content != b"roll":
        raise ConfigError(
            f"weight_sync.store '{url}' returned different bytes than were written to it: choose another store."
        )


def _open_backend(url: str) -> Backend:
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme in ("", "file"):
        return DirectoryBackend(Path(url.removeprefix("file://")))
    return FsspecBackend(url)


def _open_filesystem(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(
            f"weight_sync.store '{url}' requires the package fsspec: install it with `pip install fsspec`, or set "
            "weight_sync.store to a directory."
        ) from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # its message names the package, such as "Install s3fs to access S3"
        raise ConfigError(
            f"weight_sync.store '{url}' requires a package that is not installed ({error}): install it with pip on "
            "the hosts of trainer and engines, or set weight_sync.store to a directory."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"weight_sync.store '{url}' has the scheme '{scheme}', which fsspec cannot open ({error}): use a "
            "directory, or a URL such as s3://bucket/path."
        ) from error


def _call_with_timeout(function: Callable[[], T], timeout_s: float) -> T:
    """Call a function in a thread; after the timeout, the thread is abandoned.

    Raises:
        TimeoutError: the function did not return in time.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    # A daemon thread, because a call to a hung store must not prevent the process from exiting.
    threading.Thread(target=run, name="weight-store-call", daemon=True).start()
    try:
        return result.result(timeout_s)
    except TimeoutError as error:
        if result.done():  # the function itself raised this error
            raise
        raise TimeoutError(f"the store did not respond within {timeout_s:.0f} s") from error
