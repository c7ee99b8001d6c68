"""Recurrent layers over a packed row: linear attention, state-space models, short convolutions.

    row of trees ─ every path from a root to a leaf as a sequence ─► [B, L, H] ─ the module ─► back to the row

Each path begins with an empty state, so no state passes between sequences. Tokens shared by several paths are computed
in each path, with identical results, and the result of the first path is used. These layers are the only ones that
compute a shared prefix more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from roll.errors import ModelError
from roll.models import get_decoder, get_hidden_states
from roll.models.transfers import to_tensor
from roll.training.packing.layout import PackedLayout, Tree
from roll.training.parallel.tokens import TokenShard

__all__ = ["Paths", "build_paths", "run_mixers_by_path"]


@dataclass(frozen=True, slots=True)
class Paths:
    """The root-to-leaf paths of a packed row's trees, as a padded batch of sequences."""

    index: Tensor
    """The entry of the row at each position [B * L]; padding repeats a path's last entry."""
    source: Tensor
    """The position of each entry of the row in the flattened batch [N]."""
    size: tuple[int, int]
    """The number of paths B and the length L of the longest."""

    def split(self, x: Any) -> Any:
        """Convert row tensors [1, N, …], also inside tuples, to path tensors [B, L, …]; return other values
        unchanged.
        """
        if isinstance(x, tuple):
            return tuple(self.split(part) for part in x)
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != (1, len(self.source)):
            return x
        return x[0].index_select(0, self.index).view(*self.size, *x.shape[2:])

    def merge(self, x: Tensor) -> Tensor:
        """Convert a path tensor [B, L, …] back to a row tensor [1, N, …]."""
        return x.flatten(0, 1).index_select(0, self.source)[None]


def build_paths(layout: PackedLayout) -> Paths:
    """Return the paths of a packed row, with their tensors on the CPU."""
    paths = [path for tree in layout.blocks for path in _iter_paths(tree)]
    longest = max(map(len, paths))
    index = np.stack([path[np.minimum(np.arange(longest), len(path) - 1)] for path in paths])
    source = np.zeros(layout.num_tokens, dtype=np.int64)
    # In reverse, so that a shared token is taken from the first path that contains it.
    for i in reversed(range(len(paths))):
        source[paths[i]] = i * longest + np.arange(len(paths[i]))
    return Paths(index=to_tensor(index.reshape(-1)), source=to_tensor(source), size=(len(paths), longest))


def _iter_paths(tree: Tree) -> Iterable[np.ndarray]:
    parents = {segment.parent for segment in tree.segments}
    for i, (segment, context) in enumerate(zip(tree.segments, tree.list_contexts(), strict=True)):
        if i not in parents:
            yield np.concatenate([context, segment.start + np.arange(segment.length)])


class _Plan(Protocol):
    """The attributes of an `AttentionPlan` that recurrent layers need."""

    share: TokenShard

    @property
    def paths(self) -> Paths: ...


def run_mixers_by_path(model: Any, mixers: Iterable[nn.Module]) -> None:
    """Make the recurrent modules `mixers` of a model process each path of a packed row as a separate sequence.

    This applies to calls of the decoder layers with a `roll_plan`; other calls are unchanged.
    """
    current: list[_Plan | None] = [None]

    def store_plan(layer: nn.Module, args: Any, kwargs: Any) -> None:
        current[0] = kwargs.get("roll_plan")

    for layer in get_decoder(model).layers:
        layer.register_forward_pre_hook(store_plan, with_kwargs=True)
    for mixer in mixers:
        mixer.forward = _wrap_forward(mixer.forward, current)


def _wrap_forward(original_forward: Callable[..., Any], current: list[_Plan | None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Some layers pass the plan on to their modules, which do not accept it.
        kwargs.pop("roll_plan", None)
        plan, hidden = current[0], get_hidden_states(args, kwargs)
        if plan is None:
            return original_forward(*args, **kwargs)
        if plan.share.cp is not None:
            raise ModelError(
                "this model's recurrent layers must process a whole sequence on one rank: set training.parallel.cp to 1"
            )
        paths = plan.paths
        assert hidden.shape[:2] == (1, len(paths.source))
        output = original_forward(*map(paths.split, args), **{name: paths.split(x) for name, x in kwargs.items()})
        if isinstance(output, tuple):
            return paths.merge(output[0]), *output[1:]
        return paths.merge(output)

    return forward
