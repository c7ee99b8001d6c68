"""The tensors of a model's checkpoint that are weights of its linear layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from roll.models.checkpoint_names import to_checkpoint_tensors
from roll.models.describe import check_linear, describe_model
from roll.models.loading import load_causal_lm

__all__ = ["linear_weights"]


@cache
def linear_weights(path: str, *, trust_remote_code: bool = False) -> frozenset[str]:
    """Return the checkpoint names of the matrices [outputs, inputs] of linear layers, including experts.

    Embeddings, the projection to the vocabulary, and modules that choose or weight experts are left out. The names come
    from the model itself, built without weights, so they do not depend on back-end, layout or adapter.

    Args:
        path: A model directory.
        trust_remote_code: See `load_causal_lm`.

    Raises:
        ModelError: the model cannot be built, or its checkpoint stores several experts' matrices in one tensor.
    """
    from torch import nn

    check_linear(Path(path))
    model = load_causal_lm(
        path, "bfloat16", attention="eager", trust_remote_code=trust_remote_code, left=lambda model, files: None
    )
    gates = {1, describe_model(path).num_experts}
    found: set[str] = set()
    for place, module in model.named_modules():
        if module is model.get_output_embeddings() or isinstance(module, nn.modules.conv._ConvNd):
            continue
        for name, weight in module.named_parameters(place, recurse=False):
            is_matrix = isinstance(module, nn.Linear) and weight.ndim == 2 and len(weight) not in gates
            if not is_matrix and weight.ndim != 3:
                continue
            found.update(to_checkpoint_tensors(model, name, weight))
    return frozenset(found)
