"""FSDP2: gathering of weights and reduction of gradients, with one bucket in memory at a time.

    forward    shards ─ gathered ─► buffer ─ copied ─► weights; the buffer is freed
    backward   gradients ─ copied ─► buffer ─ summed over ranks ─► shards; the buffer is freed

Buckets are the layers, the embeddings, the vocabulary projection, and the rest. On a CPU, computation does not overlap
with collectives, so the next bucket is not prefetched and needs no buffer. On an accelerator FSDP prefetches, so that
collectives overlap with kernels.

The backward pass does not gather embeddings, because their gradient does not depend on their values. A projection's
weights are used outside its module, because log-probs are computed from parts of them. Therefore the module's `forward`
returns the hidden states unchanged and only triggers the gathering of the weights. They are freed once the gradient of
the hidden states is known. Tied embeddings and projection are gathered from the first use to the last gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import Shard

from roll.training.parallel.collectives import all_gather_into, reduce_scatter_into, uses_point_to_point

__all__ = [
    "fully_shard_module",
    "gather_projection",
    "get_projection_dtype",
    "regather_on_backward",
    "reshard_after_forward",
    "set_first_backward_layer",
    "shard_embeddings",
]

_DTYPE_ATTRIBUTE = "dtype_of_gathered_weights"


def fully_shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    dim: Callable[[nn.Parameter], Shard | None] | None = None,
) -> FSDPModule:
    """Shard the weights of a module with FSDP2, except those in submodules that are sharded already.

    Gradients are summed over the ranks, not averaged.

    Args:
        module: The module, which becomes one bucket.
        mesh: The mesh of the ranks.
        policy: The dtypes of gathered weights and reduced gradients.
        dim: A function that returns the dimension along which a parameter is sharded; by default the first.
    """
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=dim)
    # The gradient of each rank is a share already, so gradients are summed; FSDP would average them.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo does not support a sum that also divides
    has_weights = sharded._get_fsdp_state()._fsdp_param_group is not None
    if has_weights and uses_point_to_point(mesh.get_group(mesh.ndim - 1), mesh.device_type):
        sharded.set_custom_all_gather(_HostAllGather())
        sharded.set_custom_reduce_scatter(_HostReduceScatter())
        sharded.set_modules_to_backward_prefetch([sharded])  # itself, which is gathered already: nothing is prefetched
        module.register_forward_pre_hook(_free_buffer)
    return sharded


def shard_embeddings(decoder: Any, projection: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard a model's embeddings and vocabulary projection as separate buckets, unless they are tied.

    Args:
        decoder: The model's decoder.
        projection: The model's projection, or `None`.
        mesh: The mesh of the ranks.
        policy: The dtypes of gathered weights and reduced gradients.
    """
    embeddings = decoder.get_input_embeddings()
    word_weights, head_weights = _list_weights(embeddings), _list_weights(projection)
    if any(mine is other for mine in word_weights for other in head_weights):
        return
    if word_weights:
        # The gradient of an embedding does not depend on its weights.
        fully_shard_module(embeddings, mesh, policy).set_unshard_in_backward(False)
    if head_weights:
        vars(projection)[_DTYPE_ATTRIBUTE] = policy.param_dtype
        # FSDP gathers weights when a module is called, but log-probs use the weight without calling the projection.
        projection.forward = _clone_hidden_states
        # The weights are used after this `forward`, which only returns its input.
        fully_shard_module(projection, mesh, policy).set_reshard_after_forward(False, recurse=False)


def gather_projection(projection: Any, hidden: Tensor) -> Tensor:
    """Gather the projection's weights, and return the hidden states [M, H] unchanged.

    The weights stay gathered until the backward pass has computed the gradient of the hidden states.
    """
    return projection(hidden) if _is_bucket(projection) else hidden


def regather_on_backward(projection: Any, output: Tensor) -> Tensor:
    """Return a network's output unchanged; its backward pass gathers the projection again if it was freed."""
    if _is_bucket(projection) and output.requires_grad:
        output.register_hook(lambda _: projection.unshard())
    return output


def get_projection_dtype(projection: Any) -> torch.dtype:
    """Return the dtype of a projection's gathered weights, which is the network's compute dtype."""
    return vars(projection).get(_DTYPE_ATTRIBUTE) or projection.weight.dtype


def set_first_backward_layer(network: nn.Module, layer: nn.Module) -> None:
    """Set the layer with which FSDP begins the next backward pass.

    By default FSDP gathers the layer that ran last, which is incorrect if a rank has several model chunks.
    """
    if isinstance(network, FSDPModule) and isinstance(layer, FSDPModule):
        network.set_modules_to_backward_prefetch([layer])


def reshard_after_forward(network: nn.Module) -> None:
    """Free the gathered weights that FSDP keeps after a forward pass without a backward pass.

    Otherwise the next forward pass would use them even if the shards have changed in the meantime.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _HostAllGather(DefaultAllocMixin, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather_into(output_tensor, input_tensor, group)


class _HostReduceScatter(DefaultAllocMixin, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter_into(output_tensor, input_tensor, group, overwrite=True)
        input_tensor.untyped_storage().resize_(0)  # FSDP would keep it until the next bucket


def _free_buffer(module: Any, _: object) -> None:
    """Free the buffer of a module's gathered weights; FSDP would keep it until the next all-gather."""
    module._get_fsdp_state()._comm_ctx.all_gather_state = None


def _is_bucket(module: Any) -> bool:
    return isinstance(module, FSDPModule)


def _clone_hidden_states(hidden: Tensor) -> Tensor:
    return hidden.clone()  # FSDP cannot distinguish a view of its input from the input


def _list_weights(module: Any) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())
