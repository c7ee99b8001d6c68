"""LoRA: low-rank adapters (arXiv 2106.09685) through peft, injected into the HF model in place."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from roll.config.model import LoRAConfig, VisionConfig
from roll.errors import ModelError, shorten
from roll.models import find_routers
from roll.registry import did_you_mean
from roll.training.experts import find_experts
from roll.training.network.vision_parts import build_part_finder

__all__ = [
    "Adapter",
    "AdapterScales",
    "SwitchableAdapters",
    "add_adapters",
    "apply_loraplus",
    "build_peft_settings",
    "disable_adapters",
    "find_adapters",
    "get_checkpoint_name",
    "inject_adapters",
    "reset_magnitudes",
]

_ADAPTER_NAME = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The LoRA adapter of one weight matrix W, which becomes W + scale * B A."""

    a: str
    """The name of the parameter A [rank, inputs]."""
    b: str
    """The name of the parameter B [outputs, rank]."""
    scale: float
    transposed: bool
    """True if the layer stores its weight as [inputs, outputs]."""
    magnitude: str | None = None
    """With DoRA, the name of the parameter with the norms of the merged weight's rows [outputs]."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the adapter's parameters."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> Tensor:
        """Return the merged weight in float32 or better; the inputs are not changed.

        The merged weight is W + scale * B A. With DoRA, its rows are then scaled to the norms `magnitude`.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        delta = b.to(dtype) @ a.to(dtype)
        merged = weight.to(dtype) + self.scale * (delta.t() if self.transposed else delta)
        if magnitude is None:
            return merged
        # The forward pass rounds the norms to the compute dtype. Other norms would change every row a little.
        norms = _compute_row_norms(merged, transposed=self.transposed).to(weight.dtype)
        factors = (magnitude.to(dtype) / norms.to(dtype))[:, None]
        return merged * (factors.t() if self.transposed else factors)


class SwitchableAdapters(nn.Module):
    """A module of adapters that are not those of peft; `disable_adapters` disables them too."""

    is_enabled = True

    def enable_adapters(self, enabled: bool) -> None:
        """Enable or disable all adapters of the module."""
        self.is_enabled = enabled


def add_adapters(model: Any, config: LoRAConfig, seed: int, vision: VisionConfig | None = None) -> None:
    """Freeze an HF model's weights and add adapters to its linear layers, in the model's dtype.

    Adapters are initialized as in peft, but only from `seed`, so they are equal on every rank.

    Raises:
        ModelError: `target_modules` names a module that is not a linear layer of this model, or the LoRA rank is larger
            than the size of every adapted layer.
    """
    # Inside another module peft does not recognize the family, and does not rename the experts' weights.
    inject_adapters(
        model, _find_targets(model, config.target_modules, vision), config, seed, is_wrapped=bool(find_experts(model))
    )


def inject_adapters(
    model: Any, targets: list[str] | str, config: LoRAConfig, seed: int, *, is_wrapped: bool = False
) -> None:
    """Freeze the weights of a module and add adapters to the linear layers that `targets` selects.

    Args:
        model: The module.
        targets: `target_modules` of peft.
        config: The configuration of the adapters.
        seed: The seed of the initial adapter weights.
        is_wrapped: Whether to wrap the module for peft, so that peft does not recognize the model family.

    Raises:
        ModelError: A target does not exist, or the rank is larger than the size of every adapted layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    widest = max((min(weight.shape) for weight in linear), default=config.rank)
    for key, rank in (("rank", config.rank), *(("rank_pattern", rank) for rank in config.rank_pattern.values())):
        if rank > widest:
            raise ModelError(
                f"model.lora.{key} must be <= {widest}, the largest possible rank for {type(model).__name__}, got "
                f"{rank}: lower model.lora.{key}, or remove model.lora to train all weights"
            )
    settings = LoraConfig(**build_peft_settings(config), target_modules=targets)
    dtype = next(model.parameters()).dtype
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*keys did not match")  # `_check_patterns` raises an error instead
            inject_adapter_in_model(settings, nn.ModuleDict({"of": model}) if is_wrapped else model, _ADAPTER_NAME)
    except ValueError as error:
        raise ModelError(f"model.lora.target_modules {config.target_modules!r} cannot be used here: {error}") from error
    # torch has one generator per process, which other roles use too; ranks must start with equal adapters.
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_meta:  # like the adapted weights, which are still in their files
                module._parameters[name] = parameter = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
            if ".lora_A." in path:
                # peft's default for A; B is 0, so the model is unchanged at first.
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
            parameter.data = parameter.data.to(dtype)
    _check_patterns(model, config)


def build_peft_settings(config: LoRAConfig) -> dict[str, Any]:
    """Return the arguments of peft's `LoraConfig` that describe the adapters, without their target modules."""
    return {
        "r": config.rank,
        "lora_alpha": config.alpha,  # peft only divides it, so it need not be an integer
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }


