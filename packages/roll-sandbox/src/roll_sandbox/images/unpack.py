"""Unpacks a layer of an image from its tar archive into a new directory. The archive may be malicious.

Every path is opened one name at a time, relative to an open directory, and the kernel never follows a link: links among
the parents of an entry are resolved here, and never lead out of the layer's root. Devices, set-user-id bits,
capabilities, owners and extended attributes, which only root may create, are left out: all files belong to the user
that unpacks the layer.

Entries that remove files of lower layers (`.wh.name`, `.wh..wh..opq`) are written in the format of overlayfs in a user
namespace: a character device 0/0, and the attribute `user.overlay.opaque`. See the OCI image specification, "Layers".
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from roll_sandbox.errors import BadImageError
from roll_sandbox.tar_headers import BoundedTarInfo

__all__ = ["UnpackBudget", "decompress", "unpack"]

MAX_HEADER_BYTES = 2**20
"""Maximum bytes of one long name or set of attributes, since tarfile reads it into memory as a whole."""
_MAX_LINKS = 40
_MAX_DEPTH = 256
"""Maximum depth of nested directories, since merging and removing layers are recursive."""
_NAME_ERRORS = (errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP)
"""Errors whose cause is the name of an entry, not this machine."""
_CHUNK_BYTES = 2**20
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT, _OPAQUE_WHITEOUT, _PRIVATE_WHITEOUT = ".wh.", ".wh..wh..opq", ".wh..wh."


@dataclass
class UnpackBudget:
    """The maximum number of bytes and entries that unpacking the remaining layers of an image may create."""

    bytes_left: int
    entries_left: int = 1_000_000

    def consume(self, size: int, entries: int = 0) -> None:
        """Subtract unpacked bytes and entries.

        Raises:
            BadImageError: the image exceeds the budget.
        """
        self.bytes_left -= size
        self.entries_left -= entries
        if self.bytes_left < 0 or self.entries_left < 0:
            unit = "bytes" if self.bytes_left < 0 else "files"
            raise BadImageError(
                f"the unpacked image has more {unit} than the budget allows. Increase the budget (`--budget` or "
                "ROLL_SANDBOX_IMAGES_BYTES)."
            )


def decompress(blob: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a layer's blob in chunks, decompressed if it is compressed with gzip or zstd.

    Raises:
        BadImageError: the blob is broken, or needs a package that is not installed.
    """
    start = blob.read(4)
    blob.seek(0)
    if start[:2] == b"\x1f\x8b":
        yield from _inflate(blob)
    elif start == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard  # pyrefly: ignore[missing-import]
        except ImportError:
            raise BadImageError("a layer is compressed with zstd: run `pip install zstandard`.") from None
        try:
            # The default limit of the zstd tool: a frame with a larger window would need more memory.
            reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(blob, read_across_frames=True)
            while chunk := reader.read(_CHUNK_BYTES):
                yield chunk
        except zstandard.ZstdError as error:
            raise BadImageError(f"a layer is corrupted: {error}.") from None
    else:
        while chunk := blob.read(_CHUNK_BYTES):
            yield chunk


