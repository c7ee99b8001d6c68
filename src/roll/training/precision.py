"""Mixed precision: the dtypes of the network and of the optimizer's master weights.

The optimizer always works on *master* weights in float32. With a bfloat16 network on one rank, the network has a
bfloat16 copy that is written once per step, and the bfloat16 gradients of all micro-batches are summed in float32:
nothing is cast inside the forward pass. With FSDP the shards are the master weights, and FSDP gathers them as bfloat16.
Master weights are initialized from the checkpoint, rounded to the compute dtype, so that they equal the engines'
weights.

If they are offloaded, master weights and summed gradients are separate from the network, in host memory; a gradient is
moved there as soon as it is complete. FSDP's `CPUOffloadPolicy` is not used: it also keeps frozen weights on the host
and moves them to the device for every pass, it waits for each gradient, and a single rank does not use FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.training.memory.host_memory import HostMemory

__all__ = ["MasterWeights", "Precision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of a trainer."""

    compute: torch.dtype
    master: torch.dtype = torch.float32

    @classmethod
    def from_name(cls, name: str) -> Precision:
        """Return the precision for a configured dtype: `bfloat16` or `float32`, and in tests also `float64`."""
        compute = getattr(torch, name)
        return cls(compute=compute, master=torch.promote_types(compute, torch.float32))


class MasterWeights:
    """The trainable weights in the optimizer's dtype, and their gradients.

    Args:
        parameters: The network's trainable parameters by name: DTensor shards, or plain tensors in any dtype.
        precision: The dtypes. Parameters whose dtype is not `precision.master` have separate master weights.
        copies: Names of tied parameters whose gradients another pipeline stage includes in the gradient norm.
        memory: Host memory for master weights and gradients; by default they are on the device.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        precision: Precision,
        copies: Collection[str] = (),
        memory: HostMemory | None = None,
    ) -> None:
        self.copies = copies
        self._memory = memory
        self.parameters = dict(parameters)
        self.precision = precision
        self._masters: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._collected: set[str] = set()
        """The names of weights with a gradient in this step; the entries of other weights in `_grads` are old values.

        On a CPU all gradients are allocated at the start: between activations, they would keep the heap from shrinking.
        """
        for name, parameter in self.parameters.items():
            if memory is not None or (not isinstance(parameter, DTensor) and parameter.dtype != precision.master):
                weight = _get_local(parameter.detach())
                if memory is not None:
                    weight = memory.to_host(weight)
                    memory.finish()
                self._masters[name] = weight.to(precision.master, copy=True)
                if self._masters[name].device.type == "cpu":
                    self._grads[name] = torch.empty_like(self._masters[name])
                # Each gradient is moved when it is complete, so the network's gradients never all exist at once.
                parameter.register_post_accumulate_grad_hook(self._build_collector(name))

    def _build_collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self._memory is None:
                add(parameter.grad)
            else:
                self._memory.to_host_with_callback(_get_local(parameter.grad), add)
            parameter.grad = None

        def add(grad: Tensor) -> None:
            if name in self._collected:
                self._grads[name].add_(grad)
            elif name in self._grads:
                # The first gradient of a step overwrites the memory, which therefore need not be cleared.
                self._grads[name].copy_(grad)
            else:
                self._grads[name] = grad.to(self.precision.master)
            self._collected.add(name)

        return collect

    @property
    def is_offloaded(self) -> bool:
        """True if master weights and gradients are in host memory."""
        return self._memory is not None

    def get_full(self, name: str) -> Tensor:
        """Return the master weight; a DTensor under FSDP."""
        weight, master = self.parameters[name].detach(), self._masters.get(name)
        if master is None:
            return weight
        return DTensor(master, weight._spec, requires_grad=False) if isinstance(weight, DTensor) else master

    def get_local(self, name: str) -> Tensor:
        """Return this rank's part of a master weight; the result shares memory with the weight."""
        return self._masters[name] if name in self._masters else _get_local(self.parameters[name].detach())

    def is_model_parallel(self, name: str) -> bool:
        """Return whether a weight is sharded over tp or ep."""
        weight = self.parameters[name]
        if not isinstance(weight, DTensor):
            return False
        by_dim = zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=False)
        return any(name in ("tp", "ep") and not placement.is_replicate() for name, placement in by_dim)

    def get_grad(self, name: str) -> Tensor | None:
        """Return this rank's part of a weight's gradient; `None` if there is no gradient."""
        if self._memory is not None:
            self._memory.finish()
        if name in self._masters:
            return self._grads[name] if name in self._collected else None
        grad = self.parameters[name].grad
        return None if grad is None else _get_local(grad)

    def copy_weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return a copy of this rank's part of every weight, by name; in the master dtype by default."""
        return {name: self.get_local(name).to(dtype or self.precision.master, copy=True) for name in self.parameters}

    @torch.no_grad()
    def put_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this rank's part of every master weight, and refresh the network. Weights without an entry become
        0."""
        for name in self.parameters:
            if (weight := weights.get(name)) is None:
                self.get_local(name).zero_()
            else:
                self.get_local(name).copy_(weight)
        self.refresh()

    def pop_gradients(self) -> dict[str, Tensor]:
        """Remove and return the gradients, by name."""
        if self._memory is not None:
            self._memory.finish()
        taken = {name: self._grads.pop(name) for name in self._collected}
        taken |= {name: p.grad for name, p in self.parameters.items() if name not in taken and p.grad is not None}
        for name, grad in taken.items():
            if name in self._masters and grad.device.type == "cpu":
                self._grads[name] = torch.empty_like(grad)
        self.clear_grads()
        return taken

    def put_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the current gradients with the result of `pop_gradients`."""
        self.clear_grads()
        for name, grad in gradients.items():
            if name in self._masters:
                self._grads[name] = grad
                self._collected.add(name)
            else:
                self.parameters[name].grad = grad

    @torch.no_grad()
    def scale_grads(self, scale: float) -> None:
        """Multiply every gradient by a number, in place."""
        grads = [grad for name in self.parameters if (grad := self.get_grad(name)) is not None]
        if grads:
            torch._foreach_mul_(grads, scale)

    def clear_grads(self) -> None:
        """Drop the gradients.

        On an accelerator, the memory of the gradients is freed, so that the next gradients can use memory that
        activations free in the backward pass. On a CPU, the memory is kept, because the operating system clears every
        newly allocated page.
        """
        if self._memory is not None:
            self._memory.finish()
        self._collected.clear()
        self._grads = {name: grad for name, grad in self._grads.items() if grad.device.type == "cpu"}
        for parameter in self.parameters.values():
            parameter.grad = None

    def move(self, device: torch.device) -> None:
        """Move to a device the master weights that are stored separately from the network's parameters."""
        self._masters = {name: master.to(device) for name, master in self._masters.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights into the network."""
        if self._memory is not None:
            for name, master in self._masters.items():
                self._memory.write(_get_local(self.parameters[name].detach()), master)
        elif self._masters:
            names = list(self._masters)
            torch._foreach_copy_([self.parameters[n].data for n in names], [self._masters[n] for n in names])


def _get_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
