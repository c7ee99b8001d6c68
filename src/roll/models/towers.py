"""Sizes of the towers and projectors of a multimodal model, from the names and shapes of its weights.

    model.visual.blocks.7.mlp.fc1.weight [h_inner, h]     tower: blocks, widths
    model.visual.merger.mlp.0.weight     [4 h, 4 h]       projector: 4 patches become one feature token
    model.language_model.…                                neither

config.json often omits values that equal a class's defaults, so the sizes are read from the shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PROJECTOR_PATTERN", "TowerDescription", "describe_towers", "is_tower_weight"]

PROJECTOR_PATTERN = re.compile(r"(?:^|[._])(?:projector|connector|merger|resampler)|(?:^|\.)audio_tower\.proj\d?\.")
"""Names of projectors: `multi_modal_projector` (LLaVA, InternVL, Gemma 3), `connector` (SmolVLM, Idefics3), `merger`,
`deepstack_merger_list` (Qwen-VL)."""
_TOWER_PATTERN = re.compile(r"(?:^|[._])(?:vision|visual|audio_tower)")
_BLOCK_PATTERN = re.compile(r"(.*?\.(?:layers?|blocks))\.(\d+)\.(.*)")
_DEEPSTACK_PATTERN = re.compile(r"deepstack_merger_list\.(\d+)\.")
_MLP_PATTERN = re.compile(r"(?:^|[._])(?:mlp|fc\d|intermediate|feed_forward)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerDescription:
    """Sizes of the vision tower of a model, for memory estimates."""

    num_parameters: int
    """The number of weights of all towers, without projectors."""
    projector_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    patch_width: int
    """The number of pixel values of a patch."""
    patches_per_token: float
    """The number of patches that become one feature token."""
    output_size: int
    """The width of a feature token, which equals the hidden size of the language model."""
    num_projectors: int
    """The number of projectors: one, plus one for each DeepStack layer (Qwen3-VL)."""
    has_gates: bool
    """True if the MLPs are gated, as in Qwen2.5-VL."""
    hidden_vectors: int
    """The number of vectors of width `hidden_size` that a layer stores per patch for the backward pass."""
    inner_vectors: int
    """The number of vectors of width `intermediate_size` that a layer stores per patch for the backward pass."""


def is_tower_weight(name: str) -> bool:
    """Return whether a weight belongs to a tower for images, audio or video, or to its projector."""
    return _TOWER_PATTERN.search(name) is not None or PROJECTOR_PATTERN.search(name) is not None


def describe_towers(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], output_size: int
) -> TowerDescription | None:
    """Describe the vision tower of a model; `None` for a model without one.

    Args:
        config: The config.json of the model, or of its thinker.
        shapes: The shapes of the model's weights by name.
        output_size: The width of the language model.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    projector = {name: shape for name, shape in shapes.items() if PROJECTOR_PATTERN.search(name)}
    tower = {name: shape for name, shape in shapes.items() if _TOWER_PATTERN.search(name) and name not in projector}
    matches = ((_BLOCK_PATTERN.match(name), shape) for name, shape in tower.items())
    blocks = [(found[1], int(found[2]), found[3], shape) for found, shape in matches if found is not None]
    if not blocks:
        return None
    stacks = {name for name, *_ in blocks if "audio" not in name}
    stack = max(stacks or {blocks[0][0]}, key=lambda name: sum(own == name for own, *_ in blocks))
    first = {inner: shape for name, number, inner, shape in blocks if name == stack and number == 0}
    matrices = [shape for inner, shape in first.items() if _MLP_PATTERN.search(inner) and len(shape) == 2]
    patches = [shape for name, shape in tower.items() if "patch" in name and len(shape) > 3 and "audio" not in name]
    hidden = min((min(shape) for shape in matrices), default=1)
    has_gates = any("gate" in inner for inner in first)
    kind = vision.get("model_type")
    uses_quick_gelu = vision.get("hidden_act", "quick_gelu" if kind == "clip_vision_model" else "") == "quick_gelu"
    return TowerDescription(
        num_parameters=sum(map(math.prod, tower.values())),
        projector_parameters=sum(map(math.prod, projector.values())),
        num_layers=1 + max(number for name, number, *_ in blocks if name == stack),
        hidden_size=hidden,
        intermediate_size=max((max(shape) for shape in matrices), default=hidden),
        patch_width=math.prod(patches[0][1:]) if patches else 0,
        patches_per_token=_count_patches(config, vision, projector, hidden),
        output_size=output_size,
        num_projectors=1 + len({found[1] for name in projector if (found := _DEEPSTACK_PATTERN.search(name))}),
        has_gates=has_gates,
        hidden_vectors=_count_hidden_vectors(first, has_gates=has_gates),
        inner_vectors=4 if has_gates else 3 if uses_quick_gelu else 2,
    )


def _count_hidden_vectors(block: Collection[str], *, has_gates: bool) -> int:
    """Return the number of vectors of the tower's width that autograd stores per patch and block.

    The vectors are the inputs and results of two norms, the residuals, queries, keys, values, and the attention output.

    Args:
        block: The names of the weights of the block.
        has_gates: Whether the MLP of the block is gated.
    """
    if any("qkv" in name for name in block):  # Qwen-VL: with rotary embeddings, and with RMSNorm if MLPs are gated
        return 14 if has_gates else 11
    return 10 if any("lambda" in name or "layer_scale" in name for name in block) else 8  # InternVL scales outputs


def _count_patches(
    config: Mapping[str, Any], vision: Mapping[str, Any], projector: Mapping[str, tuple[int, ...]], hidden: int
) -> float:
    """Return the number of patches that become one feature token."""
    pooled, size, patch = config.get("mm_tokens_per_image"), vision.get("image_size"), vision.get("patch_size")
    if isinstance(pooled, int) and pooled and isinstance(size, int) and isinstance(patch, int) and patch:
        return (size // patch) ** 2 / pooled  # Gemma 3 averages patches
    # The first matrix by name (`linear_1`, `mlp.0`, `proj`) takes the patches of one token side by side.
    first = (shape for name, shape in sorted(projector.items()) if len(shape) == 2 and "audio" not in name)
    return next(first, (hidden, hidden))[1] / hidden
