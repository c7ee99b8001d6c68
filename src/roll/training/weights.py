"""The weights that engines must hold, as a stream: HF names, engine's dtype, adapters merged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll.training.lora import Adapter, checkpoint_name

__all__ = ["TrainerWeights", "whole"]

# It warns that gathering what is sharded twice takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class TrainerWeights:
    """Re-iterable; every iteration reads the weights as they are then. See `roll.protocols.WeightSource`.

    A yielded tensor may be the trainer's own: use it before the next optimiser step, and do not write to it.

    Args:
        names: of the model's parameters, tied ones once, in order.
        read: a parameter as the optimiser sees it; a DTensor under FSDP.
        adapters: by checkpoint name, what is merged into a weight.
        dtype: of the engines.
        is_first: whether this is rank 0. Iterating is collective; other ranks get `None`s.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        read: Callable[[str], Tensor],
        adapters: Mapping[str, Adapter],
        dtype: torch.dtype,
        is_first: bool,
    ) -> None:
        parts = {part for adapter in adapters.values() for part in (adapter.a, adapter.b)}
        self._parameters = {checkpoint_name(name): name for name in names if name not in parts}
        self._read = read
        self._adapters = adapters
        self._dtype = dtype
        self._is_first = is_first

    def names(self) -> Sequence[str]:
        """All names in the HF checkpoint, in the order of iteration."""
        return list(self._parameters)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, self._tensor(name, parameter)  # type: ignore[misc]

    @torch.no_grad()
    def _tensor(self, name: str, parameter: str) -> Tensor | None:
        weight = whole(self._read(parameter))
        adapter = self._adapters.get(name)
        if adapter is not None:
            weight = adapter.merged(weight, whole(self._read(adapter.a)), whole(self._read(adapter.b)))
        return weight.to(self._dtype) if self._is_first else None


def whole(weight: Tensor) -> Tensor:
    """A parameter gathered from its shards, without its gradient. Collective where it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
