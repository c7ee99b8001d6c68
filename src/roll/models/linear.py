"""Finds the checkpoint tensors that are weights of a model's linear layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from roll.models.checkpoint_names import to_checkpoint_tensors
from roll.models.describe import check_quantizable, describe_model
from roll.models.loading import load_causal_lm

__all__ = ["list_linear_weights"]


@cache
def list_linear_weights(path: str, *, trust_remote_code: bool = False) -> frozenset[str]:
    """Return the checkpoint names of the weights [outputs, inputs] of linear layers, including experts.

    Embeddings, the projection to the vocabulary, routers, and gates of shared experts are left out. The names are read
    from the model built without weights, so they do not depend on back-end, parallel layout or adapter.

    Args:
        path: A model directory.
        trust_remote_code: See `load_causal_lm`.

    Raises:
        ModelError: the model cannot be built, or its checkpoint stores several experts' matrices in one tensor.
    """
    from torch import nn

    check_quantizable(Path(path))
    model = load_causal_lm(
        path, "bfloat16", attention="eager", trust_remote_code=trust_remote_code, meta_init=lambda *_: None
    )
    # A router is a linear layer with one output per expert; the gate of a shared expert has a single output.
    gates = {1, describe_model(path).num_experts}
    names: set[str] = set()
    for place, module in model.named_modules():
        if module is model.get_output_embeddings() or isinstance(module, nn.modules.conv._ConvNd):
            continue
        for name, weight in module.named_parameters(place, recurse=False):
            is_matrix = isinstance(module, nn.Linear) and weight.ndim == 2 and len(weight) not in gates
            if not is_matrix and weight.ndim != 3:
                continue
            names.update(to_checkpoint_tensors(model, name, weight))
    return frozenset(names)
