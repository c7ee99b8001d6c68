"""Finds a model's linear layers: the checkpoint tensors that are their weights, and the layers with LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from roll.models.checkpoint_names import to_checkpoint_tensors
from roll.models.describe import check_quantizable, describe_model
from roll.models.loading import load_causal_lm
from roll.models.mixers import get_decoder
from roll.models.routers import find_routers

__all__ = ["find_adapted_layers", "list_adapted_layers", "list_linear_weights"]


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


def find_adapted_layers(
    model: Any, target_modules: Sequence[str] | Literal["all-linear"]
) -> dict[str, tuple[int, int]]:
    """Return the shapes [outputs, inputs] of the decoder's layers that have LoRA adapters, by name.

    The projection to the vocabulary and routers have no adapters. Experts are not linear layers, so they have none
    either.

    Args:
        model: An HF model, which may be on the meta device.
        target_modules: The `model.lora.target_modules` of the run.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    left = {model.get_output_embeddings(), *find_routers(model)}
    inside = set(get_decoder(model).modules())
    found: dict[str, tuple[int, int]] = {}
    for layer, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module in left or module not in inside:
            continue
        if target_modules == "all-linear" or any(f".{layer}".endswith(f".{name}") for name in target_modules):
            first, second = module.weight.shape
            found[layer] = (second, first) if isinstance(module, Conv1D) else (first, second)
    return found


@cache
def list_adapted_layers(
    path: str, target_modules: tuple[str, ...] | Literal["all-linear"], *, trust_remote_code: bool = False
) -> Mapping[str, tuple[int, int]]:
    """Return the result of `find_adapted_layers` for the model in a directory, which is built without its weights."""
    model = load_causal_lm(
        path, "bfloat16", attention="eager", trust_remote_code=trust_remote_code, meta_init=lambda *_: None
    )
    return find_adapted_layers(model, target_modules)
