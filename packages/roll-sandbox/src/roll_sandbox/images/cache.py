"""The image cache of this machine: `$ROLL_CACHE/sandbox-images`, else `~/.cache/roll/sandbox-images`.

    layers/sha256-…/files     an unpacked layer; `size` next to it
    images/sha256-….json      an image: its layers, variables, user; its modification time is its last use
    roots/…                   topmost layers of sandboxes, and merged layers (`system.py`)
    names.json                name -> digest of an image
    tmp/                      files that are being created or removed

Invariants:
    - an entry with its final name is complete (one rename has moved it there), and has the digest in its name;
    - one process at a time changes the cache: it locks the file `lock`;
    - an image is not removed while a process holds a shared lock on its file;
    - readers need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from roll_sandbox.errors import BadImageError, SandboxUnavailableError, UnknownImageError
from roll_sandbox.images.accounts import resolve_account
from roll_sandbox.images.image import Image
from roll_sandbox.images.names import DIGEST_PATTERN, parse_reference
from roll_sandbox.images.unpack import UnpackBudget, decompress, unpack

__all__ = ["CachedImage", "ImageCache", "ImageLock", "ImageSource", "get_cache_root", "get_default_budget_bytes"]

_BUDGET_BYTES = 20 * 2**30
_UNFINISHED_PREFIX = ".new-"
_STALE_AFTER_S = 86400.0


def get_cache_root() -> Path:
    """Return the directory of the image cache."""
    root = os.environ.get("ROLL_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "roll") / "sandbox-images"


def get_default_budget_bytes() -> int:
    """Return the maximum bytes of all layers together: `ROLL_SANDBOX_IMAGES_BYTES`, or 20 GiB if it is not set.

    Raises:
        SandboxUnavailableError: the variable is not a positive integer.
    """
    value = os.environ.get("ROLL_SANDBOX_IMAGES_BYTES")
    if value is None:
        return _BUDGET_BYTES
    if not value.isdigit() or int(value) <= 0:
        raise SandboxUnavailableError(
            f"ROLL_SANDBOX_IMAGES_BYTES must be a positive number of bytes, got {value[:80]!r}."
        )
    return int(value)


class ImageSource(Protocol):
    """A file or registry from which an image can be read (`sources.py`, `registry.py`)."""

    image: Image

    def open_layer(self, number: int) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open the blob of layer `number`, where 0 is the lowest. The blob's digest, if known, has been checked."""
        ...


@dataclass(frozen=True, kw_only=True)
class CachedImage:
    """An image in the cache, as `roll-sandbox image list` shows it."""

    image: Image
    names: tuple[str, ...]
    used_at: float
    """Time of the last use, in seconds since 1970."""
    in_use: bool


class ImageLock:
    """A shared lock on an image: the image and its layers are not removed while the lock is held."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock. Calling it twice is safe."""
        if self._descriptor >= 0:
            os.utime(self._descriptor)  # records the last use of the image
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        """Release the lock if the caller was canceled before it received this object."""
        self.release()


