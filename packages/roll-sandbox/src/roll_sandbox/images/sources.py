"""Reads images from files of this machine: an OCI layout or its archive, an archive of `docker save`, or a directory.

See the OCI image layout specification. Docker 25 and newer save both formats in one archive; older versions write only
the format with `manifest.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from roll_sandbox.errors import BadImageError
from roll_sandbox.images.image import Image, parse_image
from roll_sandbox.images.names import DIGEST_PATTERN
from roll_sandbox.tar_headers import BoundedTarInfo

__all__ = [
    "MAX_JSON_BYTES",
    "DirectorySource",
    "LayoutSource",
    "check_blob",
    "choose_platform",
    "open_source",
    "parse_json",
]

MAX_JSON_BYTES = 4 * 2**20
_INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_DEPTH = 4


def open_source(path: Path, *, tag: str | None = None) -> contextlib.AbstractContextManager[Any]:
    """Open the image at a path: the directory of a layout, an archive, or a root directory.

    Args:
        path: path of the image.
        tag: tag of the image, if there are several at the path.

    Raises:
        BadImageError: the path does not contain an image, or the image is broken.
    """
    if (path / "oci-layout").is_file() or (path / "manifest.json").is_file():
        return contextlib.nullcontext(LayoutSource(lambda name: _open_below(path, name), tag))
    if path.is_dir():
        if not any(path.iterdir()):
            raise BadImageError(f"the directory '{path}' is empty: expected a root file system or an OCI layout.")
        return _open_directory(path)
    if path.is_file():
        return _open_archive(path, tag)
    raise BadImageError(f"no image found at '{path}': expected an OCI layout, a tar archive or a root file system.")


def parse_json(data: bytes, document: str) -> Any:
    """Parse a JSON document of an image; `document` is the document's name in the error message.

    Raises:
        BadImageError: the data is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadImageError(f"{document} of the image is not valid JSON.") from None


def _missing_tag(tag: str, known_tags: set[str]) -> BadImageError:
    available = ", ".join(sorted(known_tags))[:200]
    return BadImageError(f"tag '{tag}' was not found; available tags: {available or 'none'}.")


def choose_platform(index: object) -> Mapping[str, Any]:
    """Return the first entry of an index for this machine's platform; entries without a platform match any machine.

    Raises:
        BadImageError: no entry matches.
    """
    entries = index.get("manifests") if isinstance(index, dict) else None
    images = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
    places = [each.get("platform") if isinstance(each.get("platform"), dict) else {} for each in images]
    fits = [
        each
        for each, place in zip(images, places, strict=True)
        if place.get("os", "linux") == "linux" and place.get("architecture", machine) == machine
    ]
    if not fits:
        offered = ", ".join(f"{place.get('os')}/{place.get('architecture')}" for place in places)[:200]
        raise BadImageError(f"the image does not support linux/{machine}; available platforms: {offered or 'none'}.")
    return fits[0]


def check_blob(blob: Any, digest: object) -> None:
    """Check that the content of a blob has this digest, and rewind the blob.

    Raises:
        BadImageError: the blob has another digest, or the digest is not SHA-256.
    """
    if not isinstance(digest, str) or not DIGEST_PATTERN.fullmatch(digest):
        raise BadImageError(f"unsupported content digest {str(digest)[:80]!r}: only SHA-256 digests are supported.")
    computed = "sha256:" + hashlib.file_digest(blob, "sha256").hexdigest()
    if computed != digest:
        raise BadImageError(f"digest mismatch: expected {digest}, got {computed}. The image is corrupted.")
    blob.seek(0)


