"""The optimizer: AdamW over each rank's shard of the master weights, with gradient clipping by the global norm.

By default PyTorch's AdamW updates all weights. With `training.optimizer` set to `adamw_8bit`, large weights have 8-bit
moments instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from roll.config.training import TrainingConfig
from roll.models.transfers import move_to_device
from roll.training.distributed import Ranks
from roll.training.memory.adamw_8bit import AdamWConstants, create_moments, is_stored_in_8_bits, update
from roll.training.precision import MasterWeights
from roll.types import OptimParams

__all__ = ["Optimizer", "WeightState"]

DEFAULT_PARAMS = OptimParams()

_STATE_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
"""PyTorch's names of the moments, by their names in checkpoints."""


class WeightState(NamedTuple):
    """AdamW's state for one weight: this rank's part of the moments, and the number of updates."""

    moments: Mapping[str, Tensor]
    num_updates: int


class Optimizer:
    """AdamW with decoupled weight decay (arXiv 1711.05101) for matrices only; norms and biases have no weight decay.

    It works on local tensors: AdamW is element-wise, so shards are independent except for the gradient norm. Weights
    are updated in the memory in which they are stored. Offloaded weights are updated on the host; only gradients and
    new weights are transferred then, never master weights and moments.

    Args:
        weights: The trained weights.
        config: The training configuration, with AdamW's hyperparameters.
        ranks: The ranks that share the weights.
        factors: Learning rate factors of some weights, by name.
    """

    def __init__(
        self, weights: MasterWeights, config: TrainingConfig, ranks: Ranks, factors: Mapping[str, float] | None = None
    ) -> None:
        self._factors = dict(factors or {})
        self._weights = weights
        self._config = config
        self._ranks = ranks
        self._locals: dict[str, nn.Parameter] = {}
        self._adamw: torch.optim.AdamW
        in_8_bits = config.optimizer == "adamw_8bit"
        self._num_8bit_updates = {
            n: 0 for n, p in weights.parameters.items() if in_8_bits and is_stored_in_8_bits(p.shape)
        }
        """The number of updates of each weight with 8-bit moments, by name."""
        self._moments_8bit: dict[str, Mapping[str, Tensor]] = {}
        self.bind()

    def bind(self) -> None:
        """Build AdamW for this rank's current tensors and its current state. Call this method again after weights have
        moved.
        """
        moments = dict(self.get_moments()) if self._locals else {}
        steps = self.get_steps() if self._locals else {}
        self._locals = {n: nn.Parameter(self._weights.get_local(n)) for n in self._weights.parameters}
        config = self._config
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
        self._moments_8bit = {n: moments.get(n) or create_moments(self._locals[n]) for n in self._num_8bit_updates}
        for name, parameter in self._locals.items():
            if name not in self._num_8bit_updates:
                key = (self._is_decayed(name), self._factors.get(name, 1.0))
                groups.setdefault(key, []).append(parameter)
        self._adamw = torch.optim.AdamW(
            [{"params": own, "decays": decays, "factor": factor} for (decays, factor), own in groups.items()]
            or [{"params": [], "decays": False, "factor": 1.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        for name, parameter in self._locals.items():
            if name not in self._num_8bit_updates:
                # AdamW creates its state at the first step, but a checkpoint may be loaded or moved before.
                own = moments.get(name) or {label: torch.zeros_like(parameter) for label in _STATE_NAMES}
                self._adamw.state[parameter] = {
                    "step": torch.tensor(float(steps.get(name, 0)), device=parameter.device),
                    **{key: own[label].detach() for label, key in _STATE_NAMES.items()},
                }

    def _is_decayed(self, name: str) -> bool:
        return self._weights.parameters[name].ndim > 1

    @torch.no_grad()
    def compute_grad_norm(self) -> float:
        """Return the global norm of the gradients; it is not finite if any gradient is not finite."""
        grads: dict[bool, list[Tensor]] = {True: [], False: []}
        for name in self._locals:
            # A tied weight has the same gradient in two pipeline stages and counts once.
            if (grad := self._weights.get_grad(name)) is not None and name not in self._weights.copies:
                grads[self._weights.is_model_parallel(name)].append(grad)
        squares = (_sum_squares(grads[divided], self._ranks.device) for divided in (True, False))
        return math.sqrt(self._ranks.sum(*squares))

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, params: OptimParams = DEFAULT_PARAMS) -> None:
        """Clip the gradients to `max_grad_norm`, update the weights, and copy them into the network.

        Args:
            learning_rate: The learning rate of this update.
            grad_norm: The norm of the gradients.
            params: Settings that override the configuration for this update.
        """
        constants = self._build_constants(learning_rate, params)
        max_norm = self._config.max_grad_norm if params.max_grad_norm is None else params.max_grad_norm
        for name, parameter in self._locals.items():
            parameter.grad = self._weights.get_grad(name)
        if grad_norm > max_norm:
            grads = [p.grad for p in self._locals.values() if p.grad is not None]
            torch._foreach_mul_(grads, max_norm / grad_norm)
        for group in self._adamw.param_groups:
            group.update(
                lr=learning_rate * group["factor"],
                betas=(constants.beta1, constants.beta2),
                eps=constants.epsilon,
                weight_decay=constants.weight_decay if group["decays"] else 0.0,
            )
        self._adamw.step()
        for name in self._num_8bit_updates:
            self._step_8bit(name, constants)
        for parameter in self._locals.values():
            # `MasterWeights` owns the gradients.
            parameter.grad = None
        self._weights.refresh()

    def _build_constants(self, learning_rate: float, params: OptimParams) -> AdamWConstants:
        config = self._config
        return AdamWConstants(
            learning_rate=learning_rate,
            beta1=config.beta1 if params.beta1 is None else params.beta1,
            beta2=config.beta2 if params.beta2 is None else params.beta2,
            epsilon=config.epsilon if params.epsilon is None else params.epsilon,
            weight_decay=config.weight_decay if params.weight_decay is None else params.weight_decay,
        )

    def _step_8bit(self, name: str, constants: AdamWConstants) -> None:
        parameter = self._locals[name]
        if parameter.grad is None:
            return
        self._num_8bit_updates[name] += 1
        own = replace(
            constants,
            learning_rate=constants.learning_rate * self._factors.get(name, 1.0),
            weight_decay=constants.weight_decay if self._is_decayed(name) else 0.0,
        )
        update(parameter.detach(), parameter.grad, self._moments_8bit[name], self._num_8bit_updates[name], own)

    def get_moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return this rank's part of AdamW's moments, by weight and then by the moment's name in checkpoints."""
        moments: dict[str, Mapping[str, Tensor]] = {}
        for name, parameter in self._locals.items():
            state = self._adamw.state.get(parameter, {})
            whole = {label: state[key] for label, key in _STATE_NAMES.items() if state}
            moments[name] = whole or self._moments_8bit[name]
        return moments

    def get_steps(self) -> dict[str, int]:
        """Return the number of updates of each weight."""
        whole = {
            n: int(self._adamw.state[p]["step"]) for n, p in self._locals.items() if n not in self._num_8bit_updates
        }
        return whole | self._num_8bit_updates

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Restore the counts that `get_steps` returned when the moments were saved."""
        for name, parameter in self._locals.items():
            if name in self._num_8bit_updates:
                self._num_8bit_updates[name] = steps[name]
            else:
                self._adamw.state[parameter]["step"].fill_(float(steps[name]))

    def pop_states(self) -> dict[str, WeightState]:
        """Return the state of every weight, by name. Call `put_states` afterwards.

        The tensors are not copied: updates of the weights change the tensors until `put_states` replaces them.
        """
        moments, steps = self.get_moments(), self.get_steps()
        return {name: WeightState(moments[name], steps[name]) for name in self._locals}

    def put_states(self, states: Mapping[str, WeightState]) -> None:
        """Replace the states of all weights; missing weights get a fresh state."""
        for name, parameter in self._locals.items():
            if name in self._num_8bit_updates:
                moments, self._num_8bit_updates[name] = states.get(name) or WeightState(create_moments(parameter), 0)
                self._moments_8bit[name] = moments
                continue
            moments, num_updates = states.get(name) or WeightState(
                {k: torch.zeros_like(parameter) for k in _STATE_NAMES}, 0
            )
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(num_updates), device=parameter.device),
                **{key: moments[label].detach() for label, key in _STATE_NAMES.items()},
            }

    def move_moments(self, device: torch.device) -> None:
        """Move AdamW's moments to a device."""
        for name, parameter in self._locals.items():
            if name in self._num_8bit_updates:
                self._moments_8bit[name] = {k: part.to(device) for k, part in self._moments_8bit[name].items()}
            else:
                state = self._adamw.state[parameter]
                state.update({key: state[key].to(device) for key in _STATE_NAMES.values()})


def _sum_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, on `device`; the gradients of an offloaded optimizer are on the
    host.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In float64: the sum of many squares would lose small ones.
    total = torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    return total if total.device == device else move_to_device(total, device)
