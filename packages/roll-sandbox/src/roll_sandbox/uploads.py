"""Uploads directories of a client, which sandboxes of a service can mount. Each is identified by its content's digest.

    client: Mount(upload=True) ──► source `upload:DIGEST` + files, once per connection
    server: checks them, stores them for their owner ──► to a worker, with its first sandbox that mounts them
    worker: writes them below its own directory ──► a mount like any other

Digests are not trusted: server and worker compute them again. Owners can mount only their own uploads.
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

__all__ = ["Files", "UploadDirectories", "UploadStore", "compute_digest", "format_upload_source", "read_directory"]

Files: TypeAlias = Mapping[str, bytes]
"""The content of each file, by its path relative to the directory."""

MAX_BYTES = 2**24
"""Maximum bytes of all directories of one owner."""
_MAX_FILES = 4096
_SCHEME = "upload:"


def read_directory(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the content of the files below a directory, by relative path. Links and compiled Python files are omitted.

    Raises:
        OversizedUploadError: there are too many files, or they are too large.
    """
    content: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(Path(directory).rglob("*")):
        if path.is_symlink() or not path.is_file() or "__pycache__" in path.parts:
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MAX_BYTES or len(content) >= _MAX_FILES:
            raise OversizedUploadError(
                f"the directory '{directory}' exceeds the upload limits ({MAX_BYTES:,} bytes, {_MAX_FILES:,} files): "
                "mount a smaller directory, or start the service with `--mounts`."
            )
        content[path.relative_to(directory).as_posix()] = path.read_bytes()
    return content


def compute_digest(files: Files) -> str:
    """Return the digest of the names and contents of files."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{len(name.encode())}:{name}:{len(files[name])}:".encode() + files[name])
    return digest.hexdigest()


def list_uploads(spec: SandboxSpec) -> list[str]:
    """Return the digests of uploaded directories that a spec mounts."""
    return [mount.source.removeprefix(_SCHEME) for mount in spec.mounts if mount.source.startswith(_SCHEME)]


def format_upload_source(digest: str) -> str:
    """Return the `Mount.source` that refers to the uploaded directory with this digest."""
    return _SCHEME + digest


def _check_files(digest: str, files: object) -> dict[str, bytes]:
    """Check the received files of a directory, and return them.

    Raises:
        SandboxRequestError: a name or the content of a file is invalid, or the digest does not match.
    """
    if not isinstance(files, dict) or len(files) > _MAX_FILES:
        raise SandboxRequestError(
            f"an uploaded directory must be a mapping of at most {_MAX_FILES:,} file names to contents."
        )
    for name, data in files.items():
        plain = isinstance(name, str) and 0 < len(name) < 1024 and "\0" not in name and name.isprintable()
        if not plain or not isinstance(data, bytes) or any(part in ("", ".", "..") for part in name.split("/")):
            raise SandboxRequestError(
                f"an uploaded directory contains the invalid file {str(name)[:80]!r}: a name must be a relative path "
                "of printable characters without '..', shorter than 1,024 characters, and the content must be bytes."
            )
    if compute_digest(files) != digest:
        raise SandboxRequestError("the content of an uploaded directory does not match its digest: upload it again.")
    return files


class UploadStore:
    """The directories that each owner has uploaded, in a server's memory."""

    def __init__(self) -> None:
        self._files: defaultdict[str, dict[str, dict[str, bytes]]] = defaultdict(dict)
        self._refused: dict[str, tuple[str, RollSandboxError]] = {}
        """Last digest that was refused, and the error, by owner."""

    def add(self, owner: str, digest: str, files: object) -> None:
        """Check and store an uploaded directory of an owner, unless the owner already has it.

        Raises:
            SandboxRequestError: the directory is invalid.
            SandboxQuotaError: the owner has uploaded too much.
        """
        try:
            self._add_checked(owner, digest, files)
        except RollSandboxError as error:
            self._refused[owner] = digest, error
            raise

    def _add_checked(self, owner: str, digest: str, files: object) -> None:
        uploads = self._files[owner]
        if digest in uploads:
            return
        checked = _check_files(digest, files)
        num_bytes = sum(len(name) + len(data) for each in (*uploads.values(), checked) for name, data in each.items())
        if num_bytes > MAX_BYTES:
            raise SandboxQuotaError(
                f"the total upload size of '{owner}' must not exceed {MAX_BYTES:,} bytes, got {num_bytes:,}."
            )
        uploads[digest] = checked

    def check(self, owner: str, spec: SandboxSpec) -> None:
        """Check that the owner has uploaded every directory that the spec mounts.

        Raises:
            SandboxRequestError: a directory was not uploaded.
            RollSandboxError: the upload of a directory was rejected; this error contains the reason.
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
        uploads = self._files.get(owner, {})
        return {digest: uploads[digest] for digest in list_uploads(spec) if digest in uploads and digest not in exclude}


class UploadDirectories:
    """Stores uploaded directories on a worker's disk until `close`."""

    def __init__(self) -> None:
        self._root: Path | None = None

    def add(self, digest: str, files: Files) -> None:
        """Check and write an uploaded directory, unless it has already been written.

        Raises:
            SandboxRequestError: the digest does not match, or one name is both a file and a directory.
        """
        files = _check_files(digest, files)
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="roll-sandbox-uploads-"))
            self._root.chmod(0o755)  # sandboxes read it with other UIDs
        place = self._root / digest
        if place.is_dir():
            return
        directory = Path(tempfile.mkdtemp(dir=self._root))
        try:
            for name, data in files.items():
                path = directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            for path in (directory, *directory.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            # One rename makes the directory visible, so that a directory with its final name is complete.
            directory.rename(place)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            shutil.rmtree(directory, ignore_errors=True)
            raise SandboxRequestError(
                "an uploaded directory contains a file and a directory with the same name."
            ) from None

    def resolve_mount(self, mount: Mount) -> Mount | None:
        """Return the mount with the written directory as its source; `None` if `mount` does not refer to an uploaded
        directory.

        Raises:
            SandboxError: this worker has not received the directory.
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
