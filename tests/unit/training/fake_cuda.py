"""A CUDA device without memory or numbers.

PyTorch's fake tensors know devices: an operation on tensors of two devices fails as it would on real ones. So passes
can be made as if there were a device, and whatever branches on it is run. What reads numbers is left out, as in
`dry_run`, and so is the backward pass: autograd asks for the device's own library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from roll.training import dry_run

_APPLY = torch.nn.Module._apply
CUDA = torch.device("cuda", 0)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, `cuda` is a device with fake tensors, and a trainer on it reads no numbers."""
    state, skeleton = torch.zeros(16, dtype=torch.uint8), dry_run._build_meta_network
    instead: dict[str, Any] = {
        "torch.nn.Module._apply": _moved,
        "torch.accelerator.device_count": lambda: 1,
        "torch.accelerator.set_device_index": lambda index: None,
        "torch.cuda.get_rng_state": lambda device: state,
        "torch.cuda.set_rng_state": lambda state, device: None,
        "torch.cuda.get_device_capability": lambda device: (9, 0),
        "torch.bincount": lambda x, minlength: x.new_empty(minlength),
        "roll.training.backend.build_network": lambda *given: skeleton(*given, dry_run._MetaWeights()).to_empty(
            device=CUDA
        ),
        "roll.training.rank.Ranks": dry_run._PlaceholderRanks,
        "roll.training.passes.collect_token_outputs": lambda *args: None,
        "roll.training.passes.collect_topk": lambda *args: None,
        "roll.training.passes.fill_missing_outputs": lambda *args, **more: None,
        "roll.training.passes.order_outputs": lambda *args: [],
        "roll.training.optimizer.Optimizer.get_steps": lambda own: dict.fromkeys(own._locals, 0),
        "roll.training.network.routing.Routing._record_routing": lambda *args: None,
        "roll.training.network.routing.Routing.gather_load": lambda *args: None,
        "roll.training.network.routing.Routing.compute_metrics": lambda *args: {},
    }
    with contextlib.ExitStack() as stack:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for path, value in instead.items():
            stack.enter_context(mock.patch(path, value))
        stack.enter_context(mode)
        stack.enter_context(_WithoutLibrary(mode))
        yield


class _WithoutLibrary(TorchFunctionMode):
    """Replaces what PyTorch does by the device's own library, which a build for the CPU lacks.

    Patched methods of `Tensor` would not do: `Tensor.__getitem__`, once patched, makes every tensor a sequence in the
    eyes of CPython for the rest of the process, and `torch.tensor([tensor])` fails.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._instead = _without_library(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


def _moved(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """As real tensors are: parameters stay the same objects, buffers do not."""
    for child in module.children() if recurse else ():
        _moved(child, fn)
    if not any(isinstance(own, FakeTensor) for own in (*module._parameters.values(), *module._buffers.values())):
        return _APPLY(module, fn, recurse=False)
    for parameter in (own for own in module._parameters.values() if own is not None):
        with torch.no_grad():
            new = fn(parameter)
        if new.device != parameter.device:
            parameter.data, parameter.fake_device = new, new.device  # type: ignore[attr-defined]
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module


def _without_library(mode: FakeTensorMode) -> dict[Callable[..., Any], Callable[..., Any]]:
    copy_, to = torch.Tensor.copy_, torch.Tensor.to
    getitem, setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.device.type == source.device.type == "cpu":
            return copy_(target, source, non_blocking)
        assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
        return target

    def brought(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        """Tensors that NumPy made lose their numbers first."""
        is_fake = isinstance(tensor, FakeTensor) or tensor.is_meta
        return to(tensor if is_fake else mode.from_tensor(tensor), *args, **more)

    def indexed(tensor: Tensor, index: Any) -> Tensor:
        if tensor.device.type != "cuda":
            return getitem(tensor, index)
        view, indices = _basic(tensor, index)
        return torch.ops.aten.index.Tensor(view, indices) if indices else view

    def put(tensor: Tensor, index: Any, value: Any) -> None:
        if tensor.device.type != "cuda":
            setitem(tensor, index, value)
            return
        view, indices = _basic(tensor, index)
        if indices:
            torch.ops.aten.index_put_.default(view, indices, value)
        elif isinstance(value, Tensor):
            copied(view, value)
        else:
            view.fill_(value)

    return {
        torch.Tensor.copy_: copied,
        torch.Tensor.to: brought,
        torch.Tensor.__getitem__: indexed,
        torch.Tensor.__setitem__: put,
        torch.Tensor.__invert__: lambda x: torch.ops.aten.bitwise_not.default(x),
        torch.Tensor.contiguous: lambda x: x if x.is_contiguous() else _in_order(x),
    }


def _in_order(x: Tensor) -> Tensor:
    return torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format)


def _basic(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that numbers, slices and `None` choose, and the indices by tensors of its dimensions, if there are any.

    PyTorch's own indexing asks for the device's library.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        place = next(i for i, item in enumerate(items) if item is Ellipsis)
        missing = tensor.dim() - sum(item is not None and item is not Ellipsis for item in items)
        items[place : place + 1] = [slice(None)] * missing
    indices: list[Tensor | None] = []
    for item in items:
        dim = len(indices)
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, (Tensor, list)):
            indices.append(item if isinstance(item, Tensor) else torch.tensor(item, device=tensor.device))
            continue
        else:
            tensor = tensor.select(dim, int(item))
            continue
        indices.append(None)
    return tensor, indices if any(each is not None for each in indices) else []
