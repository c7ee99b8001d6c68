"""Weights and AdamW's states under Megatron, read and written one whole weight at a time, by HF name.

    this rank's parameter   a slice of a weight, or the slices of several that are fused (`weight_mapping`)
    master, moments         a range of the entries of each parameter that the optimizer updates on this rank

Reading is collective; every rank makes the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.training.megatron.weight_mapping import WeightLocation, gather_weight
from roll.training.network.pipeline_split import PipelineSplit

__all__ = ["MegatronWeightSource", "MegatronWeights", "WeightPlacement"]

_STATES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """The ranks and parameters that hold the parts of each weight."""

    places: Mapping[str, WeightLocation]
    """The places by HF name, in the order of the HF model."""
    parameters: Mapping[str, Tensor]
    """The parameters of all stages by Megatron's names, without data."""
    cut: PipelineSplit | None
    """The cut of the model, where this rank has one stage of it."""
    tp: ProcessGroup | None
    """The ranks that divide the weights."""

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole HF weight."""
        place = self.places[name]
        shape = list(place.read(self.parameters[place.parameter]).shape)
        if self.tp is not None and place.dim is not None:
            shape[place.dim] *= self.tp.size()
        return torch.Size(shape)

    def gather(self, name: str, part: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a whole HF weight on every rank. Collective.

        Args:
            name: The HF name of the weight.
            part: This rank's parameter, or a tensor shaped like it; `None` where another stage has the weight.
            dtype: The dtype of the result where another stage has the weight.
            device: The device of the result in the same case.
        """
        place = self.places[name]
        found = None if part is None else gather_weight(place.read(part), place, self.tp)
        if self.cut is None:
            assert found is not None
            return found
        stage = self.cut.stage
        owner = self.cut.stages_of.get(place.parameter, [stage.count - 1])[0]  # heads are in the last stage
        if found is None:
            found = torch.empty(self.shape(name), dtype=dtype, device=device)
        return stage.broadcast(found.contiguous(), owner)


class MegatronWeights:
    """The weights of a Megatron network.

    Args:
        parameters: The parameters of the network, by Megatron's names.
        whereabouts: The places of the weights on all ranks.
        ddp: Megatron's data-parallel wrapper of a trained network.
        optimizer: The `DistributedOptimizer` of a trained network.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        whereabouts: WeightPlacement,
        ddp: Any = None,
        optimizer: Any = None,
    ) -> None:
        self._parameters = parameters
        self._placement = whereabouts
        self._ddp = ddp
        self._optimizer = optimizer
        one = next(iter(parameters.values()))
        self._dtype, self._device = one.dtype, one.device
        self._master = torch.promote_types(one.dtype, torch.float32)
        for part in self._parts():  # AdamW does this at its first step, but a checkpoint may be loaded before
            optimizer.optimizer.state[part] = {
                "step": torch.tensor(0.0, device=part.device),
                "exp_avg": torch.zeros_like(part, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(part, requires_grad=False),
            }

    @property
    def names(self) -> list[str]:
        """All names, in the order of the HF model."""
        return list(self._placement.places)

    @property
    def num_updates(self) -> int:
        """The number of AdamW updates, the same for all weights."""
        states = self._optimizer.optimizer.state
        return max((int(states[part]["step"]) for part in self._parts()), default=0)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for part in self._parts():
            self._optimizer.optimizer.state[part]["step"].fill_(float(number))

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole weight."""
        return self._placement.shape(name)

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Return a whole weight of the network."""
        parameter = self._parameters.get(self._placement.places[name].parameter)
        part = None if parameter is None else parameter.detach()
        return self._placement.gather(name, part, self._dtype, self._device)

    @torch.no_grad()
    def read_full(self, name: str, state: str | None = None) -> Tensor:
        """Return a whole master weight, or with `state` one of its AdamW moments."""
        parameter = self._parameters.get(self._placement.places[name].parameter)
        found = None
        if parameter is not None:
            found = torch.zeros(parameter.shape, dtype=self._master, device=self._device)
            own = self._local_values(parameter, state)
            if own is not None:
                values, entries = own
                found.view(-1)[entries] = values
            dist.all_reduce(found, group=self._optimizer.data_parallel_group)
        return self._placement.gather(name, found, self._master, self._device)

    @torch.no_grad()
    def write(self, name: str, value: Tensor, state: str | None = None) -> None:
        """Write a tensor that `full` returned. Call `refresh` once after the last write. Not collective."""
        place = self._placement.places[name]
        parameter = self._parameters.get(place.parameter)
        own = None if parameter is None else self._local_values(parameter, state)
        if parameter is None or own is None:
            return
        values, entries = own
        scratch = torch.empty(parameter.shape, dtype=self._master, device=self._device)
        scratch.view(-1)[entries] = values
        place.write(scratch, value.to(scratch), self._placement.tp)
        values.copy_(scratch.view(-1)[entries])

    def refresh(self) -> None:
        """Copy the master weights into the network on every rank."""
        self._optimizer._copy_main_params_to_model_params()
        self._ddp.start_param_sync()

    def _parts(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer updates on this rank."""
        if self._optimizer is not None:
            yield from self._optimizer.get_parameters()

    def _local_values(self, parameter: nn.Parameter, state: str | None) -> tuple[Tensor, slice] | None:
        """Return the optimizer's values of a parameter on this rank, and the range of entries that they cover."""
        optimizer = self._optimizer
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        entries = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        values = main.detach() if state is None else optimizer.optimizer.state[main][_STATES[state]]
        return values, slice(entries.start, entries.end)


class MegatronWeightSource:
    """The weights that engines must hold, gathered one at a time. See `roll.protocols.WeightSource`.

    Args:
        spread: All weights.
        names: The names of the model's weights, in order.
        is_first: Whether this is rank 0. Iterating is collective; other ranks get `None`s.
    """

    def __init__(self, spread: MegatronWeights, names: Sequence[str], *, is_first: bool) -> None:
        self._spread = spread
        self._names = list(names)
        self._is_first = is_first

    def names(self) -> Sequence[str]:
        """Return the names in the HF checkpoint, in the order of iteration."""
        return self._names

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            weight = self._spread.read(name)
            yield name, weight if self._is_first else None  # type: ignore[misc]
