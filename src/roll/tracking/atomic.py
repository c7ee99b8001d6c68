"""Atomic writes: a crash at any time leaves either the old file or the complete new one; and durable appends.

    temporary file next to the target ──► fsync(file) ──► rename over the target ──► fsync(directory)

Invariants: the target never holds part of the new content; when a function returns, the content survives power loss;
files that a crash leaves behind start with `.` and end with `.tmp`, and `remove_leftovers` deletes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

__all__ = [
    "append",
    "remove_leftovers",
    "replace_directory",
    "sync",
    "sync_tree",
    "temporary_path",
    "write_bytes",
    "write_json",
    "write_text",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def temporary_path(path: Path) -> Path:
    """Return a hidden, unused path in the same directory, for a file that is renamed to `path` when complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(directory: Path) -> int:
    """Delete temporary files and directories directly inside `directory`, and return their number."""
    leftovers = [p for p in directory.glob(".*.tmp") if directory.is_dir()]
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return len(leftovers)


def sync(path: Path) -> None:
    """Make a file's content, or a directory's entries (names, renames), survive power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make every file and directory at and below `path` survive power loss."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            sync(Path(directory, name))
        sync(Path(directory))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, atomically and durably.

    Raises:
        OSError: the file could not be written (disk full, no permission); `path` is unchanged.
    """
    temporary = temporary_path(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write(descriptor, content)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def append(path: Path, content: bytes) -> None:
    """Append `content` to `path`, durably; a crash may leave a part of it, an error leaves none.

    Raises:
        OSError: the file could not be written (disk full, no permission); `path` is unchanged.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by UTF-8 `text`; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Replace `path` by `data` as indented JSON; see `write_bytes`.

    Raises:
        ValueError: `data` has a NaN or an infinity, which JSON cannot represent.
    """
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def replace_directory(temporary: Path, final: Path) -> None:
    """Rename the finished directory `temporary` to `final`, durably; an existing `final` is deleted afterwards.

    Both must have the same parent. At every moment `final` is completely the old directory or completely the new one;
    only on a file system that cannot exchange two names is it missing for an instant (the old one is then next to it,
    hidden).
    """
    sync_tree(temporary)
    if not final.exists():
        os.rename(temporary, final)
        sync(final.parent)
        return
    if not _exchange(temporary, final):
        replaced = temporary_path(final)
        os.rename(final, replaced)
        os.rename(temporary, final)
        temporary = replaced
    sync(final.parent)
    shutil.rmtree(temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (Linux `renameat2`); return false if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
