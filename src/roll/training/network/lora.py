"""LoRA: low-rank adapters (arXiv 2106.09685) through peft, injected into the HF model in place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from roll.config.model import LoRAConfig
from roll.errors import ModelError, short
from roll.models import find_routers
from roll.registry import did_you_mean
from roll.training.experts import find_experts

__all__ = ["Adapter", "adapters_disabled", "add_adapters", "checkpoint_name", "find_adapters"]

_NAME = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One adapted weight matrix: W + scale * B A."""

    a: str
    """The name of the parameter A [rank, inputs]."""
    b: str
    """The name of the parameter B [outputs, rank]."""
    scale: float
    transposed: bool
    """Whether the layer stores its weight as [inputs, outputs]."""

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the full weight in float32 or better; the inputs are not changed."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        delta = b.to(dtype) @ a.to(dtype)
        return weight.to(dtype) + self.scale * (delta.t() if self.transposed else delta)


def add_adapters(model: Any, config: LoRAConfig, seed: int) -> None:
    """Freeze an HF model's weights and add adapters to its linear layers, in the model's dtype.

    They are initialized as in peft, but from `seed` only: equal on every rank, independently of other random draws.

    Raises:
        ModelError: `target_modules` names a module that is not a linear layer of this model, or the rank is larger than
            that of every adapted layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    widest = max((min(weight.shape) for weight in linear), default=config.rank)
    if config.rank > widest:
        raise ModelError(
            f"model.lora.rank is {config.rank}, and no linear layer of {type(model).__name__} has a rank above "
            f"{widest}: lower it, or leave model.lora out to train all weights"
        )
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  # peft only divides by the rank
        lora_dropout=config.dropout,
        target_modules=_targets(model, config.target_modules),
    )
    dtype = next(model.parameters()).dtype
    try:
        # Inside another module peft does not recognize the family, and does not rename the experts' weights.
        inject_adapter_in_model(settings, nn.ModuleDict({"of": model}) if find_experts(model) else model, _NAME)
    except ValueError as error:
        raise ModelError(f"model.lora.target_modules {config.target_modules!r} cannot be used here: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_meta:  # like the adapted weights, which are still in their files
                module._parameters[name] = parameter = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
            if ".lora_A." in path:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
            parameter.data = parameter.data.to(dtype)


def _targets(model: Any, named: list[str] | str) -> list[str] | str:
    """Return the `target_modules` for peft: linear layers of the decoder.

    The embeddings have no adapters: the output embedding is computed in chunks from its weight and not called as a
    layer, and the input embedding is often tied to it. In a mixture of experts, routers have none. Experts, which are
    stacked in one tensor, have none either: peft would rename their matrices to adapters that nothing here merges.

    Raises:
        ModelError: a name does not match any such layer.
    """
    routers = find_routers(model)
    mixture = bool(routers) or bool(find_experts(model))
    if named == "all-linear" and not mixture:
        return named
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    left = {head, *routers}
    layers = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m not in left]
    if named == "all-linear":
        return layers
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    for name in named:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            hint = did_you_mean(name, names)
            more = "; experts of a mixture cannot have adapters" if mixture else ""
            raise ModelError(
                f"model.lora.target_modules has {short(name)}, which is not a linear layer of {type(model).__name__}'s "
                f"decoder{more}.{hint} Use some of {', '.join(names)}, or all-linear"
            )
    if not named:
        raise ModelError(
            f"model.lora.target_modules is empty: use some of {', '.join(names)}, use all-linear, or leave "
            "model.lora out to train all weights"
        )
    return [layer for layer in layers if any(f".{layer}".endswith(f".{name}") for name in named)] if mixture else named


@contextlib.contextmanager
def adapters_disabled(model: Any, *, elsewhere: bool = False) -> Iterator[None]:
    """Run the body with the model's adapters switched off.

    Args:
        model: A model with adapters.
        elsewhere: Whether it is fine that only other parts of the model, on other ranks, have adapters.

    Raises:
        ValueError: the model has no adapters.
    """
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    if not layers and not elsewhere:
        raise ValueError("the model has no adapters to disable: load a separate reference model")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def checkpoint_name(parameter_name: str) -> str:
    """Return a parameter's name in the HF checkpoint: peft nests the original layer inside its own."""
    return parameter_name.replace(".base_layer.", ".")


def find_adapters(model: Any) -> dict[str, Adapter]:
    """Return all adapters of a model, by the checkpoint name of the weight that each one changes."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": Adapter(
            a=f"{name}.lora_A.{_NAME}.weight",
            b=f"{name}.lora_B.{_NAME}.weight",
            scale=float(layer.scaling[_NAME]),
            transposed=bool(getattr(layer, "fan_in_fan_out", False)),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
