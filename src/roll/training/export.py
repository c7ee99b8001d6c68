"""Writing a model that `transformers` loads: safetensors in the engine's dtype, configuration, tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from roll.models import load_tokenizer
from roll.protocols import WeightSource
from roll.training.value import ValueNetwork

__all__ = ["export_model"]


def export_model(
    path: Path, weights: WeightSource, network: Any, source: str, dtype: torch.dtype, *, is_first: bool
) -> None:
    """Write an HF model directory. Collective where `weights` is; only the first rank writes.

    Args:
        path: a directory, made if missing.
        weights: the complete model, tied weights once.
        network: `PolicyNetwork` or `ValueNetwork`; its configuration and generation settings are written.
        source: the model directory that the tokenizer is taken from.
        dtype: of `weights`.
        is_first: whether this rank writes.
    """
    tensors = {name: _alone(tensor.cpu()) for name, tensor in weights if tensor is not None}
    if not is_first:
        return
    from huggingface_hub import save_torch_state_dict

    path.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, path, metadata={"format": "pt"})
    model = network.root
    own = network.decoder.config if isinstance(network, ValueNetwork) else model.config
    attention, own._attn_implementation = own._attn_implementation, None
    config = own.to_dict()
    own._attn_implementation = attention
    config.update(dtype=str(dtype).removeprefix("torch."), architectures=[network.architecture])
    if isinstance(network, ValueNetwork):
        config.update(id2label={0: "value"}, label2id={"value": 0})
    elif model.can_generate():
        model.generation_config.save_pretrained(path)
    type(own).from_dict(config).save_pretrained(path)
    load_tokenizer(source).save_pretrained(path)
    for file in path.iterdir():
        _sync(file)
    _sync(path)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """With a storage of its own: what was gathered from uneven shards is a view of a padded one."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _sync(path: Path) -> None:
    """Make it survive power loss, and readable as any other file of the user: a library writes weights as 0600."""
    if path.is_file():
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
