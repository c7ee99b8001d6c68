"""Recurrent parts of a decoder over a packed row: linear attention, state-space models, short convolutions.

    row of trees ─ every path from a root to a leaf as a sequence ─► [B, L, H] ─ the module ─► back to the row

A path begins with an empty state, so no state passes from one text to another. Tokens shared by several paths are
computed in each of them, with identical results, and taken from the first. Only here is a shared prefix computed more
than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from roll.errors import ModelError
from roll.models import decoder_of, first_tensor
from roll.training.packing.layout import PackedLayout
from roll.training.parallel.tokens import TokenShare

__all__ = ["Paths", "mix_by_path"]


class Paths:
    """The texts of a packed row, as paths of its trees.

    Args:
        layout: The row.
        device: The device of the network.
    """

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        paths = [path for tree in layout.blocks for path in _paths(tree)]
        longest = max(map(len, paths))
        index = np.stack([path[np.minimum(np.arange(longest), len(path) - 1)] for path in paths])
        source = np.zeros(layout.num_tokens, dtype=np.int64)
        for i in reversed(range(len(paths))):
            source[paths[i]] = i * longest + np.arange(len(paths[i]))
        self.size = len(paths), longest
        self.index = torch.from_numpy(index.reshape(-1)).to(device)
        """The entry of the row at each position [B * L]; padding repeats the last one."""
        self.source = torch.from_numpy(source).to(device)
        """The position of each entry of the row among the B * L [N]."""

    def split(self, x: Any) -> Any:
        """Return a tensor [1, N, …] as [B, L, …], also inside tuples; return anything else unchanged."""
        if isinstance(x, tuple):
            return tuple(self.split(part) for part in x)
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != (1, len(self.source)):
            return x
        return x[0].index_select(0, self.index).view(*self.size, *x.shape[2:])

    def merge(self, x: Tensor) -> Tensor:
        """Return a tensor [B, L, …] as [1, N, …]."""
        return x.flatten(0, 1).index_select(0, self.source)[None]


def _paths(tree: Any) -> Iterable[np.ndarray]:
    parents = {segment.parent for segment in tree.segments}
    for i, (segment, context) in enumerate(zip(tree.segments, tree.contexts(), strict=True)):
        if i not in parents:
            yield np.concatenate([context, segment.start + np.arange(segment.length)])


class _Plan(Protocol):
    share: TokenShare

    @property
    def paths(self) -> Paths: ...


def mix_by_path(model: Any, mixers: Iterable[nn.Module]) -> None:
    """Make modules compute path by path whenever a decoder layer receives a `roll_plan`."""
    current: list[_Plan | None] = [None]

    def remember(layer: nn.Module, args: Any, kwargs: Any) -> None:
        current[0] = kwargs.get("roll_plan")

    for layer in decoder_of(model).layers:
        layer.register_forward_pre_hook(remember, with_kwargs=True)
    for mixer in mixers:
        mixer.forward = _by_path(mixer.forward, current)


def _by_path(plain: Callable[..., Any], current: list[_Plan | None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("roll_plan", None)
        plan, hidden = current[0], first_tensor(args, kwargs)
        if plan is None:
            return plain(*args, **kwargs)
        if plan.share.cp is not None:
            raise ModelError(
                "this model's recurrent layers need a text's tokens one after the other: set training.parallel.cp to 1"
            )
        paths = plan.paths
        assert hidden.shape[:2] == (1, len(paths.source))
        output = plain(*map(paths.split, args), **{name: paths.split(x) for name, x in kwargs.items()})
        if isinstance(output, tuple):
            return paths.merge(output[0]), *output[1:]
        return paths.merge(output)

    return forward
