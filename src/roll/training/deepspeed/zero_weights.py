"""Read and write ZeRO's weights and AdamW states, one full weight at a time, by name.

    stage 0        every rank has everything
    stages 1, 2    full weights on every rank; float32 masters and states in one flat partition per rank
    stage 3        weights are partitioned as well

Reading and writing are collective at every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZeroWeights", "gather_parameter"]

_STATE_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
"""PyTorch's names of AdamW's moments, by their names in checkpoints."""


class ZeroWeights:
    """Reads and writes a DeepSpeed engine's trained weights and AdamW moments as full tensors, by name.

    Args:
        engine: The engine, with an optimizer.
        trainable: The network's trainable parameters, by name.
        stage: The ZeRO stage.
        rank: This rank.
    """

    def __init__(self, engine: Any, trainable: Mapping[str, nn.Parameter], stage: int, rank: int) -> None:
        self.parameters = dict(trainable)
        self._engine = engine
        self._stage = stage
        self._rank = rank
        if stage == 0:
            self._adamw, self._flat = engine.optimizer, list(self.parameters.values())
        else:
            zero = engine.optimizer
            self._adamw = zero.optimizer
            own = [p for group in self._adamw.param_groups for p in group["params"]]
            self._flat = list(zero.fp32_partitioned_groups_flat) if stage == 3 else own
        for part in self._flat:  # AdamW does this at its first step, but a checkpoint may be loaded before
            self._adamw.state[part] = {
                "step": torch.tensor(0.0, device=part.device),
                "exp_avg": torch.zeros_like(part, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(part, requires_grad=False),
            }
        if stage in (1, 2):
            # Links the moments to the parameters, as the first step would; reading the moments by parameter requires
            # it.
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def names(self) -> list[str]:
        """The names of all trained weights, in the order of the network."""
        return list(self.parameters)

    @property
    def num_updates(self) -> int:
        """The number of AdamW updates, the same for all weights."""
        return int(next(iter(self._iter_steps())))

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for step in self._iter_steps():
            step.fill_(float(number))

    def get_shape(self, name: str) -> torch.Size:
        """Return the shape of the full weight."""
        parameter = self.parameters[name]
        return getattr(parameter, "ds_shape", parameter.shape)

    def read_full(self, name: str, state: str | None = None) -> Tensor:
        """Return a full master weight, or one of its AdamW moments if `state` is `moment1` or `moment2`."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if self._stage == 0:
            return parameter.detach() if state is None else self._adamw.state[parameter][_STATE_NAMES[state]]
        if state is None:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, _STATE_NAMES[state])

    @torch.no_grad()
    def write(self, name: str, value: Tensor, state: str | None = None) -> None:
        """Set a full master weight, or one of its moments if `state` is given, in the layout that `read_full` returns.

        Call `refresh` once after the last write.
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self.parameters[name]
        if self._stage == 0:
            self.read_full(name, state).copy_(value)
        elif self._stage == 3:
            self._write_part(parameter, value, state)
        elif state is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, _STATE_NAMES[state])

    def _write_part(self, parameter: Any, value: Tensor, state: str | None) -> None:
        """Write this rank's part of a full tensor at stage 3; a tensor that does not divide evenly is padded with 0."""
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_get_local_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        key = None if state is None else _STATE_NAMES[state]
        part = safe_get_local_fp32_param(parameter) if key is None else safe_get_local_optimizer_state(parameter, key)
        part = torch.zeros_like(part)
        shard = value.flatten()[self._rank * len(part) : (self._rank + 1) * len(part)]
        part[: len(shard)] = shard.to(part.device)
        if key is None:
            # At stage 3, `refresh` has nothing to copy from: the weight of the network is written here as well.
            safe_set_local_fp32_param(parameter, part)
            with _gather_parameter_context(parameter, write=True):
                parameter.data.copy_(value)
        else:
            safe_set_local_optimizer_state(parameter, part, key)

    def move_states(self, device: torch.device) -> None:
        """Move master weights and moments to a device in place, so that references to the tensors stay valid."""
        for part in self._flat:
            part.data = part.data.to(device)
            state = self._adamw.state[part]
            state.update({key: state[key].to(device) for key in _STATE_NAMES.values()})

    def refresh(self) -> None:
        """Copy the master weights into the network."""
        if self._stage in (1, 2):
            self._engine.optimizer.update_lp_params()

    def _iter_steps(self) -> Iterator[Tensor]:
        return (self._adamw.state[part]["step"] for part in self._flat)


def _gather_parameter_context(parameter: nn.Parameter, *, write: bool = False) -> Any:
    """Return a context manager that gathers a stage 3 parameter; if `write` is true, it broadcasts rank 0's changes."""
    from deepspeed import zero

    return zero.GatheredParameters([parameter], modifier_rank=0 if write else None)


def gather_parameter(parameter: nn.Parameter) -> Tensor:
    """Return a full parameter of the network. Collective for a partitioned parameter."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with _gather_parameter_context(parameter):
        return parameter.detach().clone()