def _inflate(blob: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip file, which may have several members, in chunks of bounded size."""
    try:
        current, data = zlib.decompressobj(wbits=31), b""
        while True:
            data = data or blob.read(2**16)
            if not data:
                break
            if current.eof:
                current = zlib.decompressobj(wbits=31)
            if chunk := current.decompress(data, _CHUNK_BYTES):
                yield chunk
            data = current.unused_data if current.eof else current.unconsumed_tail
    except zlib.error as error:
        raise BadImageError(f"a layer is corrupted: {error}.") from None
    if not current.eof:
        raise BadImageError("a layer is truncated.")


class _ChunkReader:
    """A read-only file object over an iterator of byte chunks, which tarfile reads sequentially.

    It also computes the digest of the chunks.
    """

    def __init__(self, chunks: Iterator[bytes], bounds: UnpackBudget) -> None:
        self._chunks = chunks
        self._bounds = bounds
        self._chunk = b""
        self._used = 0
        self._position = 0
        self._last = b""
        self._unread = b""
        self.digest = hashlib.sha256()

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise BadImageError(f"a layer has a header of {size:,} bytes; the maximum is {MAX_HEADER_BYTES:,}.")
        parts = [self._unread[:size]]
        self._unread = self._unread[size:]
        size -= len(parts[0])
        self._position += len(parts[0])
        while size > 0 and (self._used < len(self._chunk) or self._read_chunk()):
            parts.append(self._chunk[self._used : self._used + size])
            size -= len(parts[-1])
            self._used += len(parts[-1])
            self._position += len(parts[-1])
        self._last = b"".join(parts)
        return self._last

    def seek(self, position: int) -> None:
        # `BoundedTarInfo` reads a header in advance, and seeks back to its beginning.
        if self._last and position == self._position - len(self._last):
            self._unread, self._last, self._position = self._last + self._unread, b"", position
            return
        skipped = self._unread[: max(0, position - self._position)]
        self._unread = self._unread[len(skipped) :]
        self._position += len(skipped)
        while self._position < position and (self._used < len(self._chunk) or self._read_chunk()):
            skipped = min(position - self._position, len(self._chunk) - self._used)
            self._used += skipped
            self._position += skipped

    def _read_chunk(self) -> bool:
        self._chunk, self._used = next(self._chunks, b""), 0
        self._bounds.consume(len(self._chunk))
        self.digest.update(self._chunk)
        return bool(self._chunk)

    def finish(self) -> str:
        """Read to the end, and return the digest of all chunks."""
        while self._read_chunk():
            pass
        return "sha256:" + self.digest.hexdigest()


def unpack(chunks: Iterator[bytes], target: str, budget: UnpackBudget) -> str:
    """Unpack an archive into an empty directory, and return its digest (the layer's "diff ID").

    Raises:
        BadImageError: the data is not a layer's archive, or exceeds `budget`.
        OSError: this machine cannot write the files.
    """
    stream = _ChunkReader(chunks, budget)
    layer = _LayerWriter(target, budget)
    try:
        with tarfile.open(fileobj=stream, mode="r:", tarinfo=BoundedTarInfo) as archive:  # type: ignore[call-overload]
            for member in archive:
                layer.add(member, archive)
                archive.members = []  # otherwise tarfile would keep all members in memory
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        if isinstance(error, BadImageError):
            raise
        raise BadImageError(f"a layer is not a tar archive ({error}).") from None
    finally:
        layer.close()
    return stream.finish()


class _NotADirectoryError(BadImageError):
    """A parent of an entry exists, but is not a directory."""


class _LayerWriter:
    """Writes the entries of a layer's archive into a directory."""

    def __init__(self, path: str, bounds: UnpackBudget) -> None:
        self._root = os.open(path, _DIRECTORY_FLAGS)
        self._bounds = bounds

    def close(self) -> None:
        os.close(self._root)

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Add one entry of the archive."""
        if member.size < 0 or "\0" in member.name + member.linkname:
            raise BadImageError(f"a layer has the invalid entry {member.name[:80]!r}.")
        self._bounds.consume(member.size if member.issparse() else 0, entries=1)
        try:
            self._add_entry(member, archive)
        except OSError as error:
            if error.errno in _NAME_ERRORS:
                raise BadImageError(
                    f"a layer has the entry {member.name[:80]!r}, which cannot be created ({error.strerror})."
                ) from None
            if error.filename is None:
                error.filename = member.name[:200]
            raise

    def _add_entry(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        parents, name = _split_path(member.name)
        if not name:
            if member.isdir():
                os.fchmod(self._root, _get_mode(member))
            return
        removes = name.startswith(_WHITEOUT)
        try:
            parent = self._open_directory(parents, follow=not removes)
        except _NotADirectoryError:
            if removes:  # the layer has replaced the directory by a link or file, so there is nothing to remove
                return
            raise
        try:
            if removes:
                _write_whiteout(parent, name)
            elif member.isdir():
                _make_directory(parent, name, _get_mode(member))
            elif member.isreg():
                _remove_existing(parent, name)
                _write_file(parent, name, member, archive)
            elif member.issym():
                _remove_existing(parent, name)
                os.symlink(member.linkname, name, dir_fd=parent)
            elif member.islnk():
                self._add_hard_link(parent, name, member)
        finally:
            os.close(parent)

    def _add_hard_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        parents, last = _split_path(member.linkname)
        link = f"a layer has the hard link {member.name[:80]!r} to {member.linkname[:80]!r}"
        try:
            source = self._open_directory(parents, make=False)
        except FileNotFoundError:
            raise BadImageError(f"{link}, which does not exist in the layer.") from None
        try:
            mode = os.stat(last, dir_fd=source, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                raise BadImageError(f"{link}, which is a directory.")
            if stat.S_ISCHR(mode):
                raise BadImageError(f"{link}, which the layer removes.")
            # If an entry links to itself, `_remove_existing` would remove the file.
            if not os.path.samestat(os.fstat(source), os.fstat(parent)) or last != name:
                _remove_existing(parent, name)
                os.link(last, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise BadImageError(f"{link}, which does not exist in the layer.") from None
        finally:
            os.close(source)

    def _open_directory(self, parts: list[str], *, make: bool = True, follow: bool = True) -> int:
        """Open a directory, and return its file descriptor.

        Args:
            parts: the names in its path, starting at the layer's root.
            make: if true, create missing directories.
            follow: if true, follow links.
        """
        waiting, opened, links = list(reversed(parts)), [os.dup(self._root)], 0
        try:
            while waiting:
                if len(opened) > _MAX_DEPTH:
                    raise BadImageError(f"a layer has directories nested more than {_MAX_DEPTH} levels deep.")
                part = waiting.pop()
                if part == "..":  # only in targets of links
                    if len(opened) > 1:
                        os.close(opened.pop())
                    continue
                try:
                    opened.append(os.open(part, _DIRECTORY_FLAGS, dir_fd=opened[-1]))
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=opened[-1])
                    waiting.append(part)
                except NotADirectoryError:
                    links += 1
                    target = _read_link(part, opened[-1]) if follow else None
                    if target is None or links > _MAX_LINKS:
                        raise _NotADirectoryError(
                            f"a layer has entries below {part[:80]!r}, which is not a directory."
                        ) from None
                    if target.startswith("/"):
                        while len(opened) > 1:
                            os.close(opened.pop())
                    waiting += [each for each in reversed(target.split("/")) if each not in ("", ".")]
            return os.dup(opened[-1])
        finally:
            for descriptor in opened:
                os.close(descriptor)


def _split_path(path: str) -> tuple[list[str], str]:
    """Split a path into the names of its parents and its last name; both are empty for the root.

    Raises:
        BadImageError: the path leads out of the layer.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadImageError(f"a layer has the entry {path[:80]!r}, which points outside the layer.")
    return parts[:-1], parts[-1] if parts else ""


def _get_mode(member: tarfile.TarInfo) -> int:
    """Return an entry's mode, extended so that the owner can change directories and read files."""
    return member.mode & 0o1777 | 0o700 if member.isdir() else member.mode & 0o777 | 0o400


def _read_link(name: str, parent: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


def _remove_existing(parent: int, name: str) -> None:
    """Remove an existing entry of this name, to replace it."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return


def _make_directory(parent: int, name: str, mode: int) -> None:
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        os.mkdir(name, 0o700, dir_fd=parent)
    else:
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o700, dir_fd=parent)
    directory = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    os.fchmod(directory, mode)
    os.close(directory)


def _write_file(parent: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    source = archive.extractfile(member)
    assert source is not None
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb", 0) as file:
        left = member.size
        while left:
            chunk = source.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise BadImageError("a layer is truncated.")
            # Blocks of zeros become holes: they compress to almost nothing, and must not fill the disk.
            if chunk.count(0) == len(chunk):
                file.seek(len(chunk), os.SEEK_CUR)
            else:
                file.write(chunk)
            left -= len(chunk)
        file.truncate(member.size)
        os.fchmod(file.fileno(), _get_mode(member))
        os.utime(file.fileno(), (member.mtime, member.mtime))


def _write_whiteout(parent: int, name: str) -> None:
    """Write the whiteout `name`, which hides one name, or all entries of the directory, in lower layers."""
    if name == _OPAQUE_WHITEOUT:
        os.setxattr(parent, "user.overlay.opaque", b"y")
        return
    removed = name[len(_WHITEOUT) :]
    if name.startswith(_PRIVATE_WHITEOUT):
        return  # metadata of other storage drivers
    if removed in ("", ".", ".."):
        raise BadImageError(f"a layer has the whiteout {name!r}, which does not name a file.")
    _remove_existing(parent, removed)
    os.mknod(removed, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
