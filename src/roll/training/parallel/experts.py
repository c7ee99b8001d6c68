"""Expert parallelism: division of a mixture's experts over the `ep` ranks, in place. Tokens are sent to them and back.

    own tokens ─ the router's choice ─► one row to every rank that has a chosen expert ─ all-to-all ─►
        there: products of its experts, times the router's weights, summed by token
    own tokens ◄─ the sums of each rank, summed ◄─ all-to-all ─

Every rank has tokens of its own: other samples (dp_shard), other slices of a row (cp), or other tokens between
attention and MLP (tp). So ranks of any of these dimensions may be `ep` ranks. No token is dropped, however uneven the
choice. A token is sent to a rank once, however many of its experts are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from roll.errors import ModelError
from roll.training.experts import expert_outputs, find_experts
from roll.training.parallel.collectives import all_to_all_no_grad, all_to_all_rows
from roll.training.parallel.tensor import local_part

__all__ = ["divide_experts"]


def divide_experts(model: Any, mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Divide the experts that `find_experts` finds in a model over a one-dimensional mesh; return them by name.

    Args:
        model: A whole model, identical on every rank.
        mesh: The mesh of the `ep` ranks.

    Raises:
        ModelError: the number of experts cannot be divided.
    """
    group, found = mesh.get_group(), find_experts(model)
    for experts in found.values():
        if experts.num_experts % mesh.size():
            raise ModelError(
                f"training.parallel.ep {mesh.size()} does not divide this model's {experts.num_experts} experts"
            )
        for name, parameter in experts._parameters.items():
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            experts._parameters[name] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        experts.forward = _dispatch_forward(experts, group)
    return found


def _dispatch_forward(experts: Any, group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    size, count = group.size(), experts.num_experts // group.size()
    ranks = torch.arange(size)

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        owners = chosen // count
        goes = (owners == ranks.to(chosen.device)[:, None, None]).any(-1)  # [ranks, n]
        to, token = goes.nonzero(as_tuple=True)
        sent = goes.sum(1)
        splits = sent.tolist(), all_to_all_no_grad(sent, group).tolist()
        theirs = torch.where(owners[token] == to[:, None], chosen[token] % count, -1)
        rows = all_to_all_rows(states[token], *splits, group)
        row_weights = all_to_all_rows(weights[token], *splits, group)
        mine = all_to_all_rows(theirs, *splits, group)
        row, slot = (mine >= 0).nonzero(as_tuple=True)
        parameters = {name: local_part(getattr(experts, name)) for name in experts._parameters}
        found = expert_outputs(experts, parameters, rows, row, mine[row, slot], row_weights[row, slot])
        sums = _scatter_add(len(rows), [found], [row]).to(states.dtype)
        back = all_to_all_rows(sums, splits[1], splits[0], group)
        return _scatter_add(len(states), back.split(splits[0]), token.split(splits[0])).to(states.dtype)

    return forward


def _scatter_add(length: int, parts: Any, rows: Any) -> Tensor:
    """Add rows [m, H] at their indices into a tensor [length, H], in float32 or better."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].new_zeros(length, parts[0].shape[-1], dtype=dtype)
    for part, own_rows in zip(parts, rows, strict=True):
        total = total.index_add_(0, own_rows, part.to(dtype))
    return total
