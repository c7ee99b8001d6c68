"""A content-addressed media store in the run directory: an image that several prompts use is stored once.

media/3f/3f9c…e1     an image, encoded as it was received
media/a0/a07b…55     audio: a WAV file of float32 samples, one channel, at the rate of the model
media/c4/c41d…08     a video: a ZIP archive of its frames as PNG, and its frame rate
"""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from roll.errors import DataError, InfraError
from roll.media.audio import AudioClip, AudioLimits, convert_array_to_audio, decode_audio
from roll.media.images import ImageLimits, compute_digest, decode_image
from roll.media.video import VideoClip, VideoLimits, decode_video, is_stored_video
from roll.media.wav import is_wav, read_wav, write_wav
from roll.tracking import atomic
from roll.types import MEDIA_KINDS, MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DECODER", "Decoder", "MediaContent", "MediaStore", "copy_store", "decode_medium"]

MediaContent: TypeAlias = "Image | AudioClip | VideoClip"
"""A decoded medium."""
Decoder: TypeAlias = Callable[[bytes, str, MediaKind, ImageLimits, int], MediaContent]
"""A function with the parameters of `decode_medium`."""
CACHE_BYTES = 256 * 2**20
"""Maximum total size of the decoded media that a process caches."""
AUDIO_RATE = 16_000
"""Sampling rate of common audio encoders, in Hz (Whisper and its successors)."""


def decode_medium(data: bytes, label: str, kind: MediaKind, limits: ImageLimits, audio_rate: int) -> MediaContent:
    """Decode an image, an audio clip or a video.

    Args:
        data: The encoded image, audio or video.
        label: Name of the file or row in error messages.
        kind: The type of medium.
        limits: Size limits of images.
        audio_rate: The rate to which audio is resampled, in Hz.

    Raises:
        DataError: The data cannot be decoded.
    """
    if kind == "image":
        return decode_image(data, label, limits)
    return decode_audio(data, label, audio_rate) if kind == "audio" else decode_video(data, label)


DECODER: ContextVar[Decoder] = ContextVar("DECODER", default=decode_medium)
"""Decodes the media that are added to stores; `roll.cluster.decoding` sets one that works in another process."""


