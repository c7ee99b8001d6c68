"""Offload and onload a rank's states, to free device memory for another role between phases.

parameters    the network: all that a forward pass and a weight sync need
optimizer     all that only updates need: master weights that are separate from the network, AdamW's moments, and
              gradients, which are freed, because they are not needed between two steps
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import nn

from roll.protocols import StateKind
from roll.training.optimizer import Optimizer
from roll.training.precision import MasterWeights

__all__ = ["StateOffloader", "are_on_host"]

logger = logging.getLogger(__name__)


def are_on_host(states: Collection[StateKind], device: torch.device) -> bool:
    """Return whether the device is a CPU, so that states are already in host memory; log a message in this case."""
    if device.type == "cpu":
        logger.debug("nothing to offload: %s are in host memory already", ", ".join(states))
    return device.type == "cpu"


class StateOffloader:
    """Moves a rank's states between its device and host memory."""

    def __init__(self, network: nn.Module, masters: MasterWeights, optimizer: Optimizer, device: torch.device) -> None:
        self._network = network
        self._masters = masters
        self._optimizer = optimizer
        self._device = device

    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to host memory, and wait until the device memory is free."""
        if not are_on_host(states, self._device):
            if "optimizer" in states:
                self._masters.clear_grads()
            self._move(states, torch.device("cpu"))
            # Engines are other processes, which cannot use memory that the allocator of this process caches.
            torch.get_device_module(self._device).empty_cache()

    def onload(self, states: Collection[StateKind]) -> None:
        """Move states back to the device; states that are already there stay."""
        if self._device.type != "cpu":
            self._move(states, self._device)

    def _move(self, states: Collection[StateKind], device: torch.device) -> None:
        if "optimizer" in states and not self._masters.is_offloaded:
            self._masters.move(device)
            self._optimizer.move_moments(device)
        if "parameters" in states:
            self._network.to(device)
        # Moved parameters have new storages, so the optimizer must be bound to them again.
        self._optimizer.bind()
