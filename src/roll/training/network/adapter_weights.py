"""The trainer's side of a weight sync that sends only the LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from roll.training.network.lora import Adapter
from roll.training.network.weights import gather_weight
from roll.weights.adapters import ADAPTER_PARTS, name_adapter_tensor

__all__ = ["AdapterWeights"]


class AdapterWeights:
    """The tensors of the current adapter as a re-iterable stream. See `roll.protocols.WeightSource`.

    Names are those of `roll.weights.adapters`. Engines multiply the matrices themselves, so nothing is merged, and the
    scale is not part of the tensors.

    Args:
        adapters: The adapters, by the name of the adapted weight.
        read: A function that takes a parameter's name and returns the parameter, on rank 0. Collective where parameters
            are sharded.
        dtype: The dtype of the engines.
        is_first: True on rank 0. Iteration is collective; other ranks receive `None` for every tensor.
    """

    def __init__(
        self, adapters: Mapping[str, Adapter], read: Callable[[str], Tensor], dtype: torch.dtype, *, is_first: bool
    ) -> None:
        self._parameters = {
            name_adapter_tensor(weight.removesuffix(".weight"), part): parameter
            for weight, adapter in adapters.items()
            for part, parameter in zip(ADAPTER_PARTS, adapter.parameters, strict=False)
        }
        self._read = read
        self._dtype = dtype
        self._is_first = is_first

    def names(self) -> Sequence[str]:
        """Return all names, in the order of iteration."""
        return list(self._parameters)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            tensor = gather_weight(self._read(parameter)).to(self._dtype)
            yield name, tensor.contiguous() if self._is_first else None  # type: ignore[misc]
