"""The journal of a server: its accepted requests and their results, from which a restarted server continues.

    accept a request ─► append its body ─► sync ─► return its promise
    compute          ─► append the outcome ─► sync ─► show it

The file is a sequence of records: a line of JSON, the content, and a line break. A process that is killed leaves at
most one incomplete record at the end, which is cut off when the file is opened again. Every answer waits for `sync`, so
what a client knows survives power loss. One sync covers all records that were added before it began.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.errors import ConfigError
from roll.serving.failures import RequestFailure
from roll.serving.submissions import Result, Submission
from roll.tracking import atomic

__all__ = ["FINISH", "Journal", "Record"]

logger = logging.getLogger(__name__)

FINISH = "finish"
"""The path of the record that ends a session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A record of the journal."""

    kind: str
    """`request` or `outcome`."""
    request_id: str
    content: bytes
    owner: str = ""
    path: str = ""
    content_type: str = ""
    failure: dict[str, Any] | None = None
    """For an outcome that is a failure: the arguments of `RequestFailure`."""

    @property
    def outcome(self) -> Result | RequestFailure:
        """The recorded outcome, if `kind` is `outcome`."""
        if self.failure is not None:
            return RequestFailure(**self.failure)
        return Result(body=self.content, content_type=self.content_type)

    def encode(self) -> bytes:
        """Return the bytes of the record."""
        head = {name: getattr(self, name) for name in Record.__dataclass_fields__ if name != "content"}
        head |= {"size": len(self.content), "crc": zlib.crc32(self.content)}
        return json.dumps(head).encode() + b"\n" + self.content + b"\n"


class Journal:
    """The file of a server's journal, which only one process may have open.

    Args:
        path: The file; it is created if it does not exist.

    Raises:
        ConfigError: Another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(
                f"--dir: '{path.parent}' is in use by another server: choose another directory."
            ) from error
        self.records = list(self._read())
        """The records that earlier servers wrote."""
        os.fsync(self._file)  # an earlier server may have been killed before it synced them
        atomic.fsync(path.parent)
        self._num_written = 0
        """The number of bytes that this process has added."""
        self._num_synced = 0
        """The number of these bytes that are on the disk."""
        self._syncing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._compacted_size = 0
        """The size of the file after it was compacted last."""

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return 0 if self._file < 0 else os.fstat(self._file).st_size

    def add_request(self, owner: str, submission: Submission) -> None:
        """Record that a request was accepted, unless an earlier server recorded it."""
        if not submission.is_restored:
            content, path = submission.body, submission.path
            self._append(
                Record(kind="request", request_id=submission.request_id, content=content, owner=owner, path=path)
            )

    def add_outcome(self, request_id: str, outcome: Result | RequestFailure) -> None:
        """Record the outcome of a request."""
        if isinstance(outcome, Result):
            record = Record(
                kind="outcome", request_id=request_id, content=outcome.body, content_type=outcome.content_type
            )
        else:
            failure = {"message": outcome.message, "category": outcome.category, "was_skipped": outcome.was_skipped}
            record = Record(kind="outcome", request_id=request_id, content=b"", failure=failure)
        self._append(record)

    def finish(self, session_id: str) -> None:
        """Record the end of a session."""
        self._append(Record(kind="request", request_id=session_id, content=b"", path=FINISH))

    async def sync(self) -> None:
        """Wait until all records that were added before the call are on the disk.

        Raises:
            OSError: A sync failed, now or earlier. It is then unknown which records are on the disk.
        """
        wanted = self._num_written
        while self._num_synced < wanted:
            if self._syncing is None or (self._syncing.done() and self._syncing.exception() is None):
                self._syncing = asyncio.create_task(self._sync_once(), name="journal")
            await asyncio.shield(self._syncing)  # several answers wait for it

    async def _sync_once(self) -> None:
        written, file = self._num_written, os.dup(self._file)  # `compact` and `close` may close the file meanwhile
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, os.fdatasync, file)
        finally:
            os.close(file)
        self._num_synced = max(self._num_synced, written)

    def should_compact(self, min_bytes: int) -> bool:
        """Return whether the file is larger than `min_bytes`, and has doubled since it was compacted last."""
        return self.size > max(min_bytes, 2 * self._compacted_size)

    def compact(self, is_needed: Callable[[Record], bool]) -> None:
        """Replace the file by one without the records that are not needed. Blocks.

        Raises:
            OSError: The disk is full, for example. The file is as before.
        """
        partial = self._path.with_name(f".{self._path.name}.tmp")
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            for record in self._read():
                if is_needed(record):
                    _write(file, record.encode())
            os.fsync(file)
            os.replace(partial, self._path)
        except BaseException:
            os.close(file)
            partial.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        self._compacted_size = self.size
        atomic.fsync(self._path.parent)
        self._num_synced = self._num_written

    def close(self) -> None:
        """Sync and close the file; later records are dropped. Blocks."""
        if self._file >= 0:
            try:
                os.fdatasync(self._file)
                self._num_synced = self._num_written
            except OSError as error:  # answers that wait for the sync fail
                logger.error("the journal could not be synced: %s", error)
            os.close(self._file)
            self._file = -1
            self._thread.shutdown(wait=False)

    def _append(self, record: Record) -> None:
        if self._file < 0:
            return
        encoded = record.encode()
        before = self.size
        try:
            _write(self._file, encoded)
        except OSError:
            os.ftruncate(self._file, before)  # the next record would otherwise continue the incomplete one
            raise
        self._num_written += len(encoded)

    def _read(self) -> Iterator[Record]:
        """Yield all complete records, and cut off an incomplete one at the end."""
        complete = 0
        with self._path.open("rb") as file:
            while line := file.readline():
                try:
                    head = json.loads(line)
                    size, crc = head.pop("size"), head.pop("crc")
                    content, end = file.read(size), file.read(1)
                    if end != b"\n" or zlib.crc32(content) != crc:
                        break
                    record = Record(content=content, **head)
                except (ValueError, TypeError, KeyError, AttributeError):
                    break
                complete = file.tell()
                yield record
        if complete < self.size:
            logger.warning(
                "the last %d of %d bytes of '%s' are not complete records and are cut off: an earlier server was "
                "killed while it wrote them, or the file was corrupted",
                self.size - complete,
                self.size,
                self._path,
            )
            os.ftruncate(self._file, complete)


def _write(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
