"""Read files inside one directory only, and follow growing files."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from roll.errors import RunDirectoryError

__all__ = ["FileStamp", "SafeDirectory", "Tail", "parse_json"]

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO without a writer would block, before `fstat` shows that it is not a regular file.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_LINE_BYTES = 16 * 2**20
_CHUNK_BYTES = 4 * 2**20
_NUM_CHECKED_BYTES = 64
"""Number of bytes before the offset that are compared to detect a rewritten file."""
_MAX_DEPTH = 100
"""Maximum nesting of JSON: encoders of responses allow 255, and a run writes about 5."""


class FileStamp(NamedTuple):
    """Inode, size and modification time of a file, to detect changes."""

    inode: int
    size: int
    modified_ns: int

    @property
    def modified_s(self) -> float:
        """Modification time as Unix time."""
        return self.modified_ns / 1e9


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, and replace lone surrogates with `?`, since they cannot be encoded in a response.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The text is nested more than 100 levels deep.
    """
    value = json.loads(text)
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    # Counting brackets is cheap: nearly all values have too few of them to be deep.
    if content.count(b"[") + content.count(b"{") > _MAX_DEPTH and _is_deep(value):
        raise RecursionError(f"the JSON is nested more than {_MAX_DEPTH} levels deep.")
    # An escape such as `\ud800` parses to a lone surrogate, although the file itself is valid UTF-8.
    if b"\\ud" in content.lower():
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return False
    return True


