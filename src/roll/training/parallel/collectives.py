"""Differentiable collectives over dimension 0 of plain tensors. Each rank's gradient is a share of the whole gradient.

Between hosts, gloo gathers into a second buffer as large as the result, and reduces whole tensors although a rank needs
only one part of the sum. Here ranks send the parts to each other directly: a sum transfers half as much data, and the
second buffer has at most the size of one part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = [
    "all_gather",
    "all_gather_into",
    "all_gather_rows",
    "all_reduce_",
    "all_to_all",
    "all_to_all_no_grad",
    "all_to_all_rows",
    "divide_gradient",
    "gather_on_first_rank",
    "reduce_scatter",
    "reduce_scatter_into",
    "uses_point_to_point",
]

# The names since torch 2.13, and the earlier ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_no_grad(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_no_grad(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_no_grad(share, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_no_grad(grads[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all_no_grad(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all_no_grad(grads[0], ctx.group), None


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all_rows_no_grad(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_rows_no_grad(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, size: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        whole = local.new_zeros(size, *local.shape[1:])
        # Each position is set by one rank and 0 on all others, so a sum assembles the rows.
        whole[index] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int) -> Tensor:
        ctx.count = count
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.count, None


def all_gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the parts [n, ...] of all ranks, concatenated in the order of ranks."""
    return _apply(_Gather, part, group)


def reduce_scatter(partial_sum: Tensor, group: ProcessGroup) -> Tensor:
    """Sum tensors [n * size, ...] over all ranks, and return this rank's part [n, ...] of the sum."""
    return _apply(_ReduceScatter, partial_sum, group)


def all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send `parts[i]` to rank i, for all ranks; entry i of the result was received from rank i."""
    return _apply(_AllToAll, parts, group)


def all_to_all_rows(rows: Tensor, send_counts: list[int], recv_counts: list[int], group: ProcessGroup) -> Tensor:
    """Send `send_counts[i]` rows to each rank i, in rank order, and receive `recv_counts[i]` rows from it."""
    return _apply(_AllToAllRows, rows, send_counts, recv_counts, group)


def all_to_all_no_grad(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Run `all_to_all` without a gradient."""
    result = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, parts.contiguous(), group=group)
    return result


def all_gather_rows(local: Tensor, index: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Gather the rows [n, ...] of all ranks into a tensor [size, ...]. `index` [n] contains the positions of this
    rank's rows; each position belongs to one rank.

    All ranks must use the result in the same computation, so that its gradient is identical on every rank. The backward
    pass returns the gradient of this rank's rows.
    """
    return _apply(_AllGatherRows, local, index, size, group)


def divide_gradient(value: Tensor, count: int) -> Tensor:
    """Return the value unchanged, but divide its gradient by `count`, the number of ranks that compute it."""
    return _apply(_DivideGradient, value, count)


def all_reduce_(value: Tensor, group: ProcessGroup, *, use_max: bool = False) -> Tensor:
    """Replace `value` in place by its sum over all ranks, or by its maximum if `use_max` is true; no gradient is
    computed.
    """
    dist.all_reduce(value, op=dist.ReduceOp.MAX if use_max else dist.ReduceOp.SUM, group=group)
    return value


def uses_point_to_point(group: ProcessGroup, device_type: str) -> bool:
    """Return whether collectives on this device use point-to-point messages instead of gloo's collectives."""
    return device_type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


@torch.no_grad()
def all_gather_into(output: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """Fill `output` with the concatenated parts of all ranks; `part` may be a view of this rank's slice of `output`."""
    if not uses_point_to_point(group, output.device.type):
        _ALL_GATHER(output, part, group=group)
        return
    rank, size = group.rank(), group.size()
    parts = output.view(size, -1)
    # Round i sends to rank + i and receives from rank - i: each rank has one transfer in each direction at a time.
    others = [(rank + i) % size for i in range(1, size)]
    works = [dist.irecv(parts[other], group=group, group_src=other) for other in reversed(others)]
    works += [dist.isend(part, group=group, group_dst=other) for other in others]
    if parts[rank].data_ptr() != part.data_ptr():
        parts[rank].copy_(part.view(-1))
    _finish(works)


@torch.no_grad()
def reduce_scatter_into(local: Tensor, partial_sum: Tensor, group: ProcessGroup, *, overwrite: bool = False) -> None:
    """Fill `local` with this rank's part of the sum of `partial_sum` over all ranks; `overwrite` allows `partial_sum`
    to be overwritten.
    """
    if not uses_point_to_point(group, partial_sum.device.type):
        _REDUCE_SCATTER(local, partial_sum, group=group)
        return
    rank, size = group.rank(), group.size()
    parts, total = partial_sum.view(size, -1), local.view(-1)
    total.copy_(parts[rank])
    # This rank's own part has been copied to `total`, so its memory can receive.
    received = parts[rank] if overwrite else torch.empty_like(total)
    for i in range(1, size):
        to, source = (rank + i) % size, (rank - i) % size
        _finish(
            [
                dist.irecv(received, group=group, group_src=source),
                dist.isend(parts[to], group=group, group_dst=to),
            ]
        )
        total.add_(received)


@torch.no_grad()
def gather_on_first_rank(part: Tensor, length: int, group: ProcessGroup) -> Tensor:
    """Gather parts, split as by `torch.chunk`, into [length, ...] on the group's first rank; return an empty tensor on
    the other ranks.
    """
    size = group.size()
    each = -(-length // size)
    counts = [min(max(length - i * each, 0), each) for i in range(size)]
    if group.rank():
        if len(part):
            dist.send(part.contiguous(), group=group, group_dst=0)
        return part.new_empty(0)
    whole = part.new_empty(length, *part.shape[1:])
    places = list(enumerate(whole.split(counts)))
    works = [dist.irecv(place, group=group, group_src=i) for i, place in places[1:] if len(place)]
    places[0][1].copy_(part)
    _finish(works)
    return whole


def _finish(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _apply(function: Any, *arguments: Any) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


def _all_gather_no_grad(part: Tensor, group: ProcessGroup) -> Tensor:
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    all_gather_into(whole, part.contiguous(), group)
    return whole


def _reduce_scatter_no_grad(partial_sum: Tensor, group: ProcessGroup) -> Tensor:
    part = partial_sum.new_empty(partial_sum.shape[0] // group.size(), *partial_sum.shape[1:])
    reduce_scatter_into(part, partial_sum.contiguous(), group)
    return part


def _all_to_all_rows_no_grad(
    rows: Tensor, send_counts: list[int], recv_counts: list[int], group: ProcessGroup
) -> Tensor:
    result = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), recv_counts, send_counts, group=group)
    return result