class ImageCache:
    """Adds, finds, lists and removes images in the cache of this machine.

    Args:
        root: directory of the cache; by default `get_cache_root()`.
        budget_bytes: maximum bytes of all layers together; by default `get_default_budget_bytes()`.
    """

    def __init__(self, root: Path | None = None, *, budget_bytes: int | None = None) -> None:
        self.root = root or get_cache_root()
        self._budget_bytes = get_default_budget_bytes() if budget_bytes is None else budget_bytes
        self._names: dict[str, str] = {}
        self._names_state: tuple[int, int, int] | None = None
        self._images: dict[str, Image] = {}

    def resolve(self, name: str) -> Image:
        """Return the image to which a name (or an image's digest) currently refers.

        Raises:
            UnknownImageError: no image has this name or digest.
            SandboxRequestError: the name is malformed.
        """
        digest = name if DIGEST_PATTERN.fullmatch(name) else self._read_names().get(str(parse_reference(name)), "")
        if digest and self._get_image_file(digest).exists():
            if digest not in self._images:
                self._images[digest] = Image.loads(self._get_image_file(digest).read_text())
            return self._images[digest]
        raise UnknownImageError(
            f"image '{name[:200]}' was not found on the machine that runs the sandbox: add it with `roll-sandbox "
            "image pull NAME` or `roll-sandbox image import PATH NAME`; `roll-sandbox image list` lists the images."
        )

    def lock_image(self, image: Image) -> ImageLock:
        """Lock an image, so that it is not removed until the lock is released or this process ends. May block.

        Raises:
            UnknownImageError: the image was just removed.
        """
        descriptor = -1
        try:
            descriptor = os.open(self._get_image_file(image.digest), os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Another process may have removed the file between `open` and `flock`.
            if os.fstat(descriptor).st_nlink == 0:
                raise FileNotFoundError
            os.utime(descriptor)
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, FileNotFoundError):
                raise UnknownImageError(
                    f"the image {image.digest} was just removed: pull or import it again."
                ) from None
            raise
        return ImageLock(descriptor)

    def list_layer_directories(self, image: Image) -> tuple[str, ...]:
        """Return the directories of the image's layers, lowest first."""
        return tuple(str(self._get_layer_directory(digest) / "files") for digest in image.layers)

    def add(self, name: str, source: ImageSource) -> Image:
        """Unpack the layers that are not in the cache yet, store the image under this name, and return it.

        Raises:
            BadImageError: the image is broken, malicious or too large.
            SandboxUnavailableError: the cache cannot be written.
        """
        whole = str(parse_reference(name))
        bounds = UnpackBudget(self._budget_bytes)
        with self._lock_for_changes():
            # Write layers before the image, and the image before its name: every image that can be found is complete.
            for number, digest in enumerate(source.image.layers):
                if not self._get_layer_directory(digest).exists():
                    self._install_layer(digest, lambda number=number: source.open_layer(number), bounds)
            image = source.image
            uid, gid = resolve_account(image.user, self.list_layer_directories(image))
            size = sum(self._get_layer_bytes(digest) for digest in set(image.layers))
            image = replace(image, uid=uid, gid=gid, size_bytes=size)
            if not self._get_image_file(image.digest).exists():  # never replaced, since locks are on this very file
                self._write_file(self._get_image_file(image.digest), image.dumps())
            os.utime(self._get_image_file(image.digest))
            self._write_file(self.root / "names.json", json.dumps({**self._read_names(), whole: image.digest}))
            self._evict_images(keep=image.digest)
        return image

    def remove(self, name: str) -> None:
        """Remove a name, and the image if it has no other name. A digest removes the image and all its names.

        Raises:
            UnknownImageError: there is no such image.
            SandboxUnavailableError: sandboxes use the image.
        """
        with self._lock_for_changes():
            image = self.resolve(name)
            names = dict(self._read_names())
            names.pop(name if DIGEST_PATTERN.fullmatch(name) else str(parse_reference(name)), None)
            if DIGEST_PATTERN.fullmatch(name) or image.digest not in names.values():
                if not self._remove_image(image.digest):
                    raise SandboxUnavailableError(f"the image '{name}' is in use by sandboxes: stop them first.")
                names = {each: digest for each, digest in names.items() if digest != image.digest}
            self._write_file(self.root / "names.json", json.dumps(names))
            self._remove_layers()

    def list_requestable_names(self) -> tuple[str, ...]:
        """Return every name and digest by which a sandbox can request an image of this machine."""
        names = self._read_names()
        return tuple(sorted({*names, *(name.removesuffix(":latest") for name in names), *names.values()}))

    def list(self) -> list[CachedImage]:
        """List all images, most recently used first."""
        names = self._read_names()
        images = []
        for path in self._list_image_files():
            with contextlib.suppress(FileNotFoundError):
                image = Image.loads(path.read_text())
                tags = tuple(sorted(name for name, digest in names.items() if digest == image.digest))
                with self._try_lock_image(path) as free:
                    images.append(CachedImage(image=image, names=tags, used_at=path.stat().st_mtime, in_use=not free))
        return sorted(images, key=lambda each: -each.used_at)

    def make_root(self, key: str, fill: Callable[[str], None]) -> str:
        """Return the path of the cached root directory `key`; on the first call, create it with `fill(path)`.

        Raises:
            SandboxUnavailableError: the cache cannot be written.
        """
        target = self.root / "roots" / key
        if target.exists():
            return str(target)
        try:
            directory = tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=target.parent)
            try:
                os.chmod(directory, 0o755)
                fill(directory)
                os.rename(directory, target)
            except OSError:
                _remove_tree(Path(directory))
                if not target.exists():  # otherwise another process was faster
                    raise
        except OSError as error:
            raise _make_cache_error(self.root, error) from error
        return str(target)

    # The methods below that change the cache need the lock (`_lock_for_changes`).

    @contextlib.contextmanager
    def _lock_for_changes(self) -> Iterator[None]:
        try:
            for name in ("layers", "images", "roots", "tmp"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _make_cache_error(self.root, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._remove_leftovers()
            yield
        except OSError as error:
            raise _make_cache_error(self.root, error) from error
        finally:
            os.close(lock)

    def _remove_leftovers(self) -> None:
        """Remove the temporary files and unfinished roots of processes that were killed."""
        for path in (self.root / "tmp").iterdir():
            _remove_tree(path)
        for path in (self.root / "roots").glob(_UNFINISHED_PREFIX + "*"):
            if path.stat().st_mtime < time.time() - _STALE_AFTER_S:
                _remove_tree(path)

    def _install_layer(
        self, digest: str, open_blob: Callable[[], contextlib.AbstractContextManager[IO[bytes]]], budget: UnpackBudget
    ) -> None:
        directory = tempfile.mkdtemp(dir=self.root / "tmp")
        try:
            files = os.path.join(directory, "files")
            os.mkdir(files)
            os.chmod(files, 0o755)
            before = budget.bytes_left
            with open_blob() as blob:
                computed = unpack(decompress(blob), files, budget)
            if computed != digest:
                raise BadImageError(f"layer digest mismatch: expected {digest}, got {computed}.")
            Path(directory, "size").write_text(str(before - budget.bytes_left))
            os.rename(directory, self._get_layer_directory(digest))
        except BaseException:
            _remove_tree(Path(directory))
            raise

    def _write_file(self, path: Path, text: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.root / "tmp")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.rename(name, path)

    def _evict_images(self, keep: str) -> None:
        """Remove the least recently used images, except `keep` and locked images, until the layers fit the budget."""
        for path in sorted(self._list_image_files(), key=lambda each: each.stat().st_mtime):
            if self._compute_total_bytes() <= self._budget_bytes:
                return
            digest = Image.loads(path.read_text()).digest
            if digest != keep and self._remove_image(digest):
                names = {name: each for name, each in self._read_names().items() if each != digest}
                self._write_file(self.root / "names.json", json.dumps(names))
                self._remove_layers()

    def _remove_image(self, digest: str) -> bool:
        """Remove an image; return False if it is locked."""
        with self._try_lock_image(self._get_image_file(digest)) as free:
            if free:
                self._images.pop(digest, None)
                self._get_image_file(digest).unlink(missing_ok=True)
                for root in (self.root / "roots").glob(_format_file_name(digest) + "*"):
                    self._move_and_remove(root)
            return free

    def _remove_layers(self) -> None:
        """Remove the layers that no image uses."""
        used = {
            _format_file_name(layer)
            for path in self._list_image_files()
            for layer in Image.loads(path.read_text()).layers
        }
        for path in (self.root / "layers").iterdir():
            if path.name not in used:
                self._move_and_remove(path)

    def _move_and_remove(self, path: Path) -> None:
        # A rename removes the name at once; otherwise the directory would be incomplete while it is being deleted.
        moved = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        os.rename(path, moved / "it")
        _remove_tree(moved)

    @contextlib.contextmanager
    def _try_lock_image(self, path: Path) -> Iterator[bool]:
        """Lock an image exclusively within a `with` block; yield False if another process has already locked it."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _compute_total_bytes(self) -> int:
        return sum(self._read_layer_bytes(path) for path in (self.root / "layers").iterdir())

    def _get_layer_bytes(self, digest: str) -> int:
        return self._read_layer_bytes(self._get_layer_directory(digest))

    def _read_layer_bytes(self, layer: Path) -> int:
        return int((layer / "size").read_text())

    def _list_image_files(self) -> Sequence[Path]:
        return list((self.root / "images").glob("sha256-*.json"))

    def _get_image_file(self, digest: str) -> Path:
        return self.root / "images" / f"{_format_file_name(digest)}.json"

    def _get_layer_directory(self, digest: str) -> Path:
        return self.root / "layers" / _format_file_name(digest)

    def _read_names(self) -> Mapping[str, str]:
        path = self.root / "names.json"
        try:
            status = path.stat()
            state = (status.st_ino, status.st_mtime_ns, status.st_size)
            if state != self._names_state:
                self._names, self._names_state = json.loads(path.read_text()), state
        except FileNotFoundError:
            self._names, self._names_state = {}, None
        return self._names


def _format_file_name(digest: str) -> str:
    return digest.replace(":", "-")


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make_cache_error(root: Path, error: OSError) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"cannot write the image cache '{root}': {error}. Free space, fix its permissions, or set ROLL_CACHE to "
        "another directory."
    )
