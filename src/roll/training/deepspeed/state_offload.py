"""Offload ZeRO's states to host memory, and onload them.

    parameters    the network's weights                         DeepSpeed moves them
    optimizer     gradients and their buffer                    DeepSpeed moves them
                  masters and AdamW's moments    stages 1, 2    DeepSpeed moves them
                                                 stage 3        moved here: DeepSpeed supports only its AdamW

DeepSpeed onloads all offloaded states at once, so states that must stay offloaded are hidden from DeepSpeed. Otherwise
the optimizer's states would be onloaded together with the weights for a weight sync, and stay on the device while
engines generate.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from roll.protocols import StateKind
from roll.training.deepspeed.zero_weights import ZeroWeights

__all__ = ["ZeroStateOffloader"]


class ZeroStateOffloader:
    """Moves a role's training states between its device and host memory, at ZeRO stages 1 to 3.

    Args:
        engine: DeepSpeed's engine.
        weights: The engine's weights and states.
        moves_states: True if this class moves master weights and moments itself; if False, DeepSpeed moves them.
    """

    def __init__(self, engine: Any, weights: ZeroWeights, *, moves_states: bool) -> None:
        self._engine = engine
        self._weights = weights
        self._moves_states = moves_states

    def offload(self, states: Collection[StateKind]) -> None:
        """Move states to host memory."""
        self._engine.offload_states(include=self._select_kinds(states))
        if "optimizer" in states and self._moves_states:
            self._weights.move_states(torch.device("cpu"))

    def onload(self, states: Collection[StateKind], device: torch.device) -> None:
        """Move states back to the device; do nothing for states that are already there."""
        zero, wanted = self._engine.optimizer, self._select_kinds(states)
        # `reload_states` onloads everything that is registered as offloaded.
        others = {kind for kind in zero.offloaded_states if kind not in wanted}
        zero.offloaded_states -= others
        try:
            self._engine.reload_states()
        finally:
            zero.offloaded_states |= others
        if "optimizer" in states and self._moves_states:
            self._weights.move_states(device)

    def _select_kinds(self, states: Collection[StateKind]) -> list[Any]:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        kinds = [Kind.lp_params] if "parameters" in states else []
        if "optimizer" in states:
            kinds += [Kind.lp_grads, Kind.contiguous_grad_buffer]
            kinds += [] if self._moves_states else [Kind.optim_states, Kind.hp_params]
        return kinds
