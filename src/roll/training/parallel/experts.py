"""Expert parallelism: sharding of MoE experts over the `ep` ranks, in place. Tokens are sent to their experts and back.

    own tokens ─ the router's choice ─► one row to every rank that has a chosen expert ─ all-to-all ─►
        there: outputs of its experts, times the router's weights, summed by token
    own tokens ◄─ the sums of all ranks, added ◄─ all-to-all ─

Every rank has different tokens: different samples (dp_shard), different slices of a row (cp), or different tokens
between attention and MLP (tp). Therefore ranks of any of these dimensions may be `ep` ranks. No token is dropped, even
if the load is uneven. A token is sent to a rank once, even if several of its experts are on that rank.
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
from roll.training.experts import compute_expert_outputs, find_experts
from roll.training.parallel.collectives import all_to_all_no_grad, all_to_all_rows
from roll.training.parallel.tensor import get_local_part

__all__ = ["apply_expert_parallel", "build_dispatch_forward"]


def apply_expert_parallel(model: Any, mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Shard all MoE experts of a model over a one-dimensional mesh, in place; return the sharded modules by name.

    Args:
        model: A whole model, identical on every rank.
        mesh: The mesh of the `ep` ranks.

    Raises:
        ModelError: The number of experts is not a multiple of the number of ranks.
    """
    group, found = mesh.get_group(), find_experts(model)
    for experts in found.values():
        if experts.num_experts % mesh.size():
            raise ModelError(
                f"the number of experts ({experts.num_experts}) must be divisible by training.parallel.ep "
                f"({mesh.size()})"
            )
        for name, parameter in experts._parameters.items():
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            experts._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        experts.forward = build_dispatch_forward(experts, group)
    return found


def build_dispatch_forward(experts: Any, group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a `forward` that sends tokens to their experts on the ranks of `group`, and adds the experts' outputs.

    Args:
        experts: The experts module, whose parameters contain this rank's experts only.
        group: The `ep` ranks.
    """
    size, count = group.size(), experts.num_experts // group.size()
    ranks = torch.arange(size, device="cpu")  # the model may be built on the meta device

    def forward(states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        owners = chosen // count
        goes = (owners == ranks.to(chosen.device)[:, None, None]).any(-1)  # [ranks, n]
        to, token = goes.nonzero(as_tuple=True)
        sent = goes.sum(1)
        # The router decides how many rows each rank gets, so ranks exchange the counts before the rows.
        splits = sent.tolist(), all_to_all_no_grad(sent, group).tolist()
        # A row is sent once to a rank and may use several of its experts; -1 marks choices of other ranks.
        theirs = torch.where(owners[token] == to[:, None], chosen[token] % count, -1)
        rows = all_to_all_rows(states[token], *splits, group)
        row_weights = all_to_all_rows(weights[token], *splits, group)
        mine = all_to_all_rows(theirs, *splits, group)
        row, slot = (mine >= 0).nonzero(as_tuple=True)
        parameters = {name: get_local_part(getattr(experts, name)) for name in experts._parameters}
        outputs = compute_expert_outputs(experts, parameters, rows, row, mine[row, slot], row_weights[row, slot])
        sums = _scatter_add(len(rows), [outputs], [row]).to(states.dtype)
        # Results are summed by token before they are sent: one row instead of one for each expert.
        back = all_to_all_rows(sums, splits[1], splits[0], group)
        return _scatter_add(len(states), back.split(splits[0]), token.split(splits[0])).to(states.dtype)

    return forward


def _scatter_add(length: int, parts: Any, rows: Any) -> Tensor:
    """Add all parts [m, H] at their indices `rows` to a tensor [length, H] of zeros, in float32 or better."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].new_zeros(length, parts[0].shape[-1], dtype=dtype)
    for part, own_rows in zip(parts, rows, strict=True):
        total = total.index_add_(0, own_rows, part.to(dtype))
    return total
