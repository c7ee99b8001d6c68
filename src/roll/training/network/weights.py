"""The trainer's side of a weight sync: a stream of all weights under HF names, in the engine's dtype and with LoRA
merged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from roll.models import has_renamed_weights, to_checkpoint_tensors
from roll.training.memory.nf4 import find_nf4_layers
from roll.training.network.lora import Adapter, find_adapters, get_checkpoint_name
from roll.training.parallel.collectives import gather_on_first_rank, uses_point_to_point

__all__ = ["TrainerWeights", "collect_adapters", "find_persistent_buffers", "gather_weight"]

# PyTorch warns that gathering a tensor that is sharded in two dimensions takes two collectives.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class TrainerWeights:
    """The current weights as a re-iterable stream. See `roll.protocols.WeightSource`.

    A yielded tensor may share memory with the trainer's weights: use it before the next optimizer step, and do not
    write to it.

    Args:
        names: The names of the model's parameters and persistent buffers, in order; of tied parameters, only one name.
        read: A function that takes a name and returns the tensor, under FSDP as a DTensor.
        adapters: The adapters to merge, by checkpoint name of the weight.
        dtype: The dtype of the engines.
        is_first: True on rank 0. Iteration is collective; other ranks receive `None` for every weight.
        model: The HF model, if its weights may have other names and shapes in the checkpoint.
        fetch: A function that takes a name and this rank's result of `read`, and returns the full tensor on rank 0.
        get_shape: A function that takes a name and returns the shape of the full tensor, if `read` is collective.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        read: Callable[[str], Tensor],
        adapters: Mapping[str, Adapter],
        dtype: torch.dtype,
        is_first: bool,
        model: Any = None,
        fetch: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
        get_shape: Callable[[str], torch.Size] | None = None,
    ) -> None:
        parts = {part for adapter in adapters.values() for part in adapter.parameters}
        self._parameters = {get_checkpoint_name(name): name for name in names if name not in parts}
        self._read = read
        self._adapters = adapters
        self._dtype = dtype
        self._is_first = is_first
        self._fetch = fetch
        self._get_shape = get_shape or (lambda name: read(name).shape)
        self._model = model if model is not None and has_renamed_weights(model) else None
        self._names = {name: self._list_names(name, parameter) for name, parameter in self._parameters.items()}

    @classmethod
    def from_network(
        cls,
        network: Any,
        *,
        adapted: bool,
        dtype: torch.dtype,
        is_first: bool,
        read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> TrainerWeights:
        """Build the stream of all weights of a network's model, for any back-end.

        Args:
            network: `PolicyNetwork` or `ValueNetwork`.
            adapted: True if the network has adapters.
            dtype: The dtype of the engines.
            is_first: True if this is rank 0.
            read: A back-end's function that returns the current value of a parameter or buffer. Collective for sharded
                tensors.
        """
        tensors, split = (
            dict(network.root.named_parameters()) | find_persistent_buffers(network.root),
            network.pipeline_split,
        )
        in_4_bits = find_nf4_layers(network.root)
        if split is not None:
            tensors, more = split.gather_tensors(tensors), {"fetch": split.send_to_first}
        else:
            more = {}
        return cls(
            names=[*tensors, *in_4_bits],
            read=lambda name: in_4_bits[name].weight if name in in_4_bits else read(tensors[name]),
            adapters=collect_adapters(network) if adapted else {},
            dtype=dtype,
            is_first=is_first,
            model=network.root if network.projection is not None else network.backbone,
            **more,
        )

    def names(self) -> Sequence[str]:
        """Return all names in the HF checkpoint, in the order of iteration."""
        return [name for names in self._names.values() for name in names]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            weight = self._gather_tensor(name, parameter)
            if self._model is None or weight is None:
                for own in self._names[name]:
                    yield own, weight  # type: ignore[misc]
            else:
                tensors = to_checkpoint_tensors(self._model, name, weight)
                for own in self._names[name]:
                    yield own, tensors[own].contiguous()

    def _list_names(self, name: str, parameter: str) -> list[str]:
        if self._model is None:
            return [name]
        return list(to_checkpoint_tensors(self._model, name, torch.empty(self._get_shape(parameter), device="meta")))

    @torch.no_grad()
    def _gather_tensor(self, name: str, parameter: str) -> Tensor | None:
        weight, adapter = self._read(parameter), self._adapters.get(name)
        # Buffers, such as the biases of routers, keep their dtype in a checkpoint.
        dtype = self._dtype if isinstance(weight, torch.nn.Parameter) else weight.dtype
        if adapter is None:
            weight = _gather_weight_on_first_rank(weight.to(dtype))  # cast before gathering: less to send and to hold
        else:
            parts = [gather_weight(tensor) for tensor in (weight, *map(self._read, adapter.parameters))]
            if adapter.magnitude is not None:
                # The shards of FSDP are in float32. Row norms are rounded to the compute dtype, so the weights whose
                # norms they are divided by must be the ones of the forward pass.
                parts = [part.to(dtype) for part in parts]
            weight = adapter.merge(*parts)
        # Pipeline stages: the weight may be on another rank.
        weight = self._fetch(parameter, weight.to(dtype))
        return weight if self._is_first else None


def collect_adapters(network: Any) -> Mapping[str, Adapter]:
    """Return all adapters of a network's model, including adapters on other ranks, keyed by the checkpoint name of the
    weight.
    """
    return find_adapters(network.root) if network.pipeline_split is None else network.pipeline_split.adapters


def gather_weight(weight: Tensor) -> Tensor:
    """Gather a parameter from its shards, without its gradient. Collective for a sharded parameter."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()


def _gather_weight_on_first_rank(weight: Tensor) -> Tensor:
    """Gather a parameter on rank 0, which sends the weights to engines; with gloo, only rank 0 gets a full copy."""
    if isinstance(weight, DTensor):
        *outer, inner = weight.placements
        group = weight.device_mesh.get_group(weight.device_mesh.ndim - 1)
        rows_alone = type(inner) is Shard and inner.dim == 0 and all(placement.is_replicate() for placement in outer)
        # `full_tensor` gives the whole weight to every rank; on hosts only rank 0 needs the memory.
        if rows_alone and uses_point_to_point(group, weight.device.type):
            return gather_on_first_rank(weight.to_local(), weight.shape[0], group)
    return gather_weight(weight)


def find_persistent_buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint contains, such as the bias that balances a router's experts."""
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
