"""A cache of the replies of a judge or a reward service, keyed by the content of the request: in memory, and in a file
that runs share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections import OrderedDict
from pathlib import Path
from typing import Any

__all__ = ["ReplyCache", "compute_content_key"]

logger = logging.getLogger(__name__)


def compute_content_key(*content: Any) -> str:
    """Return a digest of plain data. Identical content has the same key in every process."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()


class ReplyCache:
    """Caches the most recently used replies in memory, and all replies in a file in `directory`, if specified.

    If the file cannot be read or written, the run logs a warning and uses only the cache in memory.

    Args:
        size: Number of replies in memory; 0 disables the cache.
        directory: Directory of the file; created if it does not exist.
    """

    def __init__(self, size: int, directory: str | None = None) -> None:
        self._size = size
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._file = _open(Path(directory)) if directory and size else None

    def get(self, key: str) -> str | None:
        """Return the cached reply, or `None`."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if self._file is None:
            return None
        try:
            row = self._file.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self._disable_file(error)
            return None
        if row is None:
            return None
        self._store(key, row[0])
        return str(row[0])

    def put(self, key: str, reply: str) -> None:
        """Cache a reply."""
        if not self._size:
            return
        self._store(key, reply)
        if self._file is not None:
            try:
                self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
            except sqlite3.Error as error:
                self._disable_file(error)

    def _store(self, key: str, reply: str) -> None:
        self._memory[key] = reply
        self._memory.move_to_end(key)
        while len(self._memory) > self._size:
            self._memory.popitem(last=False)

    def _disable_file(self, error: sqlite3.Error) -> None:
        logger.warning("replies are cached in memory only: the file in cache_dir cannot be used (%s)", error)
        self.close()

    def close(self) -> None:
        """Close the file. Calling it twice is safe."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _open(directory: Path) -> sqlite3.Connection | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(directory / "replies.sqlite", isolation_level=None, timeout=5.0)
        # Several runs may share the file: with a write-ahead log, a writer does not block readers.
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = OFF")  # a reply that is lost in a crash is requested again
        file.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID")
    except (OSError, sqlite3.Error) as error:
        logger.warning("replies are cached in memory only: the cache_dir '%s' cannot be used (%s)", directory, error)
        return None
    return file
