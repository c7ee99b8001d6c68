"""M-RoPE positions [3, L]: time, row and column of each token of an image or video (Qwen2-VL, arXiv 2409.12191).

    text               0 1 2 3       all three axes count tokens
    video, 2 × 1 × 2             4 4 17 17    time: 13 positions a second, one pair of frames a second
                                 4 4  4  4    row
                                 4 5  4  5    column
    text                                 18 19 …    from the largest position so far

The model's `get_rope_index` computes them. Models of the Qwen-VL family receive the type of each token. Omni models
find media by token ID, so tokens outside the spans must not have these IDs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.models.multimodal.features import get_base_model, get_feature_token_ids
from roll.models.multimodal.inputs import MediaInputs
from roll.types import FloatArray, IntArray, MediaKind, MediaSpan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compute_mrope_positions"]


def compute_mrope_positions(
    model: Any, inputs: MediaInputs, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]
) -> IntArray | FloatArray | None:
    """Return the positions [3, L] that the model computes for a sequence; `None` if its positions are token indices.

    The positions are int32, or float32 if some of them are not integers (Qwen3-Omni, for videos).

    Args:
        model: A model of `transformers`.
        inputs: The processed media, for the timing of videos.
        token_ids: Tokens [L], with media expanded.
        media: The spans of media in the tokens.

    Raises:
        DataError: There are too few tokens between two media to separate them.
    """
    base = get_base_model(model)
    visual = [span for span in media if span.kind != "audio"]  # audio has the positions of text
    if not visual or not hasattr(base, "get_rope_index"):
        return None
    if "mm_token_type_ids" in inspect.signature(base.get_rope_index).parameters:
        positions = _compute_by_token_types(base, model, token_ids, visual)
    else:
        positions = _compute_by_token_ids(base, model, inputs, token_ids, visual)
    exact = positions.numpy()
    whole = exact.astype(np.int32)
    return whole if np.array_equal(whole, exact) else exact.astype(np.float32)


def _compute_by_token_types(
    base: Any, model: Any, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]
) -> Tensor:
    """Return positions [3, L] from a model that receives the type of each token (Qwen-VL)."""
    import torch

    token_types = np.zeros(len(token_ids), np.int64)
    _check_gaps(base, media, 1)  # the model's own code would treat them as one image
    feature = get_feature_token_ids(model)["image"]
    for span in media:  # only inside spans: a token with the same ID in text is text
        token_types[span.start : span.end] = np.asarray(token_ids[span.start : span.end]) == feature
    ids = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
    return base.get_rope_index(ids, torch.from_numpy(token_types)[None], image_grid_thw=_stack_grids(media))[0][:, 0]


def _compute_by_token_ids(
    base: Any, model: Any, inputs: MediaInputs, token_ids: NDArray[np.integer[Any]], media: Sequence[MediaSpan]
) -> Tensor:
    """Return positions [3, L] from a model that finds media by their tokens (Qwen2.5-Omni, Qwen3-Omni)."""
    import torch

    config, features = model.config, get_feature_token_ids(model)
    _check_gaps(base, media, 2)
    if media[0].start == 0:
        raise DataError(
            f"a sequence begins with {media[0].kind} {media[0].digest[:12]}, but must begin with text: use the chat "
            "template"
        )
    special = {*features.values(), config.vision_start_token_id, config.audio_start_token_id}
    text = next(token for token in range(len(special) + 1) if token not in special)
    ids = np.full(len(token_ids) + 1, text, np.int64)  # the model expects a token after the last medium
    for span in media:
        own = np.asarray(token_ids[span.start : span.end])
        ids[span.start - 1] = config.vision_start_token_id
        ids[span.start : span.end] = np.where(own == features[span.kind], own, text)
    of_kind: dict[MediaKind, list[MediaSpan]] = {
        kind: [span for span in media if span.kind == kind] for kind in ("image", "video")
    }
    seconds = [inputs.get_without_inputs(span.digest).seconds_per_grid for span in of_kind["video"]]
    wide = torch.from_numpy(ids)[None]
    positions = base.get_rope_index(
        wide,
        image_grid_thw=_stack_grids(of_kind["image"]),
        video_grid_thw=_stack_grids(of_kind["video"]),
        attention_mask=torch.ones_like(wide),
        second_per_grids=torch.tensor(seconds) if seconds else None,
    )[0]
    return positions[:, 0, :-1]


def _check_gaps(base: Any, media: Sequence[MediaSpan], min_gap: int) -> None:
    for span, other in pairwise(media):
        if other.start - span.end < min_gap:
            raise DataError(
                f"{type(base).__name__} cannot separate {span.kind} {span.digest[:12]} from {other.kind} "
                f"{other.digest[:12]}, because only {other.start - span.end} tokens are between them: write text "
                "between them, or use the chat template"
            )


def _stack_grids(media: Sequence[MediaSpan]) -> Tensor | None:
    import torch

    return torch.tensor([span.grid for span in media if span.grid is not None]) if media else None
