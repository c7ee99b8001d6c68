"""Audio clips: decoding from untrusted bytes to one channel of float32 samples at the rate of the model."""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.media.wav import is_wav, read_wav

__all__ = ["AudioClip", "AudioLimits", "convert_array_to_audio", "decode_audio", "resample"]

_SAMPLE_TYPES = ("float16", "float32", "float64", "int16", "int32")
"""dtypes of samples. int64 is not supported, because the full-scale value of integers from JSON is unknown."""
_ZERO_CROSSINGS = 32
"""Zero crossings of the sinc filter on each side, at the lower of the two rates."""
_ROLLOFF = 0.945
"""Cutoff of the filter as a fraction of the lower Nyquist frequency."""
_KAISER_BETA = 14.77
"""Shape of the Kaiser window: stop-band attenuation of about 140 dB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioLimits:
    """Limits of one audio clip."""

    num_bytes: int = 256 * 2**20
    """Maximum encoded size, in bytes."""
    duration_s: float = 1800.0
    """Maximum duration, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AudioClip:
    """A mono audio clip."""

    samples: NDArray[np.float32]
    """Samples [n], usually from -1 to 1."""
    rate: int
    """Samples per second, in Hz."""

    @property
    def duration_s(self) -> float:
        """Duration, in seconds."""
        return len(self.samples) / self.rate

    @property
    def digest(self) -> str:
        """SHA-256 of the rate and the samples, in hexadecimal."""
        digest = hashlib.sha256(f"audio float32 {self.rate} Hz {len(self.samples)}\n".encode())
        digest.update(np.ascontiguousarray(self.samples, "<f4").tobytes())
        return digest.hexdigest()


def decode_audio(data: bytes, label: str, rate: int | None, limits: AudioLimits | None = None) -> AudioClip:
    """Decode an audio file. WAV is always supported; FLAC, OGG and MP3 if `soundfile` is installed.

    Args:
        data: The encoded audio.
        label: Name of the audio in error messages, such as its row.
        rate: The sampling rate of the clip, in Hz; `None` keeps the rate of the file.
        limits: The limits; by default `AudioLimits()`.

    Raises:
        DataError: The audio is empty, too long, corrupted, or not in a supported format.
    """
    limits = limits or AudioLimits()
    if len(data) > limits.num_bytes:
        raise DataError(f"{label} has {len(data):,} bytes, but at most {limits.num_bytes:,} are allowed.")
    if not data:
        raise DataError(f"{label} is empty: 0 bytes.")
    samples, found = read_wav(data, label) if is_wav(data) else _read_with_soundfile(data, label)
    return convert_array_to_audio(samples, found, label, rate, limits)


def convert_array_to_audio(
    array: Any, rate: Any, label: str, target_rate: int | None = None, limits: AudioLimits | None = None
) -> AudioClip:
    """Convert an array of samples to a clip; channels are averaged.

    Args:
        array: Floating-point, int16 or int32 samples [n], [n, channels] or [channels, n], with at most 32 channels.
        rate: Samples per second, in Hz.
        label: Name of the audio in error messages.
        target_rate: The sampling rate of the clip, in Hz; `None` keeps `rate`.
        limits: The limits; by default `AudioLimits()`.

    Raises:
        DataError: The array has an unsupported dtype or shape, is empty or too long, or has values that are not finite.
    """
    limits = limits or AudioLimits()
    array = np.asarray(array)
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 1000 <= rate <= 1_000_000:
        raise DataError(f"{label} must have a sampling rate from 1,000 to 1,000,000 Hz, got {rate!r}.")
    if array.dtype.name not in _SAMPLE_TYPES or array.ndim not in (1, 2):
        raise DataError(
            f"{label} is an array of {array.dtype} with shape {array.shape}: it must be [n] or [n, channels], of "
            "floating-point samples from -1 to 1, int16 or int32."
        )
    if array.ndim == 2 and min(array.shape) > 32:
        raise DataError(f"{label} must have at most 32 channels, got an array with shape {array.shape}.")
    if not array.size:
        raise DataError(f"{label} has no samples.")
    length = max(array.shape)
    if length > limits.duration_s * rate:
        raise DataError(
            f"{label} is {length / rate:,.1f} s long, but at most {limits.duration_s:,.0f} s are allowed: split it, "
            "or remove it."
        )
    if np.issubdtype(array.dtype, np.integer):
        array = (array / (np.iinfo(array.dtype).max + 1.0)).astype(np.float32)
    if array.ndim == 2:
        array = array.mean(axis=int(np.argmin(array.shape)), dtype=np.float64)
    samples = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(samples).all():
        raise DataError(f"{label} has samples that are not finite numbers: correct the file, or remove it.")
    target = int(rate) if target_rate is None else target_rate
    return AudioClip(samples=resample(samples, int(rate), target), rate=target)


def resample(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """Resample [n] samples with a windowed sinc filter; the result has the shape [ceil(n × target / rate)].

    Args:
        samples: The samples, shape [n].
        rate: The sampling rate of the input, in Hz.
        target: The sampling rate of the result, in Hz.
    """
    if rate == target:
        return samples
    divisor = math.gcd(rate, target)
    up, down = target // divisor, rate // divisor
    cutoff = _ROLLOFF * min(1.0, up / down)  # relative to the input's Nyquist frequency
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = np.pad(samples.astype(np.float64), (reach, reach + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    result = np.zeros(-(-len(samples) * up // down))
    taps = np.arange(-reach, reach + 1)
    for phase in range(min(up, len(result))):  # outputs with the same fractional position share one filter
        first, fraction = divmod(phase * down, up)
        offsets = taps - fraction / up
        window = np.i0(_KAISER_BETA * np.sqrt(np.clip(1 - (offsets / (reach + 1)) ** 2, 0, None))) / np.i0(_KAISER_BETA)
        kernel = cutoff * np.sinc(cutoff * offsets) * window
        mine = result[phase::up]
        mine[:] = windows[first::down][: len(mine)] @ kernel
    return result.astype(np.float32)


def _read_with_soundfile(data: bytes, label: str) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile  # pyrefly: ignore[missing-import]
    except ImportError:
        raise DataError(
            f"{label} is not a WAV file; it begins with {data[:12]!r}. Convert it to WAV, or install the package "
            "`soundfile`, which reads FLAC, OGG and MP3."
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile raises various errors for corrupted files
        raise DataError(f"{label} cannot be decoded: {type(error).__name__}: {str(error)[:200]}.") from error
    return samples, int(rate)