class MediaStore:
    """Stores media by digest. Several processes may use the same directory at the same time.

    Args:
        directory: The directory of the files; created when the first medium is added. `None` keeps media in memory, for
            checks without a run.
        limits: The limits of each image.
        cache_bytes: Maximum total size of the decoded media that are cached in memory.
        kinds: The types of media that the model reads; other types are rejected.
        audio_rate: The rate to which audio is resampled, in Hz; by default `AUDIO_RATE`.
    """

    def __init__(
        self,
        directory: Path | None,
        limits: ImageLimits | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        kinds: Collection[MediaKind] = MEDIA_KINDS,
        audio_rate: int | None = None,
    ) -> None:
        self.directory = directory
        self.kinds = kinds
        self.audio_rate = audio_rate or AUDIO_RATE
        self._in_memory: dict[str, bytes] = {}
        self._limits = limits or ImageLimits()
        self._cache: OrderedDict[str, MediaContent] = OrderedDict()
        self._cached_bytes, self._cache_bytes = 0, cache_bytes
        self._lock = threading.Lock()
        self.known: OrderedDict[str, str] = OrderedDict()
        """Digests of media by the digest of their encoded form, for callers that add the same file many times."""
        self._decoding: dict[str, threading.Lock] = {}
        """Locks of the media that threads are decoding."""

    def add(self, data: bytes, label: str, kind: MediaKind = "image") -> str:
        """Decode an encoded medium, store it, and return its digest.

        Args:
            data: The encoded image, audio or video.
            label: Name of the medium in error messages, such as its row.
            kind: The type of medium.

        Raises:
            DataError: The medium cannot be decoded, or the model does not support media of this type.
            InfraError: The file cannot be written.
        """
        self.check_kind(kind, label)
        content = self.decode(data, label, kind)
        return self.add_clip(content) if isinstance(content, AudioClip | VideoClip) else self._add(content, data)

    def decode(self, data: bytes, label: str, kind: MediaKind = "image") -> MediaContent:
        """Decode an encoded medium without storing it.

        Raises:
            DataError: The data cannot be decoded.
        """
        return DECODER.get()(data, label, kind, self._limits, self.audio_rate)

    def check_size(self, num_bytes: int, label: str, kind: MediaKind) -> None:
        """Check the size of an encoded medium, before it is read.

        Raises:
            DataError: The medium is too large.
        """
        most = {"image": self._limits, "audio": AudioLimits(), "video": VideoLimits()}[kind].num_bytes
        if num_bytes > most:
            raise DataError(f"{label} has {num_bytes:,} bytes, but at most {most:,} are allowed.")

    def add_image(self, image: Image) -> str:
        """Store a decoded image, as PNG, and return its digest.

        Raises:
            InfraError: The file cannot be written.
        """
        encoded = io.BytesIO()
        image.save(encoded, "PNG", compress_level=1)
        return self._add(image, encoded.getvalue())

    def add_clip(self, clip: AudioClip | VideoClip) -> str:
        """Store decoded audio or video, and return its digest. Audio is resampled to the rate of the store.

        Raises:
            InfraError: The file cannot be written.
        """
        if isinstance(clip, VideoClip):
            return self._add(clip, clip.encode())
        clip = convert_array_to_audio(clip.samples, clip.rate, "audio", self.audio_rate)
        return self._add(clip, write_wav(clip.samples, clip.rate))

    def check_kind(self, kind: MediaKind, label: str) -> None:
        """Check that the model supports a type of media.

        Raises:
            DataError: The model does not support media of this type.
        """
        if kind not in self.kinds:
            raise DataError(f"{label} is of type '{kind}', but the model supports only: {', '.join(self.kinds)}.")

    def cache_image(self, digest: str, size: tuple[int, int], pixels: bytes) -> None:
        """Cache a stored image that was decoded by another process.

        Args:
            digest: Digest of the image.
            size: The image's width and height.
            pixels: The image's RGB pixels, row by row.

        Raises:
            DataError: The pixels do not match the digest.
        """
        from PIL import Image

        image = Image.frombytes("RGB", size, pixels)
        if compute_digest(image) != digest:
            raise DataError(f"the pixels that a worker returned do not match the digest of image {digest[:12]}.")
        self._cache_content(digest, image)

    def get(self, digest: str) -> MediaContent:
        """Return a decoded medium: an image in mode RGB, an audio clip, or a video.

        If several threads need the same medium at the same time, it is decoded only once.

        Raises:
            DataError: The medium is not in the store, or its file was changed.
            InfraError: The file cannot be read.
        """
        with self._lock:
            if (found := self._find_cached(digest)) is not None:
                return found
            lock = self._decoding.setdefault(digest, threading.Lock())
        try:
            with lock:
                with self._lock:
                    if (found := self._find_cached(digest)) is not None:
                        return found
                return self._load(digest)
        finally:
            with self._lock:
                self._decoding.pop(digest, None)

    def _find_cached(self, digest: str) -> MediaContent | None:
        if digest not in self._cache:
            return None
        self._cache.move_to_end(digest)
        return self._cache[digest]

    def _load(self, digest: str) -> MediaContent:
        content = self._decode(self._read(digest), digest)
        if _compute_digest(content) != digest:
            raise DataError(
                f"the content of '{self._get_path(digest)}' does not match the digest in its name, so the file was "
                "modified: restore it, or delete it and resume the run, which stores the media of its rows again."
            )
        self._cache_content(digest, content)
        return content

    def __contains__(self, digest: str) -> bool:
        return digest in self._cache or digest in self._in_memory or self._get_path(digest).exists()

    def _add(self, content: MediaContent, data: bytes) -> str:
        digest = _compute_digest(content)
        if self.directory is None:
            self._in_memory[digest] = data
        else:
            self._write(digest, data)
        self._cache_content(digest, content)
        return digest

    def _decode(self, data: bytes, digest: str) -> MediaContent:
        """Decode a stored file; detect its type from the first bytes."""
        if is_stored_video(data):
            return VideoClip.decode(data, f"video {digest[:12]}")
        if is_wav(data):
            samples, rate = read_wav(data, f"audio {digest[:12]}")
            return AudioClip(samples=samples[:, 0], rate=rate)
        return decode_image(data, f"image {digest[:12]}", self._limits)

    def _cache_content(self, digest: str, content: MediaContent) -> None:
        with self._lock:
            if digest in self._cache:
                return
            self._cache[digest] = content
            self._cached_bytes += _count_bytes(content)
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= _count_bytes(dropped)

    def _read(self, digest: str) -> bytes:
        if digest in self._in_memory:
            return self._in_memory[digest]
        try:
            return self._get_path(digest).read_bytes()
        except FileNotFoundError:
            raise DataError(
                f"medium {digest[:12]} is not in the run's media store '{self.directory}': the run directory was "
                "copied without its folder `media`, or is not on a file system that all nodes share."
            ) from None
        except OSError as error:  # a network file system may fail for a moment
            raise InfraError(
                f"medium {digest[:12]} cannot be read from the media store '{self.directory}': {error.strerror}."
            ) from error

    def _write(self, digest: str, data: bytes) -> None:
        """Write a file unless it exists with the same size. A file of a different size may be truncated, and is
        replaced.
        """
        path = self._get_path(digest)
        try:
            if not _has_size(path, len(data)):
                _replace_file(path, lambda temporary: temporary.write_bytes(data))
        except OSError as error:
            raise InfraError(
                f"medium {digest[:12]} cannot be written to the media store '{self.directory}': {error.strerror}: "
                "check the file system's free space and permissions, and resume the run."
            ) from error

    def _get_path(self, digest: str) -> Path:
        return (self.directory or Path("media")) / digest[:2] / digest


def _compute_digest(content: MediaContent) -> str:
    return content.digest if isinstance(content, AudioClip | VideoClip) else compute_digest(content)


def _count_bytes(content: MediaContent) -> int:
    """Return the size of a decoded medium in memory, in bytes."""
    if isinstance(content, AudioClip):
        return content.samples.nbytes
    return content.frames.nbytes if isinstance(content, VideoClip) else content.width * content.height * 3


def copy_store(source: Path, target: Path) -> None:
    """Copy the media of a store to another store; use hard links if both are on the same file system.

    Args:
        source: The directory to copy from; it does not have to exist.
        target: The directory to copy to; media that it already has, with the same size, are skipped.

    Raises:
        InfraError: A file cannot be copied.
    """
    for path in source.glob("??/*"):
        copy = target / path.parent.name / path.name
        if "." in path.name:  # a file that is still being written
            continue
        try:
            if not _has_size(copy, path.stat().st_size):
                _replace_file(copy, partial(_link_or_copy, path))
        except OSError as error:
            raise InfraError(
                f"'{path}' cannot be copied to the media store '{target}': {error.strerror}: check the file system's "
                "free space and permissions."
            ) from error


def _has_size(path: Path, num_bytes: int) -> bool:
    """Return whether a file exists and has this size."""
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file with `write`, and rename it to `path`, so that readers never see an incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic.make_temporary_path(path)
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:  # after an error, for example because the disk is full
        temporary.unlink(missing_ok=True)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
