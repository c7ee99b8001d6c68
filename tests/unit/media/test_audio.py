"""Audio from files and arrays, with independently written files and computed tones."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll.errors import DataError
from roll.media import AudioClip, AudioLimits, MediaStore, convert_array_to_audio, decode_audio
from roll.media.audio import resample
from roll.media.wav import read_wav, write_wav

VALUES = np.array([0.0, 0.5, -0.5, 0.25, -1.0, 0.125])


def pcm(values: Any, *, bits: int = 16, channels: int = 1, rate: int = 16000) -> bytes:
    """Return a WAV file that the standard library wrote."""
    content = {
        8: lambda: (np.round(values * 128) + 128).astype(np.uint8).tobytes(),
        16: lambda: np.round(values * 2**15).astype("<i2").tobytes(),
        24: lambda: b"".join(struct.pack("<i", round(v * 2**23))[:3] for v in np.ravel(values)),
        32: lambda: np.round(values * 2**31).astype("<i4").tobytes(),
    }[bits]()
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((channels, bits // 8, rate, 0, "NONE", ""))
        file.writeframes(content)
    return target.getvalue()


def sine(pitch: float, rate: int, duration_s: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * pitch * np.arange(int(rate * duration_s)) / rate).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_audio_samples_of_every_width_are_read(bits: int) -> None:
    samples, rate = read_wav(pcm(VALUES, bits=bits), "a")
    assert rate == 16000
    np.testing.assert_array_equal(samples[:, 0], VALUES)


def test_audio_floating_point_files_and_unknown_sizes_are_read() -> None:
    written = write_wav(VALUES.astype(np.float32), 8000)
    clip = decode_audio(written, "a", None)
    assert clip.rate == 8000
    np.testing.assert_array_equal(clip.samples, VALUES.astype(np.float32))
    place = written.index(b"data") + 4
    piped = written[:place] + b"\xff\xff\xff\xff" + written[place + 4 :]
    np.testing.assert_array_equal(decode_audio(piped, "a", None).samples, clip.samples)
    extensible = pcm(VALUES).replace(struct.pack("<IH", 16, 1), struct.pack("<IH", 40, 0xFFFE))
    place = extensible.index(b"data")
    extensible = extensible[:place] + struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14) + extensible[place:]
    np.testing.assert_array_equal(decode_audio(extensible, "a", None).samples, VALUES.astype(np.float32))


def test_audio_channels_are_averaged() -> None:
    stereo = np.stack([VALUES, VALUES[::-1]], axis=1)
    expected = ((VALUES + VALUES[::-1]) / 2).astype(np.float32)
    np.testing.assert_array_equal(decode_audio(pcm(stereo, channels=2), "a", None).samples, expected)
    for array in (stereo, stereo.T):
        np.testing.assert_array_equal(convert_array_to_audio(array, 16000, "a").samples, expected)
    integers = convert_array_to_audio((VALUES * 2**15).astype(np.int16), 16000, "a")
    np.testing.assert_array_equal(integers.samples, VALUES.astype(np.float32))


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_audio_resampled_tone_is_the_tone_at_the_other_rate(rate: int) -> None:
    found = resample(sine(1000, rate), rate, 16000)
    expected = sine(1000, 16000)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=1e-5)


def test_audio_resampling_removes_tones_above_the_nyquist_frequency() -> None:
    """At 16 kHz, a tone of 9 kHz would be heard as one of 7 kHz."""
    assert np.abs(resample(sine(9000, 44100), 44100, 16000)[200:-200]).max() < 1e-5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: 0 bytes"),
        (pcm(VALUES)[:-4], "truncated: its header specifies 12 bytes of samples, but it has 8"),
        (pcm(VALUES)[:30], "without a format or without samples"),
        (pcm(VALUES[:0]), "has no samples"),
        (pcm(VALUES).replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 7, 1)), "format 7, 1 channels and 16 bits"),
        (write_wav(np.array([0.0, np.nan], np.float32), 16000), "samples that are not finite"),
        (pcm(np.zeros(16000 * 3)), r"is 3.0 s long, but at most 2 s are allowed"),
        (b"ID3\x04" + bytes(100), "is not a WAV file; it begins with b'ID3.*`soundfile`"),
        (b"<html>" + bytes(100), "is not a WAV file"),
        (bytes(200_000), "has 200,000 bytes, but at most 100,000 are allowed"),
    ],
)
def test_audio_that_cannot_be_read_is_reported(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"row 3: the audio .*{message}"):
        decode_audio(data, "row 3: the audio", 16000, AudioLimits(num_bytes=100_000, duration_s=2))


@pytest.mark.parametrize(
    ("array", "rate", "message"),
    [
        (np.zeros(9), None, "to 1,000,000 Hz, got None"),
        (np.zeros(9), 20, "to 1,000,000 Hz, got 20"),
        (np.zeros(9, np.int64), 16000, "array of int64"),
        (np.zeros((2, 3, 4)), 16000, r"shape \(2, 3, 4\)"),
        (np.zeros((40, 50)), 16000, "at most 32 channels"),
        (np.array(["a"]), 16000, "array of <U1"),
    ],
)
def test_audio_arrays_that_are_not_samples_are_reported(array: Any, rate: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert_array_to_audio(array, rate, "a")


def test_audio_store_has_equal_sound_once_at_its_rate(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    digest = store.add(pcm(VALUES, bits=16), "a", "audio")
    assert store.add(pcm(VALUES, bits=32), "a", "audio") == digest
    assert store.add_clip(AudioClip(samples=VALUES.astype(np.float32), rate=16000)) == digest
    other = store.add(pcm(sine(440, 44100), rate=44100), "a", "audio")
    read = MediaStore(tmp_path).get(other)
    assert isinstance(read, AudioClip) and (read.rate, len(read.samples)) == (16000, 8000)
    assert {path.name for path in tmp_path.glob("??/*")} == {digest, other}
    path = tmp_path / digest[:2] / digest
    path.write_bytes(write_wav(VALUES[::-1].astype(np.float32), 16000))
    with pytest.raises(DataError, match="does not match the digest"):
        MediaStore(tmp_path).get(digest)


def test_audio_store_refuses_kinds_that_the_model_does_not_read() -> None:
    with pytest.raises(DataError, match=r"row 1: the audio is of type 'audio', but the model supports only: image\."):
        MediaStore(None, kinds=("image",)).add(pcm(VALUES), "row 1: the audio", "audio")