class SafeDirectory:
    """Reads regular files in a directory; rejects pipes, devices and links.

    Args:
        root: The directory. Its path may contain links, because the user specified the directory or one of its parents.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, *parts: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            RunDirectoryError: The file is missing, unreadable, not a regular file, or behind a link.
        """
        with self._open_directory(parts[:-1]) as directory, _convert_errors(parts):
            descriptor = os.open(_check_part(parts[-1]), _FILE_FLAGS, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RunDirectoryError(f"'{_format_path(parts)}' is not a regular file.")
        return os.fdopen(descriptor, "rb")

    def read(self, *parts: str, limit: int) -> bytes:
        """Read a whole file.

        Raises:
            RunDirectoryError: The file cannot be opened, or is larger than `limit` bytes.
        """
        with self.open(*parts) as file, _convert_errors(parts):
            content = file.read(limit + 1)
        if len(content) > limit:
            raise RunDirectoryError(f"'{_format_path(parts)}' is larger than {limit / 2**20:g} MiB.")
        return content

    def get_stamp(self, *parts: str) -> FileStamp | None:
        """Return the stamp of a regular file or a directory; `None` if the path is neither."""
        with contextlib.suppress(RunDirectoryError, OSError), self._open_directory(parts[:-1]) as directory:
            found = os.stat(_check_part(parts[-1]), dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                return FileStamp(found.st_ino, found.st_size, found.st_mtime_ns)
        return None

    def list_stamps(self, *parts: str) -> dict[str, FileStamp]:
        """Return the stamps of regular files and directories in the directory `parts`, by name; empty if it does not
        exist.
        """
        found = {}
        with (
            contextlib.suppress(RunDirectoryError, OSError),
            self._open_directory(parts) as directory,
            os.scandir(directory) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        found[entry.name] = FileStamp(about.st_ino, about.st_size, about.st_mtime_ns)
        return found

    @contextlib.contextmanager
    def _open_directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        with _convert_errors(parts):
            descriptor = os.open(self.root, _DIRECTORY_FLAGS & ~os.O_NOFOLLOW)
        try:
            # Directories are opened one level at a time, relative to the parent's descriptor: O_NOFOLLOW applies only
            # to the last part of a path, and a directory that is replaced by a link meanwhile cannot lead outside.
            for part in parts:
                with _convert_errors(parts):
                    below = os.open(_check_part(part), _DIRECTORY_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


def _check_part(part: str) -> str:
    if part in ("", ".", "..") or "/" in part or "\0" in part:
        raise RunDirectoryError(f"{part!r} is not a valid file name.")
    return part


def _format_path(parts: tuple[str, ...]) -> str:
    return "/".join(parts)


def _describe_path(parts: tuple[str, ...]) -> str:
    return f"'{_format_path(parts)}'" if parts else "the run directory"


@contextlib.contextmanager
def _convert_errors(parts: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise RunDirectoryError(f"{_describe_path(parts)} does not exist.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"{_describe_path(parts)} cannot be read: {reason}.") from None


class Tail:
    """Reads the new complete lines of a file since the last call.

    A file that was truncated, replaced, or rewritten before the current position is read again from its start.

    Args:
        directory: The directory.
        parts: Path of the file in the directory.
        end: Line separator.
    """

    def __init__(self, directory: SafeDirectory, *parts: str, end: bytes = b"\n") -> None:
        self._directory = directory
        self._end = end
        self._parts = parts
        self._stamp: FileStamp | None = None
        self._refused = ""
        """Reason why the file is rejected, until the file changes."""
        self.offset = 0
        """End of the complete lines that were read."""
        self.rest = b""
        """Bytes after these lines at the last call."""
        self._last_bytes = b""

    def has_changed(self) -> bool:
        """Return whether the file changed since the last `read_chunks`; always true for a file that was rejected."""
        return bool(self._refused) or self._directory.get_stamp(*self._parts) != self._stamp

    def read_chunks(self) -> Iterator[tuple[bool, bytes]]:
        """Yield new complete lines in pieces of a few MiB, each with a flag.

        The flag is true, and the piece empty, if the file is read again from its start, which invalidates earlier
        lines.

        The iteration stops early if the file is truncated or rewritten between two pieces; the next call then starts
        from the beginning of the file.

        Raises:
            RunDirectoryError: The file cannot be read, or has a line of more than 16 MiB.
        """
        stamp = self._directory.get_stamp(*self._parts)
        if stamp == self._stamp:
            if self._refused:
                raise RunDirectoryError(self._refused)
            return
        self._refused = ""
        if stamp is None:
            restarted = self.offset > 0
            self._stamp, self.offset, self._last_bytes = None, 0, b""
            if restarted:
                yield True, b""
            return
        with self._directory.open(*self._parts) as file:
            restarted = self._has_restarted(file, stamp)
            if restarted:
                self.offset, self._last_bytes = 0, b""
                yield True, b""
            file.seek(self.offset)
            rest = b""
            while piece := file.read(_CHUNK_BYTES):
                if not self._is_unchanged(file):
                    return
                rest += piece
                at = rest.rfind(self._end) + len(self._end)
                if at < len(self._end):
                    if len(rest) > _MAX_LINE_BYTES:
                        # Remembered with the stamp, so that an unchanged file is not read again on every refresh.
                        self._stamp, self._refused = (
                            stamp,
                            f"'{_format_path(self._parts)}' has a line of more than 16 MiB.",
                        )
                        raise RunDirectoryError(self._refused)
                    continue
                lines, rest = rest[:at], rest[at:]
                self.offset += len(lines)
                self._last_bytes = (self._last_bytes + lines[-_NUM_CHECKED_BYTES:])[-_NUM_CHECKED_BYTES:]
                yield False, lines
            self.rest = rest
        self._stamp = stamp

    def _has_restarted(self, file: BinaryIO, stamp: FileStamp) -> bool:
        if not self.offset:
            return False
        if stamp.size < self.offset or (self._stamp is not None and stamp.inode != self._stamp.inode):
            return True
        return not self._is_unchanged(file)

    def _is_unchanged(self, file: BinaryIO) -> bool:
        """Return whether the file still contains the last content read at the same offset."""
        # Between two calls, a file may be truncated and grow beyond the offset again: its size would not show that.
        return os.pread(file.fileno(), len(self._last_bytes), self.offset - len(self._last_bytes)) == self._last_bytes
