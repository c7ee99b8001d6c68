"""Offloading of ZeRO's states to host memory, and onloading.

    parameters    the network's weights                         DeepSpeed moves them
    optimizer     gradients and their buffer                    DeepSpeed moves them
                  masters and AdamW's moments    stages 1, 2    DeepSpeed moves them
                                                 stage 3        moved here: DeepSpeed supports only its own AdamW

DeepSpeed onloads all offloaded states at once. States that must stay offloaded are hidden from it meanwhile. Otherwise
the optimizer's states would be onloaded together with the weights for a weight sync, and stay on the device while
engines generate.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from roll.protocols import StateKind
from roll.training.deepspeed.zero_weights import ZeroWeights

__all__ = ["StateOffload"]


class StateOffload:
    """The states of a trained role at stages 1 to 3.

    Args:
        engine: DeepSpeed's engine.
        spread: The engine's weights and states.
        moves_states: Whether masters and moments are moved here; false where DeepSpeed keeps them in host memory.
    """

    def __init__(self, engine: Any, spread: ZeroWeights, *, moves_states: bool) -> None:
        self._engine = engine
        self._spread = spread
        self._moves_states = moves_states

    def offload(self, states: Collection[StateKind]) -> None:
        """Offload states to host memory."""
        self._engine.offload_states(include=self._kinds(states))
        if "optimizer" in states and self._moves_states:
            self._spread.move_states(torch.device("cpu"))

    def onload(self, states: Collection[StateKind], device: torch.device) -> None:
        """Onload states to the device; states that are already there stay."""
        zero, wanted = self._engine.optimizer, self._kinds(states)
        others = {kind for kind in zero.offloaded_states if kind not in wanted}
        zero.offloaded_states -= others
        try:
            self._engine.reload_states()
        finally:
            zero.offloaded_states |= others
        if "optimizer" in states and self._moves_states:
            self._spread.move_states(device)

    def _kinds(self, states: Collection[StateKind]) -> list[Any]:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        kinds = [Kind.lp_params] if "parameters" in states else []
        if "optimizer" in states:
            kinds += [Kind.lp_grads, Kind.contiguous_grad_buffer]
            kinds += [] if self._moves_states else [Kind.optim_states, Kind.hp_params]
        return kinds
