"""The attention plan of a micro-batch: the calls that compute a packed row's attention, and their index tensors.

A plan is built on the CPU, together with the other inputs of the network, so that one copy moves everything to the
device. Some calls depend on a layer's span and softmax, which are known only when the layer runs. `PlanNeeds` therefore
records the requests of a model's layers, and the plan of the next micro-batch contains these tensors from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roll.models import AttentionParams, AttentionSpan, read_attention_params
from roll.models.transfers import move_to_device, to_tensor
from roll.training.attention.calls import Call, CausalCall, DenseCall, Prefixes, RowIndex, TreeCall
from roll.training.attention.mixers import Paths, build_paths
from roll.training.attention.native import (
    Rotation,
    TreeRanges,
    attend,
    build_tree_ranges,
    is_native_attention_supported,
    rotate,
)
from roll.training.attention.varlen import VarlenPlan, build_varlen_plan, is_varlen_supported
from roll.training.packing.layout import Int64Array, PackedLayout, Tree
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard

__all__ = [
    "AttentionObserver",
    "AttentionPlan",
    "PlanBuilder",
    "PlanNeeds",
    "PlanTensors",
    "build_plan",
    "is_blocked_attention_faster",
]

CallKey: TypeAlias = tuple[AttentionSpan, bool]
"""The span of some layers' attention, and whether only dense calls support their softmax."""

MAX_TREE_TOKENS = 96
"""Maximum number of tokens of a tree that is not split into segments."""

MAX_DENSE_TOKENS = 224
"""Maximum length of a sequence for dense products, in tokens. Measured on two AVX-512 cores with 9 heads of 64, forward
and backward: at 110 tokens 0.9 ms, SDPA 2.8 ms; at 300 tokens 6.9 ms, SDPA 5.1 ms."""

MAX_DENSE_PAIRS = 2**14
"""Maximum number of query-key pairs of one segment for dense products."""

MIN_LENGTH_RATIO = 0.75
"""Minimum length of a sequence in a batch of sequences, relative to the longest one."""


