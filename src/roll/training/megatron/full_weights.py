"""Read and write Megatron's weights and AdamW states, one full weight at a time, by HF name.

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

_STATE_NAMES = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """The ranks and parameters that store the parts of each weight."""

    locations: Mapping[str, WeightLocation]
    """The location of each weight in Megatron's modules, by HF name, in the order of the HF model."""
    parameters: Mapping[str, Tensor]
    """The parameters of all stages by Megatron's names, without data."""
    pipeline_split: PipelineSplit | None
    """The split of the model into pipeline stages, if there are several."""
    tp: ProcessGroup | None
    """The ranks over which the weights are sharded."""

    def get_shape(self, name: str) -> torch.Size:
        """Return the shape of a full HF weight."""
        location = self.locations[name]
        shape = list(location.read(self.parameters[location.parameter]).shape)
        if self.tp is not None and location.dim is not None:
            shape[location.dim] *= self.tp.size()
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
        weight = None if part is None else gather_weight(location.read(part), location, self.tp)
        if self.pipeline_split is None:
            assert weight is not None
            return weight
        stage = self.pipeline_split.stage
        owners = self.pipeline_split.stages_by_weight.get(
            location.parameter, [stage.count - 1]
        )  # heads are in the last stage
        if weight is None:
            weight = torch.empty(self.get_shape(name), dtype=dtype, device=device)
        return stage.broadcast(weight.contiguous(), owners[0])


class MegatronWeights:
    """Reads and writes a Megatron network's weights and AdamW moments as full tensors, by HF name.

    Args:
        parameters: The parameters of the network, by Megatron's names.
        placement: The ranks and parameters that store each weight.
        ddp: Megatron's data-parallel wrapper of a trained network.
        optimizer: The `DistributedOptimizer` of a trained network.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placement: WeightPlacement,
        ddp: Any = None,
        optimizer: Any = None,
    ) -> None:
        self._parameters = parameters
        self._placement = placement
        self._ddp = ddp
        self._optimizer = optimizer
        one = next(iter(parameters.values()))
        self._dtype, self._device = one.dtype, one.device
        self._master = torch.promote_types(one.dtype, torch.float32)
        for part in self._iter_parts():  # AdamW does this at its first step, but a checkpoint may be loaded before
            optimizer.optimizer.state[part] = {
                "step": torch.tensor(0.0, device=part.device),
                "exp_avg": torch.zeros_like(part, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(part, requires_grad=False),
            }

    @property
    def names(self) -> list[str]:
        """The names of all weights, in the order of the HF model."""
        return list(self._placement.locations)

    @property
    def num_updates(self) -> int:
        """The number of AdamW updates, the same for all weights."""
        states = self._optimizer.optimizer.state
        return max((int(states[part]["step"]) for part in self._iter_parts()), default=0)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for part in self._iter_parts():
            self._optimizer.optimizer.state[part]["step"].fill_(float(number))

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
            # Every data rank has a range of the entries and 0 elsewhere, so a sum assembles the weight.
            dist.all_reduce(weight, group=self._optimizer.data_parallel_group)
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
        location.write(scratch, value.to(scratch), self._placement.tp)
        values.copy_(scratch.view(-1)[entries])

    def refresh(self) -> None:
        """Copy the master weights into the network on every rank."""
        self._optimizer._copy_main_params_to_model_params()
        # Each data rank has written its range only; this gathers the others.
        self._ddp.start_param_sync()

    def _iter_parts(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer updates on this rank."""
        if self._optimizer is not None:
            yield from self._optimizer.get_parameters()

    def _get_local_values(self, parameter: nn.Parameter, state: str | None) -> tuple[Tensor, slice] | None:
        """Return this rank's values of a master weight or moment, and the slice of the flat parameter that they cover.

        Return `None` if this rank's optimizer does not have the parameter.
        """
        optimizer = self._optimizer
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        entries = optimizer._get_model_param_range_map(parameter)["param"]
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        values = main.detach() if state is None else optimizer.optimizer.state[main][_STATE_NAMES[state]]
        return values, slice(entries.start, entries.end)


class MegatronWeightSource:
    """Yields the weights for the engines, gathered one at a time. See `roll.protocols.WeightSource`.

    Args:
        weights: All weights of the network.
        names: The names of the model's weights, in order.
        is_first: True on rank 0. Iteration is collective; other ranks receive `None` for every weight.
    """

    def __init__(self, weights: MegatronWeights, names: Sequence[str], *, is_first: bool) -> None:
        self._weights = weights
        self._names = list(names)
        self._is_first = is_first

    def names(self) -> Sequence[str]:
        """Return the names in the HF checkpoint, in the order of iteration."""
        return self._names

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            weight = self._weights.read(name)
            yield name, weight if self._is_first else None  # type: ignore[misc]
