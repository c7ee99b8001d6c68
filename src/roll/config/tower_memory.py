"""Memory of a vision tower: its trained weights, and the activations of the images of a micro-batch.

The coefficients count the tensors that autograd saves. They were measured for the seven model families of
docs/how-to/train-on-images.md.
"""

from __future__ import annotations

from typing import Protocol

from roll.config.model import VisionConfig

__all__ = ["TowerSizes", "count_frozen_parameters", "count_tower_adapters", "estimate_tower_bytes"]


STATISTICS_BYTES = 24
"""Bytes per patch and layer of the statistics that norms and attention save."""


class TowerSizes(Protocol):
    """Sizes of a vision tower and its projector; `roll.models.towers.TowerDescription` implements it."""

    @property
    def num_parameters(self) -> int: ...
    @property
    def projector_parameters(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def patch_width(self) -> int: ...
    @property
    def patches_per_token(self) -> float: ...
    @property
    def output_size(self) -> int: ...
    @property
    def num_projectors(self) -> int: ...
    @property
    def has_gates(self) -> bool: ...
    @property
    def hidden_vectors(self) -> int: ...
    @property
    def inner_vectors(self) -> int: ...


def count_frozen_parameters(vision: VisionConfig, tower: TowerSizes | None, num_parameters: int) -> int:
    """Return the number of weights in the parts of a model that are not trained.

    Args:
        vision: The configuration of the tower, projector and language model.
        tower: The model's tower; `None` if it has none.
        num_parameters: The number of all weights.
    """
    if tower is None:
        return 0
    outside = tower.num_parameters + tower.projector_parameters
    parts = {
        "tower": tower.num_parameters,
        "projector": tower.projector_parameters,
        "language_model": num_parameters - outside,
    }
    return sum(parts[part] for part in vision.freeze)


def count_tower_adapters(vision: VisionConfig, tower: TowerSizes | None, rank: int) -> int:
    """Return the number of adapter weights in a tower: rank x (inputs + outputs) for each linear layer."""
    if tower is None or "tower" in vision.freeze:
        return 0
    matrices = 3 if tower.has_gates else 2
    attention, mlp = 8 * tower.hidden_size, matrices * (tower.hidden_size + tower.intermediate_size)
    return tower.num_layers * rank * (attention + mlp)


def estimate_tower_bytes(
    vision: VisionConfig, tower: TowerSizes | None, num_tokens: int, element_bytes: int, *, checkpointing: bool
) -> dict[str, int]:
    """Estimate the activations of a tower and its projector that autograd keeps for the images of a micro-batch.

    A layer keeps the inputs and outputs of its norms, queries, keys and values, attention output, and the vectors
    before and after the activation of its MLP. With activation checkpointing, a layer keeps only its input, and one
    whole layer is temporary. A frozen tower keeps nothing; the projector keeps the inputs and outputs of its norm and
    matrices.

    Args:
        vision: The configuration of the parts of the model.
        tower: The model's tower; `None` if it has none.
        num_tokens: The number of feature tokens of the distinct images of a micro-batch.
        element_bytes: Bytes per element of the compute dtype.
        checkpointing: Whether activation checkpointing is used.
    """
    if tower is None or not num_tokens:
        return {}
    patches, hidden, inner = num_tokens * tower.patches_per_token, tower.hidden_size, tower.intermediate_size
    layer = element_bytes * (tower.hidden_vectors * hidden + tower.inner_vectors * inner) + STATISTICS_BYTES
    layers = tower.num_layers * element_bytes * hidden + layer if checkpointing else tower.num_layers * layer
    ends = element_bytes * (tower.patch_width + 2 * hidden)
    projector = element_bytes * (4 * tower.num_projectors * tower.patches_per_token * hidden + 3 * tower.output_size)
    found = 0.0
    if "tower" not in vision.freeze:
        found += patches * (layers + ends)
    if not {"tower", "projector"} <= {*vision.freeze}:
        found += num_tokens * projector
    return {"vision tower": round(found)} if found else {}
