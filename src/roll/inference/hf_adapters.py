"""LoRA adapters of the `hf` engine: several adapters on one model, each row of a batch with its own.

A hook adds an adapter's product to the output of its layer, with the same operations in the same order as peft, so
engine and trainer compute the same numbers. The model's own weights never change. In a batch with several adapters, a
layer computes all rows with each adapter and selects the right ones. The bits of a row then do not depend on the other
rows, and rows without an adapter keep the output of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll.config.model import LoRAConfig
from roll.errors import WeightSyncError
from roll.models import find_adapted_layers
from roll.types import WeightUpdate
from roll.weights import compute_checksum, open_update
from roll.weights.adapters import ADAPTER_PARTS, check_adapter_finite, check_adapter_manifest, name_adapter_tensor

__all__ = ["AdapterSet"]


@dataclass(frozen=True, slots=True)
class _LayerAdapter:
    """The adapter of one layer."""

    a: Tensor
    b: Tensor
    scale: float
    row_factors: Tensor | None = None
    """With DoRA, the factors [outputs] that give the rows of the merged weight their trained norms."""

    def apply(self, x: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output with the adapter, from its input and its output without the adapter."""
        product = functional.linear(functional.linear(x, self.a), self.b)
        if self.row_factors is None:
            return output + product * self.scale
        without_bias = output if bias is None else output - bias
        return output + ((self.row_factors - 1) * without_bias + self.row_factors * product * self.scale)


class AdapterSet:
    """The adapters of a model, by name; the policy's adapter has the name `None`.

    Args:
        model: The model, whose layers get hooks.
        config: The configuration of all adapters.
        max_adapters: The maximum number of adapters.
    """

    def __init__(self, model: Any, config: LoRAConfig, max_adapters: int) -> None:
        self.versions: dict[str | None, int] = {}
        """The policy version of each adapter."""
        self._model = model
        self._config = config
        self._max_adapters = max_adapters
        self._shapes = find_adapted_layers(model, config.target_modules)
        self._adapters: dict[str | None, Mapping[str, _LayerAdapter]] = {}
        self._rows: Sequence[str | None] = (None,)
        for layer in self._shapes:
            model.get_submodule(layer).register_forward_hook(partial(self._add_product, layer))

    def __contains__(self, name: object) -> bool:
        return name in self.versions

    @contextmanager
    def use(self, rows: Sequence[str | None]) -> Iterator[None]:
        """Use the adapters `rows`, one per token of a flat input, or a single one for all tokens, in a `with` block."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    @torch.no_grad()
    def update(self, update: WeightUpdate) -> Mapping[str, int]:
        """Receive an adapter, which replaces the adapter of the same name, and verify the stored tensors.

        Returns:
            The checksum of the received bytes, by tensor name.

        Raises:
            WeightSyncError: A tensor is missing, unknown or not finite, or has the wrong shape, or there are too many
                adapters.
        """
        if update.adapter not in self._adapters and len(self._adapters) >= self._max_adapters:
            raise WeightSyncError(
                f"adapter '{update.adapter}' cannot be added: the engine has {len(self._adapters)} adapters, its "
                f"maximum (EngineSpec.max_adapters is {self._max_adapters})."
            )
        check_adapter_manifest(update.manifest, self._shapes, self._config, policy_version=update.policy_version)
        dtype, device = self._model.dtype, self._model.device
        with open_update(update, device=device) as receiver:
            stored = {name: tensor.to(device, dtype, copy=True) for name, tensor in receiver}
        check_adapter_finite(stored, policy_version=update.policy_version)
        for spec in update.manifest:
            is_same_dtype = spec.dtype == str(dtype).removeprefix("torch.")
            if is_same_dtype and compute_checksum(stored[spec.name]) != receiver.checksums[spec.name]:
                raise WeightSyncError(
                    f"adapter tensor '{spec.name}' of policy version {update.policy_version} was received, but the "
                    "engine contains different values."
                )
        self._adapters[update.adapter] = {layer: self._build_layer(layer, stored) for layer in self._shapes}
        self.versions[update.adapter] = update.policy_version
        return dict(receiver.checksums)

    def _build_layer(self, layer: str, tensors: Mapping[str, Tensor]) -> _LayerAdapter:
        a, b, magnitude = (tensors.get(name_adapter_tensor(layer, part)) for part in ADAPTER_PARTS)
        assert a is not None and b is not None, "the manifest was checked"
        scale = self._config.compute_scale(layer)
        if magnitude is None:
            return _LayerAdapter(a, b, scale)
        module: Any = self._model.get_submodule(layer)
        weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
        # The norms in the model's dtype, as peft computes them in the trainer's forward pass.
        norms = torch.linalg.vector_norm(weight + scale * (b @ a), dim=1)
        return _LayerAdapter(a, b, scale, magnitude / norms)

    def _add_product(self, layer: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, bias = inputs[0], getattr(module, "bias", None)
        names = set(self._rows)
        if len(names) == 1:
            adapter = self._adapters.get(next(iter(names)))
            return output if adapter is None else adapter[layer].apply(x, output, bias)
        result = output
        for name in names:
            adapter = self._adapters.get(name)
            if adapter is not None:
                mask = torch.tensor([row == name for row in self._rows], device=output.device)
                result = torch.where(mask[:, None], adapter[layer].apply(x, output, bias), result)
        return result