def _check_patterns(model: nn.Module, config: LoRAConfig) -> None:
    """Check that every pattern applies to an adapter.

    Raises:
        ModelError: A pattern does not match any layer that has an adapter.
    """
    layers = [name.removesuffix(".weight") for name in find_adapters(model)]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", layer) for layer in layers):
                names = sorted({layer.rpartition(".")[2] for layer in layers})
                raise ModelError(
                    f"model.lora.{key} has {shorten(pattern)}, which matches no layer with an adapter of "
                    f"{type(model).__name__}.{did_you_mean(pattern, names)} Such layers end in {', '.join(names)}"
                )


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of DoRA to the row norms of the frozen weights, so that the model is unchanged.

    Call it after the weights have been read or changed. Collective if a weight is sharded by its inputs.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        if _ADAPTER_NAME not in layer.lora_magnitude_vector:
            continue
        weight, magnitude = layer.get_base_layer().weight, layer.lora_magnitude_vector[_ADAPTER_NAME].weight
        if weight.is_meta:
            continue
        norms = _compute_row_norms(weight.detach(), transposed=bool(getattr(layer, "fan_in_fan_out", False)))
        if isinstance(magnitude, DTensor):
            assert isinstance(norms, DTensor), "adapters are sharded like their weights"
            magnitude.to_local().copy_(norms.redistribute(magnitude.device_mesh, magnitude.placements).to_local())
        else:
            magnitude.copy_(norms)


def _compute_row_norms(weight: Tensor, *, transposed: bool) -> Tensor:
    return torch.linalg.vector_norm(weight, dim=0 if transposed else 1)


def apply_loraplus(config: LoRAConfig | None, names: Iterable[str], factors: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rate factors of trained weights, by name, multiplied by the ratio of LoRA+.

    Args:
        config: The configuration of the adapters, if the model has adapters.
        names: The names of all trained weights.
        factors: The other factors; missing factors are 1.
    """
    combined = dict(factors)
    if config is not None and config.loraplus_lr_ratio != 1.0:
        for name in names:
            if ".lora_B." in name or ".lora_magnitude_vector." in name:
                combined[name] = combined.get(name, 1.0) * config.loraplus_lr_ratio
    return combined


def _find_targets(model: Any, target_modules: list[str] | str, vision: VisionConfig | None = None) -> list[str] | str:
    """Return the `target_modules` for peft: linear layers of the decoder.

    The embeddings have no adapters: the output embedding is computed in chunks from its weight and not called as a
    layer, and the input embedding is often tied to it. In a mixture of experts, routers and experts have no adapters
    either. Experts are stacked in one tensor, which peft would rename, so their adapters could not be merged.

    Raises:
        ModelError: A name does not match any linear layer of the decoder.
    """
    routers = find_routers(model)
    mixture = bool(routers) or bool(find_experts(model))
    some = mixture or (vision is not None and bool(vision.freeze))
    if target_modules == "all-linear" and not some:
        return target_modules
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    left = {head, *routers}
    layers = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m not in left]
    if vision is not None and vision.freeze:
        find_part = build_part_finder(model)
        layers = [layer for layer in layers if find_part(layer) not in vision.freeze]
    if target_modules == "all-linear":
        return layers
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    for name in target_modules:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            hint = did_you_mean(name, names)
            more = "; experts of a mixture cannot have adapters" if mixture else ""
            raise ModelError(
                f"model.lora.target_modules has {shorten(name)}, which is not a linear layer of {type(model).__name__}'"
                f"s decoder{more}.{hint} Choose from {', '.join(names)}, or use all-linear"
            )
    if not target_modules:
        raise ModelError(
            f"model.lora.target_modules is empty: choose from {', '.join(names)}, use all-linear, or "
            "remove model.lora to train all weights"
        )
    return (
        [layer for layer in layers if any(f".{layer}".endswith(f".{name}") for name in target_modules)]
        if some
        else target_modules
    )


@contextlib.contextmanager
def disable_adapters(model: Any, *, allow_missing: bool = False) -> Iterator[None]:
    """Disable the model's adapters within a `with` block.

    Args:
        model: A model with adapters.
        allow_missing: If True, this rank's pipeline stage may have no adapters.

    Raises:
        ValueError: The model has no adapters.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer | SwitchableAdapters)]
    if not layers and not allow_missing:
        raise ValueError("the model has no adapters to disable: load a separate reference model")
    for layer in layers:
        # Without its adapters the policy is the reference, so no second model is loaded.
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class AdapterScales:
    """Sets the factor of the outputs of a model's adapters.

    Args:
        model: The model, with the factors of its configuration.
    """

    def __init__(self, model: Any) -> None:
        from peft.tuners.lora import LoraLayer

        layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
        self._layers = [(layer, layer.scaling[_ADAPTER_NAME]) for layer in layers]

    def set(self, scale: float | None) -> None:
        """Set the factor of all layers; `None` means the factors of the configuration."""
        for layer, initial in self._layers:
            layer.scaling[_ADAPTER_NAME] = initial if scale is None else scale


def get_checkpoint_name(parameter_name: str) -> str:
    """Return a parameter's name in the HF checkpoint, without the `base_layer` that peft inserts."""
    return parameter_name.replace(".base_layer.", ".")


def find_adapters(model: Any) -> dict[str, Adapter]:
    """Return all adapters of a model, keyed by the checkpoint name of the adapted weight."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": Adapter(
            a=f"{name}.lora_A.{_ADAPTER_NAME}.weight",
            b=f"{name}.lora_B.{_ADAPTER_NAME}.weight",
            scale=float(layer.scaling[_ADAPTER_NAME]),
            transposed=bool(getattr(layer, "fan_in_fan_out", False)),
            magnitude=(
                f"{name}.lora_magnitude_vector.{_ADAPTER_NAME}.weight"
                if _ADAPTER_NAME in layer.lora_magnitude_vector
                else None
            ),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
