"""Directories of a client in sandboxes of a service: uploaded once, and identified by the digest of their content.

    client: Mount(upload=True) ──► source `upload:DIGEST` + files, once per connection
    server: checks them, stores them for their owner ──► to a worker, with its first sandbox that mounts them
    worker: writes them below a directory of its own ──► a mount like any other

Digests are not trusted: server and worker compute them again. An owner can mount only its own uploads.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from roll_sandbox.errors import (
    OversizedUploadError,
    RollSandboxError,
    SandboxError,
    SandboxQuotaError,
    SandboxRequestError,
)
from roll_sandbox.types import Mount, SandboxSpec

__all__ = ["Files", "OwnedUploads", "WrittenUploads", "compute_digest", "format_upload_source", "read_directory"]

Files: TypeAlias = Mapping[str, bytes]
"""Content of files by path, relative to the directory."""

MAX_BYTES = 2**24
"""Most bytes of all directories of one owner."""
_MAX_FILES = 4096
_SCHEME = "upload:"


def read_directory(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the content of the files below a directory, by relative path, without links and compiled Python.

    Raises:
        OversizedUploadError: the files are too many or too large.
    """
    found: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(Path(directory).rglob("*")):
        if path.is_symlink() or not path.is_file() or "__pycache__" in path.parts:
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MAX_BYTES or len(found) >= _MAX_FILES:
            raise OversizedUploadError(
                f"the directory '{directory}' has more than {MAX_BYTES:,} bytes or {_MAX_FILES:,} files, the most "
                "that can be uploaded: mount a smaller directory, or start the service with `--mounts`."
            )
        found[path.relative_to(directory).as_posix()] = path.read_bytes()
    return found


def compute_digest(files: Files) -> str:
    """Return the digest of the names and contents of files."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(f"{len(name.encode())}:{name}:{len(files[name])}:".encode() + files[name])
    return found.hexdigest()


def list_uploads(spec: SandboxSpec) -> list[str]:
    """Return the digests of uploaded directories that a spec mounts."""
    return [mount.source.removeprefix(_SCHEME) for mount in spec.mounts if mount.source.startswith(_SCHEME)]


def format_upload_source(digest: str) -> str:
    """Return the source of a mount of an uploaded directory."""
    return _SCHEME + digest


def _check_files(digest: str, files: object) -> dict[str, bytes]:
    """Check received files, and return them.

    Raises:
        SandboxRequestError: a name or a content is invalid, or the digest does not match.
    """
    if not isinstance(files, dict) or len(files) > _MAX_FILES:
        raise SandboxRequestError(f"an uploaded directory must be an object of at most {_MAX_FILES:,} files by name.")
    for name, data in files.items():
        plain = isinstance(name, str) and 0 < len(name) < 1024 and "\0" not in name and name.isprintable()
        if not plain or not isinstance(data, bytes) or any(part in ("", ".", "..") for part in name.split("/")):
            raise SandboxRequestError(
                f"an uploaded directory has the invalid file {str(name)[:80]!r}: paths must be relative."
            )
    if compute_digest(files) != digest:
        raise SandboxRequestError("the content of an uploaded directory does not match its digest: upload it again.")
    return files


class OwnedUploads:
    """The directories that each owner has uploaded, in a server's memory."""

    def __init__(self) -> None:
        self._files: defaultdict[str, dict[str, dict[str, bytes]]] = defaultdict(dict)
        self._refused: dict[str, tuple[str, RollSandboxError]] = {}
        """The last refused digest of each owner, and the error."""

    def add(self, owner: str, digest: str, files: object) -> None:
        """Store a directory for its owner.

        Raises:
            SandboxRequestError: the directory is invalid.
            SandboxQuotaError: the owner has uploaded too much.
        """
        try:
            self._add(owner, digest, files)
        except RollSandboxError as error:
            self._refused[owner] = digest, error
            raise

    def _add(self, owner: str, digest: str, files: object) -> None:
        own = self._files[owner]
        if digest in own:
            return
        found = _check_files(digest, files)
        num_bytes = sum(len(name) + len(data) for each in (*own.values(), found) for name, data in each.items())
        if num_bytes > MAX_BYTES:
            raise SandboxQuotaError(
                f"the uploads of '{owner}' must have at most {MAX_BYTES:,} bytes together, got {num_bytes:,}."
            )
        own[digest] = found

    def check(self, owner: str, spec: SandboxSpec) -> None:
        """Check that the owner has uploaded every directory that the spec mounts.

        Raises:
            SandboxRequestError: a directory was not uploaded.
            RollSandboxError: its upload was refused; this is the error of that.
        """
        for digest in list_uploads(spec):
            if digest in self._files.get(owner, {}):
                continue
            refused, error = self._refused.get(owner, ("", None))
            if error is not None and refused == digest:
                raise error
            raise SandboxRequestError(
                f"a mount refers to the directory '{digest[:80]}', which '{owner}' has not uploaded."
            )

    def select(self, owner: str, spec: SandboxSpec, *, exclude: Collection[str]) -> dict[str, dict[str, bytes]]:
        """Return, by digest, the stored directories that a spec mounts, except those in `exclude`."""
        own = self._files.get(owner, {})
        return {digest: own[digest] for digest in list_uploads(spec) if digest in own and digest not in exclude}


class WrittenUploads:
    """Uploaded directories on a worker's disk, until `close`."""

    def __init__(self) -> None:
        self._root: Path | None = None

    def add(self, digest: str, files: Files) -> None:
        """Write a directory, unless it exists.

        Raises:
            SandboxRequestError: the digest does not match, or one name is both a file and a directory.
        """
        files = _check_files(digest, files)
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="roll-sandbox-uploads-"))
            self._root.chmod(0o755)  # sandboxes read it with UIDs of their own
        place = self._root / digest
        if place.is_dir():
            return
        made = Path(tempfile.mkdtemp(dir=self._root))
        try:
            for name, data in files.items():
                path = made / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            for path in (made, *made.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            made.rename(place)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            shutil.rmtree(made, ignore_errors=True)
            raise SandboxRequestError("an uploaded directory uses one name for a file and a directory.") from None

    def resolve_mount(self, mount: Mount) -> Mount | None:
        """Return a mount of the written directory; `None` if the mount is not of an upload.

        Raises:
            SandboxError: the directory did not reach this worker.
        """
        if not mount.source.startswith(_SCHEME):
            return None
        digest = mount.source.removeprefix(_SCHEME)
        place = self._root / digest if self._root is not None and digest.isalnum() else None
        if place is None or not place.is_dir():
            raise SandboxError("an uploaded directory did not reach the worker: create the sandbox again.")
        return Mount(source=str(place), target=mount.target)

    def close(self) -> None:
        """Delete all directories."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
