"""The state of one LoRA adapter outside the trainer: created, saved, loaded and sent to engines by its layers' names.

A trainer's adapters have the rank R of its configuration. An adapter of a lower rank r is stored in the first r rows of
A and the first r columns of B, and the rest is 0. The gradients of the rest are 0 as well, because the gradient of A is
a product with B and the gradient of B is a product with A. The rest therefore stays 0, and the adapter trains exactly
as one of rank r. Layers without an adapter have zeros in A and B for the same reason.

With several ranks whose weights are sharded over data-parallel ranks, every rank gets the whole snapshot and keeps its
own part, and snapshots are gathered; all functions here are then collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from roll.errors import ModelError, UnsupportedError
from roll.training.adapters import AdapterState, Progress
from roll.training.network.lora import Adapter
from roll.training.optimizer import WeightState
from roll.training.precision import MasterWeights

__all__ = ["AdapterSnapshot", "AdapterSpec", "build_state", "create_snapshot", "take_snapshot"]

_MLP_PARTS = frozenset({"mlp", "feed_forward", "ffn", "fc1", "fc2", "block_sparse_moe"})
"""Parts of the names of layers that belong to an MLP; all other layers belong to the attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """The settings of a new adapter."""

    rank: int
    alpha: float = 32.0
    """The output of the adapter is multiplied by alpha / rank."""
    seed: int = 0
    """The seed of the initial weights."""
    attention: bool = True
    """True if the attention layers have an adapter."""
    mlp: bool = True
    """True if the MLP layers have an adapter."""

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / self.rank

    def covers(self, layer: str) -> bool:
        """Return whether a layer of this name has an adapter."""
        return self.mlp if _MLP_PARTS & set(layer.split(".")) else self.attention


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSnapshot:
    """A copy of an adapter's weights and optimizer state; keys are names such as `<layer>.lora_A.weight`."""

    spec: AdapterSpec
    weights: Mapping[str, Tensor]
    """A [rank, inputs] and B [outputs, rank] of each layer, in the dtype of the master weights."""
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """AdamW's moments of each weight; empty without the optimizer's state."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The number of updates of each weight."""
    num_steps: int = 0
    """The number of optimizer steps of the adapter."""


def create_snapshot(spec: AdapterSpec, adapters: Mapping[str, Adapter], masters: MasterWeights) -> AdapterSnapshot:
    """Return a new adapter: A is random as in peft, and B is 0.

    Layers that `spec` leaves out use random numbers too, so the other layers do not depend on the choice of layers.
    """
    generator = torch.Generator().manual_seed(spec.seed % 2**63)
    weights: dict[str, Tensor] = {}
    by_parameter = {adapter.a: (layer.removesuffix(".weight"), adapter) for layer, adapter in adapters.items()}
    for parameter in masters.parameters:
        if parameter not in by_parameter:
            continue
        layer, adapter = by_parameter[parameter]
        a, b = masters.get_full(adapter.a), masters.get_full(adapter.b)
        initial = torch.empty(spec.rank, a.shape[1])
        nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
        if spec.covers(layer):
            # Rounded as the weights of the network are, so that trainer and engines begin with the same numbers.
            weights[f"{layer}.lora_A.weight"] = initial.to(masters.precision.compute).to(a.dtype)
            weights[f"{layer}.lora_B.weight"] = torch.zeros(b.shape[0], spec.rank, dtype=b.dtype)
    return AdapterSnapshot(spec=spec, weights=weights)


