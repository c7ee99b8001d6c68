"""AdamW over each rank's part of the master weights, with clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from roll.config.training import TrainingConfig
from roll.training.distributed import Ranks
from roll.training.precision import MasterWeights

__all__ = ["Optimizer"]


class Optimizer:
    """Decoupled weight decay (arXiv 1711.05101), on matrices alone: norms and biases are never decayed.

    Args:
        weights: that are trained.
        config: AdamW's constants.
        ranks: who share them.
        factors: of some weights, by name, on the learning rate.

    Works on local tensors: AdamW is element-wise, so shards need no knowledge of each other but the gradient
    norm.
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
        self.bind()

    def bind(self) -> None:
        """Take hold of this rank's tensors; again after the weights have been moved to another device."""
        moments = dict(self.moments()) if self._locals else {}
        steps = self.steps() if self._locals else {}
        self._locals = {n: nn.Parameter(self._weights.local(n)) for n in self._weights.parameters}
        config = self._config
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self._locals.items():
            decay = config.weight_decay if self._weights.parameters[name].ndim > 1 else 0.0
            groups.setdefault((decay, self._factors.get(name, 1.0)), []).append(parameter)
        self._adamw = torch.optim.AdamW(
            [{"params": own, "weight_decay": decay, "factor": factor} for (decay, factor), own in groups.items()]
            or [{"params": [], "factor": 1.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        for name, parameter in self._locals.items():
            first, second = moments.get(name) or (torch.zeros_like(parameter), torch.zeros_like(parameter))
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(steps.get(name, 0)), device=parameter.device),
                "exp_avg": first.detach(),
                "exp_avg_sq": second.detach(),
            }

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Global norm of the gradients; not finite where any gradient is not."""
        grads: dict[bool, list[Tensor]] = {True: [], False: []}
        for name in self._locals:
            if (grad := self._weights.grad(name)) is not None and name not in self._weights.copies:
                grads[self._weights.is_divided(name)].append(grad)
        return math.sqrt(self._ranks.sum(_squares(grads[True]), _squares(grads[False])))

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm`, update, and write the new weights into the network."""
        for name, parameter in self._locals.items():
            parameter.grad = self._weights.grad(name)
        if grad_norm > self._config.max_grad_norm:
            grads = [p.grad for p in self._locals.values() if p.grad is not None]
            torch._foreach_mul_(grads, self._config.max_grad_norm / grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["factor"]
        self._adamw.step()
        for parameter in self._locals.values():
            parameter.grad = None
        self._weights.refresh()

    def moments(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """By weight, this rank's part of AdamW's first and second moment; 0 before the first step."""
        states = {name: self._adamw.state[parameter] for name, parameter in self._locals.items()}
        return {name: (state["exp_avg"], state["exp_avg_sq"]) for name, state in states.items()}

    def steps(self) -> dict[str, int]:
        """By weight, how often it was updated."""
        return {name: int(self._adamw.state[parameter]["step"]) for name, parameter in self._locals.items()}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """What `steps` returned when the moments were saved."""
        for name, parameter in self._locals.items():
            self._adamw.state[parameter]["step"].fill_(float(steps[name]))

    def move_moments(self, device: torch.device) -> None:
        """Bring AdamW's moments to a device."""
        for parameter in self._locals.values():
            state = self._adamw.state[parameter]
            state["exp_avg"], state["exp_avg_sq"] = (
                state["exp_avg"].to(device),
                state["exp_avg_sq"].to(device),
            )


def _squares(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