class AttentionObserver(Protocol):
    """Observes the attention of some layers."""

    def is_observed(self, layer: int) -> bool:
        """Return whether to observe this layer; layers are counted in the order in which they run."""
        ...

    def observe(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        """Receive queries [N, H, d] and keys [N, K, d] of the next observed layer, the scale of its scores, and its
        sliding window.
        """
        ...


class _Branch(NamedTuple):
    """A chain of consecutive segments that branches off from `parent`."""

    parent: tuple[int, int]
    """The start of the tree, and the index of the last ancestor segment."""
    context: Int64Array
    """The entries of the ancestors in the row."""
    own_entries: Int64Array
    """The entries of the branch itself."""


@dataclass(slots=True)
class PlanNeeds:
    """Records which tensors the layers of a model have requested from their plans."""

    calls: set[CallKey] = field(default_factory=set)
    """Spans are those of the layers, not limited to the length of a row."""
    paths: bool = False
    """True if layers process each path as a separate sequence."""


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """The index tensors of a plan."""

    uses: Tensor
    """The number of samples that share a token, for each token whose experts this rank computes."""
    positions: Tensor
    """The positions of the row's tokens [N]."""
    experts: Tensor | None
    """The replayed experts of the tokens of `uses`; `None` without router replay."""
    varlen: VarlenPlan | None
    calls: dict[CallKey, list[Call]]
    """Calls by span, limited to the length of the row: layers with equal spans share calls."""
    paths: Paths | None


class PlanBuilder:
    """Builds the tensors of a micro-batch's plan on the CPU.

    Args:
        layout: The packed row.
        device: The device of the network.
        dtype: The dtype of queries, keys and values.
        shard: This rank's shard of the tokens.
        images: The number of each token's image, shape [N], 0 for text; only for models whose image tokens also attend
            to later tokens of the same image.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        dtype: torch.dtype,
        shard: TokenShard = WHOLE_ROW,
        images: Int64Array | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.share = shard
        self.images = images
        self.longest = int(layout.position_ids.max()) + 1
        self.blocked = is_blocked_attention_faster(device)

    @cached_property
    def tree_ranges(self) -> TreeRanges | None:
        """The token ranges for the CPU kernel (`native.attend`), if it supports the row."""
        is_native = is_native_attention_supported(self.device, self.dtype) and self.images is None
        return build_tree_ranges(self.layout) if is_native else None

    def build(self, needs: PlanNeeds) -> PlanTensors:
        """Build the tensors of the plan, including the calls and paths in `needs`."""
        layout, share = self.layout, self.share
        is_varlen = is_varlen_supported(self.device, self.dtype) and self.images is None
        return PlanTensors(
            uses=to_tensor(share.select_local_tokens(layout, layout.uses)),
            positions=to_tensor(layout.position_ids),
            experts=None if layout.experts is None else to_tensor(share.select_local_tokens(layout, layout.experts)),
            varlen=build_varlen_plan(layout) if is_varlen else None,
            calls={key: self.build_calls(*key) for key in {self.limit(key) for key in needs.calls}},
            paths=build_paths(layout) if needs.paths else None,
        )

    def limit(self, key: CallKey) -> CallKey:
        """Return the key with its span limited to the longest sequence of the row."""
        return key[0].limit_to(self.longest), key[1]

    def build_calls(self, span: AttentionSpan, dense: bool) -> list[Call]:
        """Return the attention calls for a span that `limit` has returned; only dense calls if `dense`."""
        # Only dense calls support arbitrary masks and soft caps.
        if span != AttentionSpan() or dense or self.images is not None:
            return [self._build_dense_call([tree], span) for tree in self.layout.blocks]
        whole: list[Tree] = []
        plain: list[Int64Array] = []
        branches: list[_Branch] = []
        for tree in self.layout.blocks:
            root = tree.segments[0]
            if tree.num_tokens <= MAX_TREE_TOKENS:
                whole.append(tree)
                continue
            if root.length <= MAX_DENSE_TOKENS:
                whole.append(Tree(segments=(root,)))
            else:
                plain.append(root.start + np.arange(root.length))
            branches += _split_into_branches(tree)
        calls: list[Call] = [
            self._build_dense_call(batch, AttentionSpan())
            for batch in _batch_by_length(whole, [t.num_tokens for t in whole])
        ]
        calls += [
            CausalCall(rows=self._build_row_index(batch), blocked=self.blocked)
            for batch in _batch_by_length(plain, [len(entries) for entries in plain])
        ]
        # By length of the branch, then of the context: both dimensions of a call are padded to the longest.
        for batch in _batch_by_length(branches, [len(branch.own_entries) for branch in branches]):
            calls += [self._build_tree_call(b) for b in _batch_by_length(batch, [len(b.context) for b in batch])]
        return calls

    def _build_tree_call(self, branches: Sequence[_Branch]) -> TreeCall:
        """Build one attention call for branches of similar length, ordered as in the row."""
        branches = sorted(branches, key=lambda branch: branch.own_entries[0])
        contexts = dict(sorted({branch.parent: branch.context for branch in branches}.items()))
        rows, before = (
            self._build_row_index([branch.own_entries for branch in branches]),
            self._build_row_index(list(contexts.values())),
        )
        lengths = np.array([len(branch.context) for branch in branches])
        sees_context = np.arange(before.size[1]) < lengths[:, None]
        (size, n), p = rows.size, before.size[1]
        dense = n * (p + n) <= MAX_DENSE_PAIRS
        if self.blocked and not dense:
            bias = self._build_bias(sees_context)
        else:
            sees_own = np.tri(n, dtype=np.bool_)
            parts = [np.broadcast_to(sees_context[:, None], (size, n, p)), np.broadcast_to(sees_own, (size, n, n))]
            bias = self._build_bias(np.concatenate(parts, axis=2))[:, None, None]
        numbers = {parent: i for i, parent in enumerate(contexts)}
        owners = np.array([numbers[branch.parent] for branch in branches])
        return TreeCall(
            rows=rows,
            prefixes=Prefixes(
                rows=before,
                owners=to_tensor(owners),
                overlap=any(number for _, number in contexts),  # prefixes overlap if they extend beyond roots
            ),
            kernel="dense" if dense else "blocked" if self.blocked else "sdpa",
            bias=bias,
        )

    def _build_row_index(self, sequences: Sequence[Int64Array]) -> RowIndex:
        longest = max(map(len, sequences))
        index = np.stack([entries[np.minimum(np.arange(longest), len(entries) - 1)] for entries in sequences])
        members = np.concatenate(sequences)
        inverse = np.concatenate([i * longest + np.arange(len(entries)) for i, entries in enumerate(sequences)])
        order = np.argsort(members, kind="stable")
        return RowIndex(
            index=to_tensor(index.reshape(-1)),
            members=to_tensor(members[order]),
            inverse=to_tensor(inverse[order]),
            size=(len(sequences), longest),
        )

    def _build_dense_call(self, trees: Sequence[Tree], span: AttentionSpan) -> DenseCall:
        rows = self._build_row_index([tree.start + np.arange(tree.num_tokens) for tree in trees])
        visible = np.stack([_build_tree_mask(tree, rows.size[1], span, self.images) for tree in trees])
        return DenseCall(rows=rows, bias=self._build_bias(visible)[:, None, None])

    def _build_bias(self, visible: np.ndarray) -> Tensor:
        """Return the bias that masks scores: 0 where `visible` is true, else -inf."""
        bias = torch.zeros(visible.shape, dtype=torch.promote_types(self.dtype, torch.float32))
        bias.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return bias


class AttentionPlan:
    """The plan of a micro-batch's attention, used by every layer.

    Args:
        builder: The builder of the plan.
        tensors: The tensors of the plan, on the device of the network.
        needs: The requests of the model's layers, which this plan extends.
        observer: An observer that receives queries and keys of some layers.
    """

    def __init__(
        self, builder: PlanBuilder, tensors: PlanTensors, needs: PlanNeeds, observer: AttentionObserver | None = None
    ) -> None:
        self.share = builder.share
        self.images = builder.images
        self.longest = builder.longest
        self.observer = observer
        self.num_calls = 0
        """The number of attention layers that have run so far."""
        self.uses, self.experts, self.positions = tensors.uses, tensors.experts, tensors.positions
        self.varlen = tensors.varlen
        self.tree_ranges = builder.tree_ranges
        self._builder = builder
        self._tensors = tensors
        self._needs = needs
        self._calls = tensors.calls
        self._paths = tensors.paths

    def drop_experts(self) -> AttentionPlan:
        """Return the same plan for a frozen model of the same architecture: without experts and without observer."""
        tensors = replace(self._tensors, experts=None, calls=self._calls, paths=self._paths)
        return AttentionPlan(self._builder, tensors, self._needs)

    @property
    def paths(self) -> Paths:
        """The row's root-to-leaf paths, for recurrent layers."""
        if self._paths is None:
            self._needs.paths = True
            self._paths = move_to_device(build_paths(self._builder.layout), self._builder.device)
        return self._paths

    def advance_observer(self) -> AttentionObserver | None:
        """Advance to the next layer; return the observer if it observes this layer, otherwise `None`."""
        layer, self.num_calls = self.num_calls, self.num_calls + 1
        return self.observer if self.observer is not None and self.observer.is_observed(layer) else None

    def get_calls(self, params: AttentionParams) -> list[Call]:
        """Return a layer's attention calls; layers with the same span and type of calls share the calls."""
        builder = self._builder
        requested = params.span, not (params.is_plain or builder.blocked)
        self._needs.calls.add(requested)
        key = builder.limit(requested)
        if key not in self._calls:
            self._calls[key] = move_to_device(builder.build_calls(*key), builder.device)
        return self._calls[key]

    def find_fused_rotary_params(
        self, module: Any, mask: Any, window: int | None, kwargs: dict[str, Any]
    ) -> AttentionParams | None:
        """Return a module's attention parameters, or `None` if `attend_with_rope` does not support the module."""
        if self.share.cp is not None or getattr(module, "attn_temperature_tuning", False):
            return None
        params = read_attention_params(module, module.head_dim, mask, getattr(module, "scaling", None), window, kwargs)
        return params if self.is_native_supported(params) else None

    def is_native_supported(self, params: AttentionParams) -> bool:
        """Return whether the CPU kernel (`native.attend`) supports these parameters on the plan's device."""
        plain = params.is_plain and params.scale > 0 and params.span.limit_to(self.longest) == AttentionSpan()
        return plain and self.tree_ranges is not None

    def attend_with_rope(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, rotation: Rotation) -> Tensor:
        """Compute a layer's attention [N, H, w], including RoPE, from queries, keys and values [N, h, d] before
        RoPE.
        """
        assert self.tree_ranges is not None
        observer = self.advance_observer()
        if observer is not None:
            observer.observe(rotate(q, rotation), rotate(k, rotation), params.scale, None)
        return attend(q, k, v, self.tree_ranges, params.scale, rotation)


def build_plan(
    layout: PackedLayout, device: torch.device, dtype: torch.dtype, observer: AttentionObserver | None = None
) -> AttentionPlan:
    """Return the plan of a row, for callers that need no other input on the device; see `PlanBuilder`."""
    builder, needs = PlanBuilder(layout, device, dtype), PlanNeeds()
    return AttentionPlan(builder, move_to_device(builder.build(needs), device), needs, observer)


def is_blocked_attention_faster(device: torch.device) -> bool:
    """Return whether blocked attention, with its many small matmuls, is faster than SDPA: only on CPUs."""
    return device.type == "cpu"


def _split_into_branches(tree: Tree) -> list[_Branch]:
    """Return the branches of a tree without its root. A segment that directly follows its parent extends the parent's
    branch.
    """
    branches: list[_Branch] = []
    for i, (segment, context) in enumerate(zip(tree.segments, tree.list_contexts(), strict=True)):
        entries = segment.start + np.arange(segment.length)
        if i > 1 and segment.parent == i - 1:
            branches[-1] = branches[-1]._replace(own_entries=np.concatenate([branches[-1].own_entries, entries]))
        elif i:
            branches.append(_Branch((tree.start, segment.parent), context, entries))
    return branches


def _batch_by_length(items: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Group items into batches of similar length, longest first."""
    batches: list[list[Any]] = []
    longest = 0
    for i in sorted(range(len(items)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] < MIN_LENGTH_RATIO * longest:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(items[i])
    return batches


def _build_tree_mask(tree: Tree, size: int, span: AttentionSpan, images: Int64Array | None = None) -> np.ndarray:
    """Return the mask [size, size] of a tree, padded to `size`: True where entry i may attend to entry j.

    An entry attends to itself and its ancestors within `span` and, if `images` is given, to all tokens of its image.
    Padding attends to entry 0.
    """
    owner = np.repeat(np.arange(len(tree.segments)), [s.length for s in tree.segments])
    position = np.concatenate([s.position + np.arange(s.length) for s in tree.segments])
    visible = tree.build_ancestor_mask()[owner[:, None], owner[None, :]]
    visible &= span.is_visible(position[:, None], position[None, :])
    if images is not None:
        entries = images[tree.start : tree.start + tree.num_tokens]
        visible |= (entries[:, None] == entries[None, :]) & (entries[:, None] > 0)
    mask = np.zeros((size, size), dtype=np.bool_)
    # The softmax of a row in which nothing is visible would be NaN.
    mask[:, 0] = True
    mask[: len(owner), : len(owner)] = visible
    return mask
