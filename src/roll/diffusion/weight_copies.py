"""Copies of a network's weights: the initial weights (reference), and a moving average of the policy (old).

    keep(name)            trained weights of this rank ─ copy ─► float32, on their device
    move(name, decay)     copy <- decay copy + (1 - decay) current
    activate(name)        copy ─► network  ─ passes without gradients ─►  current weights ─► network

With LoRA a copy contains only the adapters. Current weights are restored bitwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["WeightCopies"]


class WeightCopies:
    """Copies of one rank's trained weights, by name.

    Args:
        tensors: The trained parameters of the network; DTensor shards under FSDP.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._copies: dict[str, dict[str, Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def get_tensors(self, name: str) -> list[Tensor]:
        """Return a copy's tensors for checkpoints, in the order of parameters; empty if the copy does not exist."""
        return list(self._copies.get(name, {}).values())

    @torch.no_grad()
    def store(self, name: str) -> None:
        """Store a copy of the current weights under `name`."""
        # Sharded as the parameters are, so that a checkpoint has the parts of all ranks.
        self._copies[name] = {key: t.detach().clone().to(torch.float32) for key, t in self._tensors.items()}

    @torch.no_grad()
    def update_ema(self, name: str, decay: float) -> None:
        """Update a copy: copy <- decay copy + (1 - decay) current weights."""
        for key, copy in self._copies[name].items():
            _get_local(copy).lerp_(_get_local(self._tensors[key]).to(torch.float32), 1.0 - decay)

    @contextlib.contextmanager
    def activate(self, name: str) -> Iterator[None]:
        """Use the weights of a copy within the `with` block, which must not compute gradients.

        Raises:
            ValueError: The copy does not exist.
        """
        if name not in self._copies:
            raise ValueError(f"unknown weights '{name}'; expected one of {sorted(self._copies)}")
        current = {key: _get_local(t).clone() for key, t in self._tensors.items()}
        try:
            self._write(self._copies[name])
            yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, source: Mapping[str, Tensor]) -> None:
        for key, tensor in self._tensors.items():
            _get_local(tensor).copy_(_get_local(source[key]))


def _get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares memory with the tensor."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
