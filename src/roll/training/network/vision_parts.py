"""The parts of a vision-language model, which can be frozen or trained with different learning rates.

tower            the vision transformer
projector        the layers between the tower and the decoder (connector, merger)
language_model   the decoder, its embeddings and its head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from roll.config.model import VisionConfig, VisionPart
from roll.errors import ModelError
from roll.models import get_decoder
from roll.models.multimodal import has_media_tower
from roll.models.towers import PROJECTOR_PATTERN

__all__ = ["build_part_finder", "compute_learning_rate_factors", "freeze_parts", "list_tower_blocks"]


def build_part_finder(model: Any) -> Callable[[str], VisionPart]:
    """Return a function that maps the name of a module or parameter to its part of the model.

    Raises:
        ModelError: The model has no vision tower.
    """
    if not has_media_tower(model):
        raise ModelError(f"model.vision is set, but {type(model).__name__} has no vision tower: remove model.vision")
    decoder = get_decoder(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    head = "" if model.get_output_embeddings() is None else "lm_head"

    def find_part(name: str) -> VisionPart:
        if name.startswith(f"{prefix}.") or (head and name.startswith(head)):
            return "language_model"
        return "projector" if PROJECTOR_PATTERN.search(name) else "tower"

    return find_part


def list_tower_blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of a model's towers for images, audio and video; an empty list if the model has no tower.

    The blocks are the elements of every `ModuleList` outside the decoder; lists inside a block are skipped.
    """
    if not has_media_tower(model):
        return []
    known = set(get_decoder(model).modules())
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in known:
            found = [block for block in module if any(True for _ in block.parameters())]
            known.update(part for block in found for part in block.modules())
            blocks += found
    return blocks


def freeze_parts(model: Any, config: VisionConfig) -> None:
    """Exclude the weights of the frozen parts from training.

    Raises:
        ModelError: The model has no vision tower.
    """
    if not config.freeze:
        return
    find_part = build_part_finder(model)
    for name, parameter in model.named_parameters():
        if find_part(name) in config.freeze:
            parameter.requires_grad_(False)


def compute_learning_rate_factors(model: Any, config: VisionConfig, names: Iterable[str]) -> dict[str, float]:
    """Return the learning rate factors of trained weights, by name, except factors of 1.

    Raises:
        ModelError: The configuration has factors, but the model has no vision tower.
    """
    if not config.learning_rate_factors:
        return {}
    find_part = build_part_finder(model)
    factors = {name: config.learning_rate_factors.get(find_part(name), 1.0) for name in names}
    return {name: factor for name, factor in factors.items() if factor != 1.0}
