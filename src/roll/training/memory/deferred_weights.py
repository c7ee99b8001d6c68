"""Meta-device initialization: weights stay in their files until each rank reads its own shard.

    model on the meta device ─ checked layer by layer ─ split into stages, sharded ─► each rank reads its own shards

Each weight is recorded by its module when the model is loaded. The module stays the same object even if adapters wrap
it, a critic uses only the backbone, stages drop layers, or parameters become DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from roll.models import WeightReader, get_decoder

__all__ = ["DeferredWeights"]


class DeferredWeights:
    """Records which weights of a network are not loaded yet, and reads them from files when they are needed."""

    def __init__(self) -> None:
        self._places: dict[nn.Module, dict[str, tuple[WeightReader, str]]] = {}
        """The weight's name in the files, by module and name in the module."""
        self._models: list[nn.Module] = []

    def add(self, model: nn.Module, files: WeightReader) -> None:
        """Register a model that was loaded without its weights, and read its buffers."""
        self._models.append(model)
        named: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in files:
                named.setdefault(id(parameter), name)  # the files contain tied weights under one of their names
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = _read_whole(files, f"{path}.{name}", buffer)
            own = {name: named[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in named}
            if own:
                self._places[module] = {name: (files, place) for name, place in own.items()}

    @contextmanager
    def materialize_weights(self, extra_modules: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Load the models' weights for a `with` block; a layer has its weights only while it is called.

        Modules outside of layers and the modules in `extra_modules` have their weights during the whole block.
        """
        inside = {part for model in self._models for layer in _get_layers(model) for part in layer.modules()}
        outside = self._materialize([*(module for module in self._places if module not in inside), *extra_modules])
        hooks: list[Any] = []
        for model in self._models:
            for layer in _get_layers(model):
                # Children as well: `find_mixers` calls them without their layer.
                for part in (layer, *layer.children()):
                    hooks += self._materialize_during_forward(part)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            _release(outside)

    def apply_by_layer(self, model: nn.Module, function: Callable[[nn.Module], object]) -> None:
        """Call `function` on each layer of a model. The layer's weights are loaded before and freed after the call."""
        for layer in _get_layers(model):
            materialized = self._materialize(layer.modules())
            try:
                function(layer)
            finally:
                _release(materialized)

    def read_shards(self, network: nn.Module, device: torch.device) -> None:
        """Read this rank's shard of every weight to `device`. The network must already be split and sharded."""
        read: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Pairs of a parameter without data and its replacement with data, by the first one's id, which stays valid
        because the pair keeps the parameter alive."""
        for module in network.modules():
            for name, (files, place) in self._places.get(module, {}).items():
                parameter = module._parameters[name]
                if parameter is not None and _get_local(parameter).is_meta and id(parameter) not in read:
                    read[id(parameter)] = parameter, _read_local(files, place, parameter, device)
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in read:
                    module._parameters[name] = read[id(parameter)][1]
        for module in network.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                for sharded in group.fsdp_params:  # now, because optimizers keep references to the trained memory
                    sharded.reset_sharded_param()

    def _materialize_during_forward(self, part: nn.Module) -> list[Any]:
        materialized: list[_Materialized] = []

        def materialize_part(*unused: object) -> None:
            materialized.extend(self._materialize(part.modules()))

        def release_part(*unused: object) -> None:
            _release(materialized)
            materialized.clear()

        return [
            part.register_forward_pre_hook(materialize_part),
            part.register_forward_hook(release_part, always_call=True),
        ]

    def _materialize(self, modules: Iterable[nn.Module]) -> list[_Materialized]:
        materialized: list[_Materialized] = []
        whole: dict[int, nn.Parameter] = {}
        for module in modules:
            for name, (files, place) in self._places.get(module, {}).items():
                parameter = module._parameters[name]
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in whole:
                        whole[id(parameter)] = nn.Parameter(_read_whole(files, place, parameter), requires_grad=False)
                    module._parameters[name] = whole[id(parameter)]
                    materialized.append((module, name, parameter))
        return materialized


_Materialized = tuple[nn.Module, str, nn.Parameter]


def _release(materialized: Iterable[_Materialized]) -> None:
    for module, name, parameter in materialized:
        module._parameters[name] = parameter


def _get_layers(model: Any) -> Iterable[nn.Module]:
    return getattr(get_decoder(model), "layers", ()) if hasattr(model, "get_decoder") else ()


def _get_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read_whole(files: WeightReader, name: str, like: Tensor) -> Tensor:
    return files.read(name, [(0, size) for size in like.shape])


@torch.no_grad()
def _read_local(files: WeightReader, name: str, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Read this rank's part of a weight into a new parameter of the same dtype, with its own memory."""
    if not isinstance(parameter, DTensor):
        data = _read_whole(files, name, parameter).to(device, parameter.dtype, copy=True)
        return nn.Parameter(data, requires_grad=parameter.requires_grad)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = files.read(name, list(zip(starts, sizes, strict=True)))
    data = part.to(device, parameter.dtype, memory_format=torch.contiguous_format, copy=True)
    whole = DTensor.from_local(
        data,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
