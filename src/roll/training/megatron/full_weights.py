"""Read and write Megatron's weights and AdamW states, one full weight at a time, by HF name.

    this rank's parameter   a slice of a weight, or the slices of several that are fused (`weight_mapping`)
    master, moments         a range of the entries of each parameter that the optimizer updates on this rank

Reading is collective; every rank makes the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roll.training.megatron.optimizer import MegatronOptimizer
from roll.training.megatron.weight_mapping import Shards, WeightLocation
from roll.training.network.pipeline_split import PipelineSplit

__all__ = ["MegatronWeights", "WeightPlacement"]

_STATE_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """The ranks and parameters that store the parts of each weight."""

    locations: Mapping[str, WeightLocation]
    """The location of each weight in Megatron's modules, by HF name, in the order of the HF model."""
    trained: Sequence[str]
    """The HF names of the weights that are trained, in the order of the HF model; with adapters, only theirs."""
    parameters: Mapping[str, Tensor]
    """The parameters of all stages by Megatron's names, without data."""
    pipeline_split: PipelineSplit | None
    """The split of the model into pipeline stages, if there are several."""
    shards: Shards
    """The ranks over which the weights are sharded."""

    def get_shape(self, name: str) -> torch.Size:
        """Return the shape of a full HF weight."""
        location = self.locations[name]
        shape = list(location.read(self.parameters[location.parameter]).shape)
        ranks = self.shards.get_ranks(location)
        if ranks is not None and location.dim is not None:
            shape[location.dim] *= ranks.size()
        return torch.Size(shape)

    def gather(self, name: str, part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a full HF weight on every rank. Collective.

        Args:
            name: The HF name of the weight.
            part: This rank's parameter, or a tensor of the same shape; `None` if another stage has the weight.
            dtype: The dtype of the result if another stage has the weight.
            device: The device of the result if another stage has the weight.
        """
        location = self.locations[name]
        weight = None if part is None else self.shards.gather(location.read(part), location)
        if self.pipeline_split is None:
            assert weight is not None
            return weight
        stage = self.pipeline_split.stage
        last = stage.count - 1  # heads are in the last stage
        owners = self.pipeline_split.stages_by_weight.get(location.parameter, [last])
        if weight is None:
            weight = torch.empty(self.get_shape(name), dtype=dtype, device=device)
        return stage.broadcast(weight.contiguous(), owners[0])


class MegatronWeights:
    """Reads and writes a Megatron network's weights and AdamW moments as full tensors, by HF name.

    Args:
        parameters: The parameters of the network, by Megatron's names.
        placement: The ranks and parameters that store each weight.
        optimizer: The optimizer of a trained network.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placement: WeightPlacement,
        optimizer: MegatronOptimizer | None = None,
    ) -> None:
        self._parameters = parameters
        self._placement = placement
        self._trained_by = optimizer
        one = next(iter(parameters.values()))
        self._dtype, self._device = one.dtype, one.device
        self._master = torch.promote_types(one.dtype, torch.float32)
        self._states = [] if optimizer is None else [(adamw.state, part) for adamw, part in optimizer.parts]
        for states, part in self._states:  # AdamW does this at its first step, but a checkpoint may be loaded before
            states[part] = {
                "step": torch.tensor(0.0, device=part.device),
                "exp_avg": torch.zeros_like(part, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(part, requires_grad=False),
            }

    @property
    def names(self) -> list[str]:
        """The names of all trained weights, in the order of the HF model."""
        return list(self._placement.trained)

    @property
    def num_updates(self) -> int:
        """The number of AdamW updates, the same for all weights."""
        return max((int(states[part]["step"]) for states, part in self._states), default=0)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for states, part in self._states:
            states[part]["step"].fill_(float(number))

    def get_shape(self, name: str) -> torch.Size:
        """Return the shape of the full weight."""
        return self._placement.get_shape(name)

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Return a full weight of the network. Collective."""
        parameter = self._parameters.get(self._placement.locations[name].parameter)
        part = None if parameter is None else parameter.detach()
        return self._placement.gather(name, part, self._dtype, self._device)

    @torch.no_grad()
    def read_full(self, name: str, state: str | None = None) -> Tensor:
        """Return a full master weight, or one of its moments if `state` is `moment1` or `moment2`. Collective."""
        parameter = self._parameters.get(self._placement.locations[name].parameter)
        weight = None
        if parameter is not None:
            weight = torch.zeros(parameter.shape, dtype=self._master, device=self._device)
            local = self._get_local_values(parameter, state)
            if local is not None:
                values, entries = local
                weight.view(-1)[entries] = values
            # Every rank has a range of the entries and 0 elsewhere, so a sum assembles the weight.
            dist.all_reduce(weight, group=self._optimizer.get_group(parameter))
        return self._placement.gather(name, weight, self._master, self._device)

    @torch.no_grad()
    def write(self, name: str, value: Tensor, state: str | None = None) -> None:
        """Set a full master weight, or one of its moments if `state` is given, in the layout that `read_full` returns.

        Call `refresh` once after the last write. Not collective.
        """
        location = self._placement.locations[name]
        parameter = self._parameters.get(location.parameter)
        local = None if parameter is None else self._get_local_values(parameter, state)
        if parameter is None or local is None:
            return
        values, entries = local
        # A range may begin and end inside a fused parameter, so the weight is placed in a whole parameter first.
        scratch = torch.empty(parameter.shape, dtype=self._master, device=self._device)
        scratch.view(-1)[entries] = values
        location.write(scratch, value.to(scratch), self._placement.shards.get_ranks(location))
        values.copy_(scratch.view(-1)[entries])

    def refresh(self) -> None:
        """Copy the master weights into the network on every rank."""
        self._optimizer.refresh()

    @property
    def _optimizer(self) -> MegatronOptimizer:
        assert self._trained_by is not None, "a reference has no optimizer"
        return self._trained_by

    def _get_local_values(self, parameter: nn.Parameter, state: str | None) -> tuple[Tensor, slice] | None:
        """Return this rank's values of a master weight or moment, and the slice of the flat parameter that they cover.

        Return `None` if this rank does not update the parameter.
        """
        found = self._optimizer.get_part(parameter)
        if found is None:
            return None
        adamw, part, entries = found
        return part.detach() if state is None else adamw.state[part][_STATE_NAMES[state]], entries