def take_snapshot(
    spec: AdapterSpec, adapters: Mapping[str, Adapter], masters: MasterWeights, optimizer: Any, num_steps: int
) -> AdapterSnapshot:
    """Copy the adapter that is in the network.

    Args:
        spec: The spec with which the adapter was created.
        adapters: The adapters of the network, by the checkpoint name of the adapted weight.
        masters: The trained weights.
        optimizer: The optimizer of the trained weights.
        num_steps: The number of optimizer steps of the adapter.
    """
    states: Mapping[str, WeightState] = optimizer.pop_states()
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    steps: dict[str, int] = {}
    for name, parameter in _name_parameters(spec, adapters).items():
        part, weight = _select_rank(name, spec.rank), masters.parameters[parameter]

        def copy(local: Tensor, part: tuple[slice, slice] = part, weight: Tensor = weight) -> Tensor:
            whole = _gather(local, weight)
            return whole[part].detach().cpu().clone(memory_format=torch.contiguous_format)

        weights[name] = copy(masters.get_local(parameter))
        state = states[parameter]
        steps[name] = state.num_updates
        moments[name] = {label: copy(moment) for label, moment in state.moments.items()}
    return AdapterSnapshot(spec=spec, weights=weights, moments=moments, steps=steps, num_steps=num_steps)


def build_state(
    snapshot: AdapterSnapshot, adapters: Mapping[str, Adapter], masters: MasterWeights, rank: int
) -> AdapterState:
    """Return the state with which a trainer continues a snapshot.

    Args:
        snapshot: The adapter.
        adapters: The adapters of the network, by the checkpoint name of the adapted weight.
        masters: The trained weights.
        rank: The rank of the network's adapters.

    Raises:
        ModelError: The snapshot has another rank, other layers or other shapes than the network allows.
        UnsupportedError: The weights are sharded in another way than over data-parallel ranks.
    """
    spec = snapshot.spec
    if not 1 <= spec.rank <= rank:
        raise ModelError(f"the adapter's rank must be between 1 and {rank}, the rank of the trainer, got {spec.rank}")
    names = _name_parameters(spec, adapters)
    if different := sorted(set(names) ^ set(snapshot.weights)):
        problem = "lacks" if different[0] in names else "has an unknown"
        raise ModelError(f"the adapter {problem} tensor '{different[0]}': it was saved from another base model")
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, WeightState] = {}
    for name, parameter in names.items():
        if masters.is_model_parallel(parameter):
            raise UnsupportedError("adapters of clients are supported by trainers without tp and ep only")
        whole = masters.get_full(parameter)
        part = _select_rank(name, spec.rank)
        expected = (spec.rank, whole.shape[1]) if ".lora_A." in name else (whole.shape[0], spec.rank)
        given = tuple(snapshot.weights[name].shape)
        if given != expected:
            raise ModelError(f"the adapter's tensor '{name}' must have the shape {expected}, got {given}")
        weights[parameter] = _embed(snapshot.weights[name], whole, part)
        if snapshot.moments:
            moments = {label: _embed(moment, whole, part) for label, moment in snapshot.moments[name].items()}
            optimizer[parameter] = WeightState(moments, snapshot.steps[name])
    return AdapterState(
        weights=weights, optimizer=optimizer, progress=Progress(num_steps=snapshot.num_steps), scale=spec.scale
    )


def _embed(small: Tensor, whole: Tensor, part: tuple[slice, slice]) -> Tensor:
    """Return this rank's part of a tensor like `whole` that is 0 except for `small` in `part`."""
    padded = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
    padded[part] = small.to(padded)
    if not isinstance(whole, DTensor):
        return padded
    # Every rank has all elements, so nothing is sent.
    return distribute_tensor(padded, whole.device_mesh, whole.placements, src_data_rank=None).to_local()


def _gather(local: Tensor, weight: Tensor) -> Tensor:
    """Return all elements of a tensor of which this rank has the part that it has of `weight`."""
    return DTensor(local, weight._spec, requires_grad=False).full_tensor() if isinstance(weight, DTensor) else local


def _name_parameters(spec: AdapterSpec, adapters: Mapping[str, Adapter]) -> dict[str, str]:
    """Return the trainer's parameters, by their names in snapshots."""
    names: dict[str, str] = {}
    for weight, adapter in adapters.items():
        layer = weight.removesuffix(".weight")
        if spec.covers(layer):
            names |= {f"{layer}.lora_A.weight": adapter.a, f"{layer}.lora_B.weight": adapter.b}
    return names


def _select_rank(name: str, rank: int) -> tuple[slice, slice]:
    return (slice(rank), slice(None)) if ".lora_A." in name else (slice(None), slice(rank))
