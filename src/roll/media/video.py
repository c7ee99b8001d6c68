"""Video clips: frames of equal size at a constant rate, from images, arrays, animated images or video files."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.media.images import FORMATS, decode_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["VideoClip", "VideoLimits", "build_video", "decode_video", "is_stored_video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """Limits of one video."""

    num_bytes: int = 256 * 2**20
    """Maximum encoded size, in bytes."""
    num_frames: int = 4096
    """Maximum number of frames."""
    num_pixels: int = 2**27
    """Maximum number of pixels of all frames: 128 Mi, which take 384 MiB as RGB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VideoClip:
    """A video without sound, as frames at a constant rate."""

    frames: NDArray[np.uint8]
    """RGB values [frames, height, width, 3]."""
    fps: float
    """Frames per second."""

    @property
    def digest(self) -> str:
        """SHA-256 of the shape, the frame rate and the RGB values, in hexadecimal."""
        count, height, width, _ = self.frames.shape
        digest = hashlib.sha256(f"video RGB {count}x{width}x{height} {self.fps!r} fps\n".encode())
        digest.update(np.ascontiguousarray(self.frames).tobytes())
        return digest.hexdigest()

    def encode(self) -> bytes:
        """Return a ZIP archive of one PNG per frame and the frame rate, for the media store."""
        from PIL import Image

        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            # Fixed times, so that equal videos are equal files.
            archive.writestr(zipfile.ZipInfo("video.json"), json.dumps({"fps": self.fps, "frames": len(self.frames)}))
            for number, frame in enumerate(self.frames):
                encoded = io.BytesIO()
                Image.fromarray(frame).save(encoded, "PNG", compress_level=1)
                archive.writestr(zipfile.ZipInfo(f"{number:06d}.png"), encoded.getvalue())
        return target.getvalue()

    @classmethod
    def decode(cls, data: bytes, label: str) -> VideoClip:
        """Read the archive that `encode` wrote.

        Raises:
            DataError: The archive is corrupted.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                settings = json.loads(archive.read("video.json"))
                count, fps = int(settings["frames"]), float(settings["fps"])
                images = [decode_image(archive.read(f"{i:06d}.png"), f"{label}, frame {i}") for i in range(count)]
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
            raise DataError(f"{label} is corrupted: {type(error).__name__}: {error}.") from error
        return build_video(images, fps, label)


def is_stored_video(data: bytes) -> bool:
    """Return whether the data begins with the header that `VideoClip.encode` writes."""
    return data[:4] == b"PK\x03\x04"


def build_video(frames: Iterable[Image] | Any, fps: Any, label: str, limits: VideoLimits | None = None) -> VideoClip:
    """Build a video from its frames.

    Args:
        frames: Images in mode RGB, or an array uint8 [frames, height, width, 3].
        fps: Frames per second.
        label: Name of the video in error messages.
        limits: The limits; by default `VideoLimits()`.

    Raises:
        DataError: The frames differ in size, are too many or have no pixels, or the rate is not a positive number.
    """
    limits = limits or VideoLimits()
    if isinstance(fps, bool) or not isinstance(fps, int | float | np.number) or not 0.01 <= fps <= 1000:
        raise DataError(f"{label} has the frame rate {fps!r}: `fps` must be a number of frames per second up to 1,000.")
    if isinstance(frames, np.ndarray):
        shape: tuple[int, ...] = frames.shape
        if frames.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            raise DataError(
                f"{label} is an array of {frames.dtype} with shape {shape}: it must be uint8 with shape "
                "[frames, height, width, 3]."
            )
        _check_size(shape[0], shape[1] * shape[2], label, limits)
        return VideoClip(frames=np.ascontiguousarray(frames), fps=float(fps))
    kept: list[NDArray[np.uint8]] = []
    for image in frames:
        frame = np.asarray(image)
        _check_size(len(kept) + 1, frame.shape[0] * frame.shape[1], label, limits)
        if kept and frame.shape != kept[0].shape:
            raise DataError(
                f"{label} has frames of {kept[0].shape[1]} × {kept[0].shape[0]} and of {frame.shape[1]} × "
                f"{frame.shape[0]} pixels: all frames of a video must have the same size."
            )
        kept.append(frame)
    _check_size(len(kept), 1, label, limits)
    return VideoClip(frames=np.stack(kept), fps=float(fps))


def decode_video(data: bytes, label: str, limits: VideoLimits | None = None) -> VideoClip:
    """Decode a video file: an animated GIF, WebP or PNG, or any other format if PyAV (`av`) is installed.

    Args:
        data: The encoded video.
        label: Name of the video in error messages, such as its row.
        limits: The limits; by default `VideoLimits()`.

    Raises:
        DataError: The video is too large, corrupted, or not in a supported format, or its frames have unequal
            durations.
    """
    from PIL import Image, UnidentifiedImageError

    limits = limits or VideoLimits()
    if len(data) > limits.num_bytes:
        raise DataError(f"{label} has {len(data):,} bytes, but at most {limits.num_bytes:,} are allowed.")
    if not data:
        raise DataError(f"{label} is empty: 0 bytes.")
    try:
        animation = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        return _decode_with_av(data, label, limits)
    except Exception as error:  # decoders raise various errors for corrupted files
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error
    return _decode_animation(animation, label, limits)


def _check_size(count: int, pixels: int, label: str, limits: VideoLimits) -> None:
    if not count or not pixels:
        raise DataError(f"{label} has no frames, or frames without pixels.")
    if count > limits.num_frames or count * pixels > limits.num_pixels:
        raise DataError(
            f"{label} has at least {count:,} frames of {pixels:,} pixels, but at most {limits.num_frames:,} frames and "
            f"{limits.num_pixels:,} pixels in all are allowed: use fewer or smaller frames."
        )


def _decode_animation(animation: Any, label: str, limits: VideoLimits) -> VideoClip:
    """Convert an animated image to a video."""
    if not getattr(animation, "is_animated", False):
        raise DataError(f"{label} is an image with one frame, not a video: put it in the column of images.")
    pixels = animation.width * animation.height
    if animation.format != "GIF":  # to count the frames of a GIF, Pillow would read the whole file
        _check_size(animation.n_frames, pixels, label, limits)
    durations: list[float] = []
    frames: list[Image] = []
    try:
        for number in range(limits.num_frames + 1):
            if number and not _seek_frame(animation, number):
                break
            _check_size(number + 1, pixels, label, limits)
            frames.append(animation.convert("RGB"))
            durations.append(float(animation.info.get("duration", 0)))
    except DataError:
        raise
    except Exception as error:  # decoders raise various errors for corrupted files
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error
    if min(durations) <= 0 or max(durations) > min(durations):
        raise DataError(
            f"{label} has frame durations of {min(durations):g} to {max(durations):g} ms: all frames must have the "
            "same duration. Provide the frames as a list with `fps` instead."
        )
    return build_video(frames, 1000.0 / durations[0], label, limits)


def _seek_frame(animation: Any, index: int) -> bool:
    """Select a frame; return False if the animation has no such frame."""
    try:
        animation.seek(index)
    except EOFError:
        return False
    return True


def _decode_with_av(data: bytes, label: str, limits: VideoLimits) -> VideoClip:
    """Decode a video file with FFmpeg's libraries."""
    try:
        import av  # pyrefly: ignore[missing-import]
    except ImportError:
        raise DataError(
            f"{label} is not an animated image; it begins with {data[:12]!r}. Provide its frames as a list of images "
            "with `fps`, or install the package `av`, which decodes video files."
        ) from None

    def read(container: Any, stream: Any) -> Iterator[Any]:
        for number, frame in enumerate(container.decode(stream), 1):
            _check_size(number, frame.width * frame.height, label, limits)
            yield frame.to_ndarray(format="rgb24")

    try:
        with av.open(io.BytesIO(data)) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None or not stream.average_rate:
                raise DataError(f"{label} has no video stream with a frame rate.")
            fps = float(stream.average_rate)
            return build_video(read(container, stream), fps, label, limits)
    except DataError:
        raise
    except Exception as error:  # FFmpeg raises various errors for corrupted files
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error
