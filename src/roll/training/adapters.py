"""Several LoRA adapters of one base model in one trainer, each with its own weights, gradients and optimizer state.

The network contains one adapter. The states of the others are stored here and are swapped in when they are used.
Adapters are small, so a copy is cheap compared with a forward pass, and the rest of the trainer handles only one
adapter. With several ranks, each rank swaps its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from roll.training.optimizer import Optimizer, WeightState
from roll.training.precision import MasterWeights

__all__ = ["AdapterState", "AdapterStore", "Progress"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The training progress of one adapter."""

    num_steps: int = 0
    num_nonfinite: int = 0
    has_gradients: bool = False
    summed_loss: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterState:
    """The stored state of an adapter that is currently not in the network."""

    weights: Mapping[str, Tensor]
    """This rank's part of each trained weight, by name; weights without an entry are 0."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, WeightState] = field(default_factory=dict)
    """AdamW's moments and counts by name; empty for a new adapter."""
    progress: Progress = field(default_factory=Progress)
    scale: float | None = None
    """The factor of the adapter's output; `None` means that of the network's configuration."""


class AdapterStore:
    """Stores the adapters of one trainer rank, and swaps them in and out of the network.

    Args:
        masters: The trained weights of the network, in their initial state.
        optimizer: The optimizer of these weights.
        name: The name of the adapter in the network.
        set_scale: A function that sets the factor of the outputs of the network's adapters.
    """

    def __init__(
        self,
        masters: MasterWeights,
        optimizer: Optimizer,
        name: str,
        set_scale: Callable[[float | None], None] = lambda scale: None,
    ) -> None:
        self.current = name
        self._scale: float | None = None
        self._set_scale = set_scale
        self._masters = masters
        self._optimizer = optimizer
        # Initial weights are exact in the compute dtype and every B is 0: a quarter of the masters' memory is enough.
        initial = masters.copy_weights(masters.precision.compute)
        self._initial = {name: weight for name, weight in initial.items() if ".lora_B." not in name}
        self._inactive: dict[str, AdapterState] = {}

    def activate(self, name: str, progress: Progress) -> Progress:
        """Put an adapter into the network; a new adapter starts with the initial weights.

        Args:
            name: The name of the adapter.
            progress: The progress of the adapter that is currently in the network.

        Returns:
            The progress of the adapter that is in the network afterwards.
        """
        if name == self.current:
            return progress
        self._inactive[self.current] = AdapterState(
            weights=self._masters.copy_weights(),
            gradients=self._masters.pop_gradients(),
            optimizer=self._optimizer.pop_states(),
            progress=progress,
            scale=self._scale,
        )
        state = self._inactive.pop(name, None) or AdapterState(weights=self._initial)
        self._masters.put_weights(state.weights)
        self._masters.put_gradients(state.gradients)
        self._optimizer.put_states(state.optimizer)
        if state.scale != self._scale:
            self._set_scale(state.scale)
        self.current, self._scale = name, state.scale
        return state.progress

    def put(self, name: str, state: AdapterState) -> None:
        """Store the state of an adapter, which must not be in the network; replace the state that it has."""
        assert name != self.current
        self._inactive[name] = state

    def delete(self, name: str) -> None:
        """Delete an adapter, which must not be in the network."""
        assert name != self.current
        self._inactive.pop(name, None)