class LayoutSource:
    """An image in an OCI layout or in the format of `docker save`.

    Args:
        open_file: function that opens a file of the layout; raises `BadImageError` or `FileNotFoundError`.
        tag: tag of the image, if the layout has several.
    """

    def __init__(self, open_file: Callable[[str], IO[bytes]], tag: str | None) -> None:
        self._open = open_file
        try:
            digest = self._find_manifest_digest(tag)
        except FileNotFoundError:
            self.image, self._blobs = self._find_docker_image(tag)
            return
        manifest = self._read_json(digest)
        config = manifest.get("config") if isinstance(manifest, dict) else None
        layers = manifest.get("layers") if isinstance(manifest, dict) else None
        if not isinstance(config, dict) or not isinstance(layers, list):
            raise BadImageError("the image's manifest has no configuration or no layers.")
        self.image = parse_image(self._read_json(config.get("digest")), str(config.get("digest")))
        self._blobs = [(str(each.get("digest")), each.get("digest")) for each in layers if isinstance(each, dict)]
        _check_count(self._blobs, self.image)

    def _find_manifest_digest(self, tag: str | None) -> object:
        """Return the digest of the manifest of the image with this tag, for this machine's platform."""
        entry = self._choose_manifest(self._read_file("index.json"), tag)
        for _ in range(_MAX_DEPTH):
            if entry.get("mediaType") not in _INDEX_TYPES:
                return entry.get("digest")
            entry = choose_platform(self._read_json(entry.get("digest")))
        raise BadImageError("the image's indexes are nested too deeply.")

    def _choose_manifest(self, data: bytes, tag: str | None) -> Mapping[str, Any]:
        index = parse_json(data, "the index")
        entries = index.get("manifests") if isinstance(index, dict) else None
        named = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        if tag is not None:
            names = [_read_tags(each) for each in named]
            named = [each for each, tags in zip(named, names, strict=True) if tag in tags]
            if not named:
                raise _missing_tag(tag, {name for tags in names for name in tags})
        return choose_platform({"manifests": named})

    def _find_docker_image(self, tag: str | None) -> tuple[Image, list[tuple[str, object]]]:
        """Return the image, and its layers as file names without digests, from the `manifest.json` of `docker save`."""
        entries = parse_json(self._read_file("manifest.json"), "the manifest")
        known_tags = set[str]()
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, dict):
                continue
            tags = {str(name).rpartition(":")[2] for name in entry.get("RepoTags") or []}
            known_tags |= tags
            if tag is None or tag in tags:
                data = self._read_file(str(entry.get("Config")))
                image = parse_image(parse_json(data, "the configuration"), "sha256:" + hashlib.sha256(data).hexdigest())
                blobs: list[tuple[str, object]] = [(str(name), None) for name in entry.get("Layers") or ()]
                _check_count(blobs, image)
                return image, blobs
        if tag is not None:
            raise _missing_tag(tag, known_tags)
        raise BadImageError("the archive contains no image.")

    def _read_file(self, name: str) -> bytes:
        with self._open(name) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise BadImageError(f"'{name}' in the image exceeds {MAX_JSON_BYTES:,} bytes.")
        return data

    def _read_json(self, digest: object) -> Any:
        with self._open_blob(digest) as blob:
            check_blob(blob, digest)
            data = blob.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise BadImageError(f"the image's content {digest} exceeds {MAX_JSON_BYTES:,} bytes.")
        return parse_json(data, str(digest))

    def _open_blob(self, digest: object) -> IO[bytes]:
        if not isinstance(digest, str) or not DIGEST_PATTERN.fullmatch(digest):
            raise BadImageError(f"unsupported content digest {str(digest)[:80]!r}: only SHA-256 digests are supported.")
        try:
            return self._open(f"blobs/sha256/{digest.removeprefix('sha256:')}")
        except FileNotFoundError:
            raise BadImageError(f"the image's content {digest} is missing.") from None

    @contextlib.contextmanager
    def open_layer(self, number: int) -> Iterator[IO[bytes]]:
        """Open a layer, and yield its blob; see `cache.ImageSource`."""
        name, digest = self._blobs[number]
        if digest is None:
            try:
                opened = self._open(name)
            except FileNotFoundError:
                raise BadImageError(f"the image's layer '{name[:200]}' is missing.") from None
        else:
            opened = self._open_blob(digest)
        with opened as blob:
            if digest is not None:
                check_blob(blob, digest)
            yield blob


class DirectorySource:
    """A root directory, as an image with one layer."""

    def __init__(self, archive: Any) -> None:
        self._archive = archive
        layer = "sha256:" + hashlib.file_digest(archive, "sha256").hexdigest()
        config = json.dumps({"rootfs": {"type": "layers", "diff_ids": [layer]}}).encode()
        self.image = parse_image(json.loads(config), "sha256:" + hashlib.sha256(config).hexdigest())

    @contextlib.contextmanager
    def open_layer(self, number: int) -> Iterator[IO[bytes]]:
        """Yield the blob of the layer; see `cache.ImageSource`."""
        self._archive.seek(0)
        yield self._archive


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[DirectorySource]:
    """Pack a directory into an archive, and yield it as an image; the same files give the same archive."""

    def clear_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        # The layer's digest must depend only on the files.
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(path, ".", recursive=False, filter=clear_owner)
            for directory, folders, files in os.walk(path):
                folders.sort()
                for name in sorted(folders + files):
                    entry = os.path.join(directory, name)
                    archive.add(entry, os.path.relpath(entry, path), recursive=False, filter=clear_owner)
        file.seek(0)
        yield DirectorySource(file)


@contextlib.contextmanager
def _open_archive(path: Path, tag: str | None) -> Iterator[LayoutSource]:
    """Yield the image in an archive, compressed or not; its files are read directly from the archive."""
    try:
        with tarfile.open(path, tarinfo=BoundedTarInfo) as archive:
            members = {os.path.normpath(member.name): member for member in archive if member.isfile() or member.issym()}

            def open_member(name: str) -> IO[bytes]:
                member = members.get(os.path.normpath(name))
                for _ in range(_MAX_DEPTH):
                    if member is None or not member.issym():
                        break  # `docker save` writes a link instead of a layer that the archive already contains
                    member = members.get(os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname)))
                opened = None if member is None or not member.isfile() else archive.extractfile(member)
                if opened is None:
                    raise FileNotFoundError(name)
                return opened

            yield LayoutSource(open_member, tag)
    except (tarfile.TarError, EOFError) as error:
        reason = "it is not a tar archive" if isinstance(error, tarfile.ReadError) else error
        raise BadImageError(f"'{path}' is not an image archive or is corrupted: {reason}.") from None
    except FileNotFoundError as error:
        raise BadImageError(f"'{path}' is not an image archive: it has no file '{error}'.") from None


def _open_below(root: Path, name: str) -> IO[bytes]:
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise BadImageError(f"the image references the file {name[:80]!r} outside its directory.")
    return open(root.joinpath(*parts), "rb")


def _read_tags(entry: Mapping[str, Any]) -> set[str]:
    """Return the name in an index entry, and the tag at the end of the name; empty if the entry has no name."""
    annotations = entry.get("annotations")
    name = str(annotations.get("org.opencontainers.image.ref.name", "")) if isinstance(annotations, dict) else ""
    return {name, name.rpartition(":")[2]} - {""}


def _check_count(blobs: Sequence[object], image: Image) -> None:
    if len(blobs) != len(image.layers):
        raise BadImageError(f"the image has {len(blobs)} layers, but its configuration lists {len(image.layers)}.")
