"""Processes media for a model: the tokens that replace a medium's placeholder, and the inputs of its tower.

    chat template     … <image> …                  one placeholder per medium
    expanded tokens   … <row_1_col_1> f f f f … …  the processor's replacement; `f` are the feature tokens

A placeholder's replacement is tokenized once and inserted as token IDs. The text around it is never tokenized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError, ModelError
from roll.media import AudioClip, MediaContent, VideoClip
from roll.models.multimodal.video_frames import sample_frames
from roll.models.quiet import silence_transformers
from roll.models.resolve import resolve_model
from roll.models.sizes import get_thinker_config, read_config
from roll.types import MEDIA_KINDS, IntArray, MediaKind, MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MediaProcessor", "ProcessedMedia", "describe_kinds", "has_media_config"]

_TOKEN_TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")
_NON_TOWER_KEYS = ("input_ids", "attention_mask", "video_second_per_grid", *_TOKEN_TYPE_ARGUMENTS)
_FEATURE_KEYS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image_token_id", "image_token_index", "img_context_token_id"),
    "audio": ("audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Keys in config.json of the feature token, in different model families."""
_SPECIAL_TOKEN_ATTRIBUTES = (
    *("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token", "global_image_token"),
    *("start_image_token", "end_image_token", "vision_start_token", "vision_end_token"),
    *("vision_bos_token", "vision_eos_token", "audio_bos_token", "audio_eos_token"),
)
"""Attributes of processors and tokenizers that name special tokens of media."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedMedia:
    """One image, audio clip or video, processed for a model."""

    kind: MediaKind = "image"
    token_ids: IntArray
    """Tokens that replace the placeholder, int32 [n]."""
    num_features: int
    """Number of feature tokens in `token_ids`."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of patches, for models whose positions depend on them (Qwen-VL)."""
    seconds_per_grid: float | None = None
    """For a video, the time between two frames of the grid, in seconds."""
    token_type_arguments: tuple[str, ...] = ()
    """Names of additional model arguments that distinguish image tokens from text, such as `mm_token_type_ids`."""
    inputs: Mapping[str, Tensor]
    """Arguments of `get_image_features`, `get_audio_features` or `get_video_features`; media are concatenated along the
    first dimension."""

    @property
    def num_bytes(self) -> int:
        """Size of the inputs in memory, in bytes."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


def has_media_config(path: str | Path) -> bool:
    """Return whether the config.json of a model describes a vision tower."""
    config = get_thinker_config(read_config(resolve_model(path, allow_quantized=True)))
    return isinstance(config.get("vision_config"), Mapping)


class MediaProcessor:
    """The processor of a vision-language or omni model.

    Args:
        path: A model in any form that `resolve_model` accepts.
        trust_remote_code: Whether the model's repository may run Python code.

    Raises:
        ModelError: The model has no processor for images, or it cannot be loaded.
    """

    def __init__(self, path: str | Path, *, trust_remote_code: bool = False) -> None:
        directory = resolve_model(path, allow_quantized=True)
        from transformers import AutoProcessor

        try:
            with silence_transformers():
                self._processor: Any = AutoProcessor.from_pretrained(directory, trust_remote_code=trust_remote_code)
        except ImportError as error:
            raise ModelError(
                f"the processor of model '{path}' requires a package that is not installed: {_get_first_line(error)} "
                "Run `make setup`, or install roll-rl[vision]."
            ) from error
        except Exception as error:  # corrupted files cause various errors
            raise ModelError(f"the processor of model '{path}' cannot be loaded: {_get_first_line(error)}") from error
        config = get_thinker_config(read_config(directory))
        self.feature_ids: dict[MediaKind, int] = {}
        """ID of the feature token of each media type, whose embeddings are replaced by features."""
        self.placeholders: dict[MediaKind, str] = {}
        """Placeholder token (text) of each media type in chat templates."""
        # Audio and video are supported for omni models, whose positions `positions` computes.
        kinds: tuple[MediaKind, ...] = MEDIA_KINDS if isinstance(config.get("audio_config"), Mapping) else ("image",)
        for kind in kinds:
            placeholder = getattr(self._processor, f"{kind}_token", None)
            feature = next((config[key] for key in _FEATURE_KEYS[kind] if isinstance(config.get(key), int)), None)
            if isinstance(placeholder, str) and feature is not None:
                self.placeholders[kind], self.feature_ids[kind] = placeholder, int(feature)
        if "image" not in self.placeholders or not hasattr(self._processor, "image_processor"):
            raise ModelError(
                f"model '{path}' has no processor for images (preprocessor_config.json, and image_token_id in "
                "config.json): copy the model again, or remove images from the data."
            )
        find = self._processor.tokenizer.convert_tokens_to_ids
        self.placeholder_ids: dict[MediaKind, int] = {kind: int(find(text)) for kind, text in self.placeholders.items()}
        """ID of the placeholder token of each media type in chat templates."""
        self._path = str(path)
        self._model_type = str(config.get("model_type", ""))
        self._positions_per_second = float(config.get("position_id_per_seconds") or 0)

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The types of media that the model reads."""
        return tuple(self.placeholders)

    @property
    def pads_audio_together(self) -> bool:
        """True if the features of an audio clip depend on the padding to the longest clip in the batch."""
        return self._model_type.startswith("qwen3_omni")  # Qwen2.5-Omni always pads to the longest possible clip

    def has_fractional_positions(self, video: ProcessedMedia) -> bool:
        """Return whether the frames of a video have fractional time positions, computed from the video's frame rate."""
        if video.seconds_per_grid is None or not self._model_type.startswith("qwen3_omni"):
            return False  # Qwen2.5-Omni rounds down
        return not (video.seconds_per_grid * self._positions_per_second).is_integer()

    @property
    def audio_rate(self) -> int | None:
        """Samples per second of the audio that the model reads, in Hz; `None` if it reads no audio."""
        return int(self._processor.feature_extractor.sampling_rate) if "audio" in self.kinds else None

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that mark media; text must not contain these tokens, because engines would insert media there."""
        owners = (self._processor, self._processor.tokenizer)
        found = [getattr(owner, name, None) for owner in owners for name in _SPECIAL_TOKEN_ATTRIBUTES]
        features = self._processor.tokenizer.convert_ids_to_tokens(list(self.feature_ids.values()))
        return tuple(dict.fromkeys(token for token in (*found, *features) if isinstance(token, str) and token))

    @property
    def replaced_tokens(self) -> tuple[int, ...]:
        """IDs of the tokens that engines replace with media.

        These tokens must not be sampled, because a later turn would replace them.

        For omni models, the tokens before and after a medium are included, because the models count them to find media.
        """
        found = {*self.placeholder_ids.values(), *self.feature_ids.values()}
        if "audio" in self.kinds:
            found.update(*(self.get_delimiters(kind) or () for kind in self.kinds))
        return tuple(sorted(found))

    def get_delimiters(self, kind: MediaKind) -> tuple[int, int] | None:
        """Return the IDs of the delimiter tokens around a medium in chat templates; `None` if there are none."""
        name = "audio" if kind == "audio" else "vision"
        tokens = [getattr(self._processor, f"{name}_{side}_token", None) for side in ("bos", "eos")]
        if not all(isinstance(token, str) for token in tokens):
            return None
        first, last = self._processor.tokenizer.convert_tokens_to_ids(tokens)
        return int(first), int(last)

    def process(self, content: MediaContent) -> ProcessedMedia:
        """Process one medium.

        Args:
            content: An image in mode RGB, an audio clip, or a video.

        Raises:
            DataError: The processor rejects the medium, or the model does not read media of this type.
        """
        kind: MediaKind = "image"
        arguments: dict[str, Any] = {}
        if isinstance(content, AudioClip):
            kind, arguments = "audio", {"audio": [content.samples], "sampling_rate": content.rate}
            label = f"audio of {content.duration_s:.2f} s at {content.rate} Hz"
        elif isinstance(content, VideoClip):
            kind = "video"
            label = "a video of {} frames of {} × {} pixels".format(*(content.frames.shape[i] for i in (0, 2, 1)))
        else:
            arguments = {"images": [content]}
            label = f"an image of {content.width} × {content.height} pixels"
        if kind not in self.placeholders:
            raise DataError(f"model '{self._path}' does not support {label}; supported: {', '.join(self.kinds)}.")
        try:
            if isinstance(content, VideoClip):
                frames, fps = self.sample_video(content)
                arguments = {"videos": [frames], "fps": fps, "do_sample_frames": False}
            output = self._processor(
                text=[self.placeholders[kind]], add_special_tokens=False, return_tensors="pt", **arguments
            )
        except Exception as error:  # image processors raise various errors for unusual shapes
            raise DataError(
                f"the processor of model '{self._path}' cannot read {label}: {_get_first_line(error)}"
            ) from error
        if isinstance(content, AudioClip):
            self._check_audio_complete(content, output, label)
        return self._build_media(kind, output, label)

    def sample_video(self, video: VideoClip) -> tuple[NDArray[np.uint8], float]:
        """Return the frames of a video that the model receives, and their frame rate; see `sample_frames`."""
        return sample_frames(self._processor.video_processor, video)

    def _check_audio_complete(self, clip: AudioClip, output: Any, label: str) -> None:
        """Check that the processor read an audio clip to its end."""
        read = int(output["feature_attention_mask"].sum()) * self._processor.feature_extractor.hop_length
        if read < len(clip.samples) - self._processor.feature_extractor.n_fft:
            raise DataError(
                f"the processor of model '{self._path}' reads only {read / clip.rate:.1f} s of {label}: split "
                "the audio."
            )

    def _build_media(self, kind: MediaKind, output: Any, label: str) -> ProcessedMedia:
        tokens = output["input_ids"][0].numpy().astype(np.int32)
        grid, seconds = output.get(f"{kind}_grid_thw"), output.get("video_second_per_grid")
        inputs = {name: tensor for name, tensor in output.items() if name not in _NON_TOWER_KEYS}
        if kind == "audio":  # without padding, which may be up to the longest audio that the model reads
            length = int(inputs["feature_attention_mask"].sum())
            inputs = {name: tensor[..., :length] for name, tensor in inputs.items()}
        num_features = int((tokens == self.feature_ids[kind]).sum())
        if not num_features:
            raise DataError(f"the processor of model '{self._path}' creates no features for {label}: it is too short.")
        return ProcessedMedia(
            kind=kind,
            token_ids=tokens,
            num_features=num_features,
            grid=None if grid is None else tuple(grid[0].tolist()),
            seconds_per_grid=None if seconds is None else float(seconds[0]),
            token_type_arguments=tuple(name for name in _TOKEN_TYPE_ARGUMENTS if name in output),
            inputs=inputs,
        )

    def expand(
        self, token_ids: IntArray, digests: Sequence[str], media: Mapping[str, ProcessedMedia], label: str = "a prompt"
    ) -> tuple[IntArray, tuple[MediaSpan, ...]]:
        """Replace the placeholders in rendered tokens with the tokens of the media.

        Args:
            token_ids: Tokens [n] with one placeholder per medium.
            digests: Digests of the media, in order.
            media: The processed media, by digest.
            label: Name of the tokens in error messages.

        Returns:
            The tokens, and the span of each medium in them.

        Raises:
            DataError: The placeholders do not match the kinds and the order of the media.
        """
        places = np.flatnonzero(np.isin(token_ids, list(self.placeholder_ids.values())))
        kinds = {token: kind for kind, token in self.placeholder_ids.items()}
        written = [kinds[int(token_ids[place])] for place in places]
        wanted = [media[digest].kind for digest in digests]
        if written != wanted:
            raise DataError(
                f"{label} has {describe_kinds(wanted)}, but its rendered text has placeholders for "
                f"{describe_kinds(written)}: the chat template must write {self._list_placeholders(wanted)} for each."
            )
        parts: list[IntArray] = []
        spans: list[MediaSpan] = []
        last = length = 0
        for place, digest in zip(places, digests, strict=True):
            found = media[digest]
            parts += [token_ids[last:place], found.token_ids]
            start = length + int(place) - last
            length = start + len(found.token_ids)
            spans.append(MediaSpan(kind=found.kind, digest=digest, start=start, end=length, grid=found.grid))
            last = int(place) + 1
        return np.concatenate([*parts, token_ids[last:]]).astype(np.int32), tuple(spans)

    def collapse(self, token_ids: IntArray, media: Sequence[MediaSpan]) -> IntArray:
        """Return the tokens with each medium collapsed to one placeholder, for engines that run a processor
        themselves."""
        parts: list[IntArray] = []
        last = 0
        for span in media:
            placeholder = np.array([self.placeholder_ids[span.kind]], token_ids.dtype)
            parts += [token_ids[last : span.start], placeholder]
            last = span.end
        return np.concatenate([*parts, token_ids[last:]])

    def _list_placeholders(self, kinds: Sequence[MediaKind]) -> str:
        return " or ".join(repr(self.placeholders[kind]) for kind in dict.fromkeys(kinds) or self.kinds)


def describe_kinds(kinds: Sequence[MediaKind]) -> str:
    """Return the numbers of media of each type in words, in order of their first occurrence.

    >>> describe_kinds(["image", "audio", "image"])
    '2 images and 1 audio'
    """
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    plural = {"image": "images", "audio": "audios", "video": "videos"}
    parts = [f"{count} {plural[kind] if count != 1 else kind}" for kind, count in counts.items()]
    return " and ".join(parts) if parts else "no media"


def _get_first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
