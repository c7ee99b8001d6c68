"""Durable appends, and atomic writes: a crash at any time leaves either the old file or the complete new one.

    temporary file next to the target ──► fsync(file) ──► rename over the target ──► fsync(directory)

Invariants: the target never contains only part of the new content; when a function returns, the content survives power
loss; files that remain after a crash start with `.` and end with `.tmp`, and `remove_leftovers` deletes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

__all__ = [
    "append",
    "fsync",
    "fsync_tree",
    "make_temporary_path",
    "remove_leftovers",
    "replace_directory",
    "write_bytes",
    "write_json",
    "write_text",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def make_temporary_path(path: Path) -> Path:
    """Return a hidden, unused path in the same directory, for a file that is renamed to `path` when complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(directory: Path, *, min_age_s: float = 0.0) -> int:
    """Delete the temporary files of interrupted writes directly inside `directory`, and return their number.

    Args:
        directory: The directory; it does not have to exist.
        min_age_s: Minimum time since the last change of a file, in seconds, for a directory to which other processes
            may be writing.
    """
    leftovers = [p for p in directory.glob(".*.tmp") if directory.is_dir() and _get_age_s(p) >= min_age_s]
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return len(leftovers)


def _get_age_s(path: Path) -> float:
    """Return the time since the last change of a file, in seconds; infinity if the file does not exist."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's entries (names, renames), to disk, so that they survive power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Flush `path` and all files and directories below it to disk, so that they survive power loss."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            fsync(Path(directory, name))
        fsync(Path(directory))


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, atomically and durably; an existing file is replaced.

    Raises:
        OSError: The file could not be written (disk full, no permission); `path` is unchanged.
    """
    temporary = make_temporary_path(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)
        # `_write` has synced the file: a file system may persist the rename before the content, and power loss would
        # then leave an empty file.
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def append(path: Path, content: bytes) -> None:
    """Append `content` to `path`, durably. After a crash, the file may end with a part of `content`.

    Raises:
        OSError: The file could not be written (disk full, no permission); `path` is unchanged.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write(descriptor, content)
        except OSError:
            # The next append would otherwise continue the incomplete line.
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically and durably; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Write `data` to `path` as indented JSON, atomically and durably; see `write_bytes`.

    Raises:
        ValueError: `data` has a NaN or an infinity, which JSON cannot represent.
    """
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_directory(temporary: Path, final: Path) -> None:
    """Rename the finished directory `temporary` to `final`, durably; an existing `final` is deleted afterwards.

    Both must have the same parent. At any time `final` is either the complete old directory or the complete new one. On
    file systems that cannot exchange two names, `final` is missing for a moment, during which the old directory exists
    under a hidden name in the same parent.
    """
    fsync_tree(temporary)
    if not final.exists():
        os.rename(temporary, final)
        fsync(final.parent)
        return
    # rename(2) replaces a directory only if it is empty, so the two names are exchanged instead.
    if not _exchange_names(temporary, final):
        replaced = make_temporary_path(final)
        os.rename(final, replaced)
        os.rename(temporary, final)
        temporary = replaced
    fsync(final.parent)
    shutil.rmtree(temporary)


def _exchange_names(first: Path, second: Path) -> bool:
    """Exchange two names atomically (Linux `renameat2`); return whether the system supports it."""
    try:
        # Python's `os` has no `renameat2`; glibc has it since 2.28.
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
