"""Features of media: the outputs of a tower and its projector, one vector per feature token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.errors import ModelError
from roll.models.multimodal.processor import ProcessedMedia
from roll.types import MediaKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MediaFeatures",
    "batch_media",
    "encode_media",
    "get_base_model",
    "get_feature_token_ids",
    "has_media_tower",
    "join_features",
]


class MediaFeatures(NamedTuple):
    """Features of one medium with n feature tokens."""

    embeds: Tensor
    """[n, H] embeddings that replace the embeddings of the feature tokens."""
    deepstack: tuple[Tensor, ...] = ()
    """[n, H] each, added to the hidden states after the first decoder layers (Qwen3-VL, arXiv 2511.21631)."""

    def map(self, transform: Callable[[Tensor], Tensor]) -> MediaFeatures:
        """Return the features with `transform` applied to each tensor."""
        return MediaFeatures(transform(self.embeds), tuple(map(transform, self.deepstack)))


def join_features(features: Sequence[MediaFeatures]) -> MediaFeatures:
    """Concatenate the features of several media. Missing deepstack features are filled with zeros."""
    import torch

    count = max(len(own.deepstack) for own in features)
    deepstacks = [own.deepstack or (torch.zeros_like(own.embeds),) * count for own in features]
    embeds = torch.cat([own.embeds for own in features])
    return MediaFeatures(embeds, tuple(torch.cat(parts) for parts in zip(*deepstacks, strict=True)))


def has_media_tower(model: Any) -> bool:
    """Return whether a loaded model has a vision tower."""
    return hasattr(get_base_model(model), "get_image_features")


def get_feature_token_ids(model: Any) -> dict[MediaKind, int]:
    """Return the ID of the token whose embeddings are replaced by features, for each type of media in the model."""
    names: dict[MediaKind, tuple[str, ...]] = {
        "image": ("image_token_id", "image_token_index"),
        "audio": ("audio_token_id",),
        "video": ("video_token_id",),
    }
    found = {kind: next((getattr(model.config, k, None) for k in keys), None) for kind, keys in names.items()}
    if not isinstance(found["image"], int):
        raise ModelError(
            f"{type(model).__name__} has no image_token_id in its configuration, so it does not support images"
        )
    return {kind: token for kind, token in found.items() if isinstance(token, int)}


def batch_media(media: Sequence[ProcessedMedia]) -> list[list[int]]:
    """Group media into batches of one type whose inputs can be concatenated; return the indices of each batch."""
    batches: dict[tuple[Any, ...], list[int]] = {}
    for index, one in enumerate(media):
        shapes = [(name, tensor.shape[1:]) for name, tensor in sorted(one.inputs.items())]
        # Audio clips of any length are one batch, because they can be padded.
        batches.setdefault((one.kind, *(shapes if one.kind != "audio" else ())), []).append(index)
    return list(batches.values())


def encode_media(model: Any, media: Sequence[ProcessedMedia], device: Any, dtype: Any) -> list[MediaFeatures]:
    """Run the towers on media; return their features, in order. Images with equal input shapes are batched.

    Args:
        model: A model of `transformers` with `get_image_features`.
        media: The processed media.
        device: The device of the towers.
        dtype: The dtype of pixel values and audio features.

    Raises:
        ModelError: The number of features that a tower returns differs from the number of feature tokens.
    """
    found: dict[int, MediaFeatures] = {}
    for indices in batch_media(media):
        kind = media[indices[0]].kind
        batch = [media[index] for index in indices]
        features = _run_tower(model, kind, _concatenate([one.inputs for one in batch], device, dtype))
        counts = [one.num_features for one in batch]
        if sum(counts) != len(features.embeds):
            raise ModelError(
                f"the tower of {type(model).__name__} returns {len(features.embeds)} features for media of kind "
                f"'{kind}' with {sum(counts)} feature tokens: the model directory has the processor of another model, "
                "copy it again"
            )
        parts = zip(*(tensor.split(counts) for tensor in (features.embeds, *features.deepstack)), strict=True)
        found |= {index: MediaFeatures(own[0], tuple(own[1:])) for index, own in zip(indices, parts, strict=True)}
    return [found[index] for index in range(len(media))]


def get_base_model(model: Any) -> Any:
    """Return the model without its language-model head, and without PEFT's wrapper if there is one."""
    inner = getattr(model, "base_model", model)
    inner = getattr(inner, "model", inner) if not hasattr(inner, "get_image_features") else inner
    return inner


def _concatenate(inputs: Sequence[Mapping[str, Tensor]], device: Any, dtype: Any) -> dict[str, Tensor]:
    """Concatenate the inputs of several media; inputs of audio clips [1, …, length] are padded to the longest clip."""
    import torch
    from torch.nn.functional import pad

    from roll.models.transfers import move_to_device

    joined: dict[str, Tensor] = {}
    for name in inputs[0]:
        parts = [own[name] for own in inputs]
        if len({part.shape[1:] for part in parts}) > 1:
            longest = max(part.shape[-1] for part in parts)
            parts = [pad(part, (0, longest - part.shape[-1])) for part in parts]
        tensor = torch.cat(parts)
        joined[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return move_to_device(joined, torch.device(device))


def _run_tower(model: Any, kind: MediaKind, inputs: dict[str, Tensor]) -> MediaFeatures:
    output = getattr(get_base_model(model), f"get_{kind}_features")(**inputs, return_dict=True)
    features = output.last_hidden_state if kind == "audio" else output.pooler_output
    return MediaFeatures(_flatten(features), tuple(map(_flatten, getattr(output, "deepstack_features", None) or ())))


def _flatten(features: Any) -> Tensor:
    """Return features [n, H] from a tensor with any batch dimensions, or from one tensor per medium."""
    import torch

    if not isinstance(features, torch.Tensor):
        features = torch.cat([part.reshape(-1, part.shape[-1]) for part in features])
    return features.reshape(-1, features.shape[-1])
