"""One rank whose weights torch updates: master weights, AdamW and checkpoints of a network of any kind.

network ─ trained parameters ─► master weights ─► AdamW ─► network
                                     └─► checkpoint (DCP), optionally in the background
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from roll.protocols import StateKind
from roll.training.checkpoint.state import collect_state, load_state, write_entries
from roll.training.checkpoint.writer import StateWriter
from roll.training.memory.host_memory import HostMemory
from roll.training.network.lora import apply_loraplus
from roll.training.offload import StateOffloader
from roll.training.optimizer import Optimizer
from roll.training.precision import MasterWeights, Precision
from roll.training.rank import B, L, TrainerRank
from roll.types import OptimParams

__all__ = ["TorchRank"]


class TorchRank(TrainerRank[B, L]):
    """A rank that updates its weights with `MasterWeights` and `Optimizer`; several ranks shard the weights with FSDP2.

    A subclass builds its network, and then calls `_prepare_updates`.
    """

    precision: Precision
    masters: MasterWeights
    optimizer: Optimizer

    def _prepare_updates(
        self,
        parameters: Mapping[str, nn.Parameter],
        factors: Mapping[str, float] | None = None,
        copies: Collection[str] = (),
    ) -> None:
        """Create the master weights and the optimizer of the built network.

        Args:
            parameters: The parameters to train, by name.
            factors: Factors on the learning rate of some parameters, by name.
            copies: The names of tied parameters whose gradients another pipeline stage includes in the gradient norm.
        """
        memory = HostMemory(self.device) if self.spec.training.offload_optimizer else None
        self.masters = MasterWeights(dict(parameters), self.precision, copies, memory)
        combined = apply_loraplus(self.spec.model.lora, parameters, factors or {})
        self.optimizer = Optimizer(self.masters, self.spec.training, self.ranks, combined)
        self._state_offloader = StateOffloader(self.network, self.masters, self.optimizer, self.device)
        self._writer = StateWriter(self.ranks)

    def save(self, path: Path, *, background: bool = False) -> None:
        # The previous background write must end first: its threads use the same process group.
        self._writer.finish()
        state = collect_state(
            self.masters, self.optimizer, self._get_counters(), self.ranks, self._random_states, self._saved_buffers
        )
        if background:
            self._writer.begin(path, state)
        else:
            write_entries(path, state, self.ranks)

    def is_save_written(self, *, wait: bool) -> bool:
        """Return whether the last save is on disk; if `wait` is true, wait until it is.

        Raises:
            CheckpointError: a background write failed. The error is raised only once.
        """
        if wait or self._writer.is_done:
            self._writer.finish()
        return self._writer.is_done

    def offload(self, states: Collection[StateKind]) -> None:
        if "optimizer" in states:
            self._has_gradients, self._summed_loss = False, 0.0
        self._state_offloader.offload(states)

    def onload(self, states: Collection[StateKind]) -> None:
        self._state_offloader.onload(states)

    @property
    def _saved_buffers(self) -> list[Tensor]:
        """Tensors that are part of a checkpoint, but not trained by gradients."""
        return []

    def _load(self, path: Path) -> dict[str, int]:
        parts = self.masters, self.optimizer, self._get_counters(), self.ranks, self._random_states
        return load_state(path, *parts, self.spec.seed, self._saved_buffers)

    def _clear_grads(self) -> None:
        self.masters.clear_grads()

    def _check_params(self, params: OptimParams, scale: float) -> None:
        """Accept all values, because torch can change every setting between two updates."""

    def _scale_grads(self, scale: float) -> None:
        self.masters.scale_grads(scale)

    def _compute_grad_norm(self) -> float:
        return self.optimizer.compute_grad_norm()

    def _step_optimizer(self, learning_rate: float, grad_norm: float, params: OptimParams) -> None:
        self.optimizer.step(learning_rate, grad_norm, params)
