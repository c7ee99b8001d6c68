"""Attention over a packed row: a segment attends only to its ancestors and itself.

HF models call `packed_attention` instead of their own attention (it is registered as `roll_packed`) with the
`AttentionPlan` of the micro-batch, built once for all layers. A plan is a list of independent calls, chosen by cost:

    dense    small blocks, batched: plain matrix products under a mask
    causal   longer plain sequences and roots of trees, batched by similar length
    shared   branches of all trees, batched by similar length, each after its ancestors' keys

Causal and longer shared calls are blocked products on a CPU (see `products`), and SDPA elsewhere. Padding exists only
inside a call and is never attended to: it follows its sequence, and attention is causal.

Plain attention in half precision needs no such calls: the whole row is computed by `torch.nn.attention.varlen` on CUDA,
and by `native.attend` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError, UnsupportedError
from roll.models import AttentionForm, AttentionSpan, attention_form, position_scale, read_mask_span
from roll.training.attention.calls import Call, CausalCall, DenseCall, Prefixes, RowIndex, TreeCall, compute
from roll.training.attention.mixers import Paths
from roll.training.attention.native import Rotation, attend, build_tree_ranges, native_attention_supported, rotate
from roll.training.attention.varlen import MAX_HEAD_DIM, VarlenPlan, varlen_attention, varlen_supported
from roll.training.packing.layout import Int64Array, PackedLayout, Tree
from roll.training.parallel.tokens import WHOLE, TokenShare

__all__ = ["ATTENTION", "AttentionPlan", "Observer", "blocked_supported", "packed_attention", "register_attention"]

ATTENTION = "roll_packed"

SMALL_TOKENS = 96
"""Largest tree that is not cut into segments."""

DENSE_TOKENS = 224
"""Longest sequence for dense products. Measured on two AVX-512 cores with 9 heads of 64, forward and backward: at 110
tokens 0.9 ms, SDPA 2.8 ms; at 300 tokens 6.9 ms, SDPA 5.1 ms."""

DENSE_PAIRS = 2**14
"""Largest number of query-key pairs of one segment for dense products."""

LENGTH_RATIO = 0.75
"""Smallest length of a sequence in a batch, relative to the longest one."""


class Observer(Protocol):
    """Observes the attention of some layers."""

    def is_observed(self, layer: int) -> bool:
        """Return whether to observe this layer; layers are counted in the order in which they run."""
        ...

    def observe(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        """Receive queries [N, H, d] and keys [N, K, d] of the next observed layer, the scale of its scores, its
        sliding window.
        """
        ...


class _Branch(NamedTuple):
    """A chain of segments below another segment, each of which continues the previous one."""

    parent: tuple[int, int]
    """The start of the tree, and the number of the last ancestor segment."""
    context: Int64Array
    """The entries of the ancestors in the row."""
    own: Int64Array
    """The entries of the branch itself."""


class AttentionPlan:
    """The plan of one micro-batch's attention. Built once, used by every layer.

    Args:
        layout: The packed row.
        device: The device of the network.
        dtype: The dtype of queries, keys and values.
        observer: An observer that receives queries and keys of some layers.
        share: This rank's share of the tokens.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        dtype: torch.dtype,
        observer: Observer | None = None,
        share: TokenShare = WHOLE,
    ) -> None:
        self.share = share
        self.observer = observer
        self.num_calls = 0
        """The number of attention layers that have run so far."""
        self.longest = int(layout.position_ids.max()) + 1
        self.varlen = VarlenPlan(layout, device) if varlen_supported(device, dtype) else None
        self.tree_ranges = build_tree_ranges(layout) if native_attention_supported(device, dtype) else None
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._blocked = blocked_supported(device)
        self.uses = share.local_tokens(layout, layout.uses).to(device)
        """The number of samples that use each of the tokens whose experts this rank computes."""
        self.experts = None if layout.experts is None else share.local_tokens(layout, layout.experts).to(device)
        self._paths: Paths | None = None
        self.positions = torch.from_numpy(layout.position_ids).to(device)
        self._calls: dict[tuple[AttentionSpan, bool], list[Call]] = {}

    @property
    def paths(self) -> Paths:
        """The row's texts, for layers without attention."""
        if self._paths is None:
            self._paths = Paths(self._layout, self._device)
        return self._paths

    def next_observer(self) -> Observer | None:
        """Return the observer if it observes the layer that is about to run, and count that layer as run."""
        layer, self.num_calls = self.num_calls, self.num_calls + 1
        return self.observer if self.observer is not None and self.observer.is_observed(layer) else None

    def calls(self, form: AttentionForm) -> list[Call]:
        """Return the calls that compute a layer, built once for each form."""
        reach, dense = form.span.limit_to(self.longest), not (form.is_plain or self._blocked)
        if (reach, dense) not in self._calls:
            self._calls[reach, dense] = self._plan(reach, dense)
        return self._calls[reach, dense]

    def fused_rotary_form(
        self, module: Any, mask: Any, window: int | None, given: dict[str, Any]
    ) -> AttentionForm | None:
        """Return the form of a layer that `attend_rotated` supports, and `None` for any other; see `attention_form`."""
        if self.share.cp is not None or getattr(module, "attn_temperature_tuning", False):
            return None
        form = attention_form(module, module.head_dim, mask, getattr(module, "scaling", None), window, given)
        return form if self.is_native(form) else None

    def is_native(self, form: AttentionForm) -> bool:
        """Return whether the CPU kernel (`native.attend`) supports a layer."""
        plain = form.is_plain and form.scale > 0 and form.span.limit_to(self.longest) == AttentionSpan()
        return plain and self.tree_ranges is not None

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm, rotation: Rotation) -> Tensor:
        """Compute the attention [N, H, w] of a layer from queries, keys and values [N, h, d] before their rotation."""
        assert self.tree_ranges is not None
        observer = self.next_observer()
        if observer is not None:
            observer.observe(rotate(q, rotation), rotate(k, rotation), form.scale, None)
        return attend(q, k, v, self.tree_ranges, form.scale, rotation)

    def _plan(self, reach: AttentionSpan, dense: bool) -> list[Call]:
        if reach != AttentionSpan() or dense:  # only dense calls support any mask and soft caps
            return [self._dense([tree], reach) for tree in self._layout.blocks]
        whole: list[Tree] = []
        plain: list[Int64Array] = []
        branches: list[_Branch] = []
        for tree in self._layout.blocks:
            root = tree.segments[0]
            if tree.num_tokens <= SMALL_TOKENS:
                whole.append(tree)
                continue
            if root.length <= DENSE_TOKENS:
                whole.append(Tree(segments=(root,)))
            else:
                plain.append(root.start + np.arange(root.length))
            branches += _branches(tree)
        calls: list[Call] = [
            self._dense(batch, AttentionSpan()) for batch in _batch_by_length(whole, [t.num_tokens for t in whole])
        ]
        calls += [
            CausalCall(rows=self._rows(batch), blocked=self._blocked)
            for batch in _batch_by_length(plain, [len(own) for own in plain])
        ]
        for batch in _batch_by_length(branches, [len(branch.own) for branch in branches]):
            calls += [self._shared(b) for b in _batch_by_length(batch, [len(b.context) for b in batch])]
        return calls

    def _shared(self, branches: Sequence[_Branch]) -> TreeCall:
        """Build the call of branches of similar length; the branches of one tree stay adjacent, in their order."""
        branches = sorted(branches, key=lambda branch: branch.own[0])
        contexts = dict(sorted({branch.parent: branch.context for branch in branches}.items()))
        rows, before = self._rows([branch.own for branch in branches]), self._rows(list(contexts.values()))
        lengths = np.array([len(branch.context) for branch in branches])
        sees_context = np.arange(before.size[1]) < lengths[:, None]
        (size, n), p = rows.size, before.size[1]
        dense = n * (p + n) <= DENSE_PAIRS
        if self._blocked and not dense:
            bias = self._bias(sees_context)
        else:
            sees_own = np.tri(n, dtype=np.bool_)
            parts = [np.broadcast_to(sees_context[:, None], (size, n, p)), np.broadcast_to(sees_own, (size, n, n))]
            bias = self._bias(np.concatenate(parts, axis=2))[:, None, None]
        tree_ranges = {parent: i for i, parent in enumerate(contexts)}
        owners = np.array([tree_ranges[branch.parent] for branch in branches])
        return TreeCall(
            rows=rows,
            prefixes=Prefixes(
                rows=before,
                owners=self._tensor(owners),
                overlap=any(number for _, number in contexts),  # prefixes overlap if they extend beyond roots
            ),
            how="dense" if dense else "blocked" if self._blocked else "sdpa",
            bias=bias,
        )

    def _rows(self, sequences: Sequence[Int64Array]) -> RowIndex:
        longest = max(map(len, sequences))
        index = np.stack([own[np.minimum(np.arange(longest), len(own) - 1)] for own in sequences])
        members = np.concatenate(sequences)
        inverse = np.concatenate([i * longest + np.arange(len(own)) for i, own in enumerate(sequences)])
        order = np.argsort(members, kind="stable")
        return RowIndex(
            index=self._tensor(index.reshape(-1)),
            members=self._tensor(members[order]),
            inverse=self._tensor(inverse[order]),
            size=(len(sequences), longest),
        )

    def _dense(self, trees: Sequence[Tree], reach: AttentionSpan) -> DenseCall:
        rows = self._rows([tree.start + np.arange(tree.num_tokens) for tree in trees])
        visible = np.stack([_tree_mask(tree, rows.size[1], reach) for tree in trees])
        return DenseCall(rows=rows, bias=self._bias(visible)[:, None, None])

    def _bias(self, visible: np.ndarray) -> Tensor:
        """Return a mask as a bias to add to scores: 0 where visible, else -inf."""
        bias = torch.zeros(visible.shape, dtype=torch.promote_types(self._dtype, torch.float32))
        bias.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return bias.to(self._device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def blocked_supported(device: torch.device) -> bool:
    """Return whether the device gains from tiles with their many small matrix products: only CPUs do."""
    return device.type == "cpu"


def _branches(tree: Tree) -> list[_Branch]:
    """Return the branches of a tree without its root. A segment that directly follows its parent extends the parent's
    branch.
    """
    branches: list[_Branch] = []
    for i, (segment, context) in enumerate(zip(tree.segments, tree.contexts(), strict=True)):
        own = segment.start + np.arange(segment.length)
        if i > 1 and segment.parent == i - 1:
            branches[-1] = branches[-1]._replace(own=np.concatenate([branches[-1].own, own]))
        elif i:
            branches.append(_Branch((tree.start, segment.parent), context, own))
    return branches


def _batch_by_length(items: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Group items into batches of similar length, longest first."""
    batches: list[list[Any]] = []
    longest = 0
    for i in sorted(range(len(items)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[i] < LENGTH_RATIO * longest:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(items[i])
    return batches


def _tree_mask(tree: Tree, size: int, reach: AttentionSpan) -> np.ndarray:
    """Return the mask [size, size] of a tree: True where entry i may attend to entry j.

    No entry attends to padding, and padding attends to entry 0.
    """
    owner = np.repeat(np.arange(len(tree.segments)), [s.length for s in tree.segments])
    position = np.concatenate([s.position + np.arange(s.length) for s in tree.segments])
    visible = tree.ancestor_mask()[owner[:, None], owner[None, :]]
    visible &= reach.is_visible(position[:, None], position[None, :])
    mask = np.zeros((size, size), dtype=np.bool_)
    mask[:, 0] = True
    mask[: len(owner), : len(owner)] = visible
    return mask


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    roll_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that HF models call.

    Args:
        module: The layer's attention module.
        query: The queries [1, H, N, d].
        key: The keys [1, K, N, d], with H a multiple of K.
        value: The values [1, K, N, w].
        attention_mask: The result of `read_mask_span`; the plan holds the mask of the packed row.
        scaling: The scale of the scores; by default 1 / sqrt(d).
        roll_plan: The plan of the micro-batch; the trainer passes it through the model.
        sliding_window: The window of this layer, in tokens.
        kwargs: See `attention_form`.

    Returns:
        The attention [1, N, H, w], and `None` for the attention weights.

    Raises:
        ModelError: the model's attention needs a feature that packing does not support.
        UnsupportedError: the observer does not support this attention.
    """
    if roll_plan is None:
        raise ModelError(f"attention '{ATTENTION}' only supports training: load the model with another one to generate")
    observer = roll_plan.next_observer()
    form = attention_form(module, query.shape[-1], attention_mask, scaling, sliding_window, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    share = roll_plan.share
    if share.cp is not None:
        if form.sinks is not None or getattr(module, "attn_temperature_tuning", False):
            raise ModelError(
                f"{type(module).__name__} has attention sinks or scales queries by position in the row, so context "
                "parallelism cannot divide tokens: set training.parallel.cp to 1"
            )
        q, k, v = (share.all_to_all_heads(x) for x in (q, k, v))
    own = position_scale(module, roll_plan.positions, q.dtype)
    if own is not None:
        q = (q * own[:, None, None]).to(q.dtype)
    reach = form.span.limit_to(roll_plan.longest)
    if observer is not None:
        if not form.is_plain or reach.chunk is not None:
            raise UnsupportedError(
                "attention credit supports plain softmax attention only, but this model has sinks, soft caps or "
                "chunks: choose another algorithm.credit.type than local, global or coupled"
            )
        observer.observe(q, k, form.scale, reach.window)
    result = _attend(roll_plan, q, k, v, form)
    return (result if share.cp is None else share.all_to_all_tokens(result))[None], None


def _attend(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
    """Compute the attention [N, H, d] of the whole row with the fastest kernel that supports it."""
    reach = form.span.limit_to(plan.longest)
    if plan.varlen is not None and form.is_plain and reach.chunk is None and q.shape[-1] <= MAX_HEAD_DIM:
        return varlen_attention(q, k, v, plan.varlen, form.scale, reach.window)
    if plan.tree_ranges is not None and plan.is_native(form):
        return attend(q, k, v, plan.tree_ranges, form.scale)
    calls = plan.calls(form)
    parts = [compute(call, q, k, v, form) for call in calls]
    if len(calls) == 1 and len(calls[0].rows.members) == len(q):
        return parts[0].index_select(0, calls[0].rows.inverse)
    return _assemble(parts, calls, len(q))


def _assemble(parts: list[Tensor], calls: list[Call], length: int) -> Tensor:
    """Assemble the results [B * n, H, d] of the calls into one row [N, H, d]."""
    source = torch.cat([part.index_select(0, c.rows.inverse) for part, c in zip(parts, calls, strict=True)])
    order = torch.empty(length, dtype=torch.int64, device=source.device)
    order[torch.cat([call.rows.members for call in calls])] = torch.arange(length, device=source.device)
    return source.index_select(0, order)


def register_attention() -> str:
    """Register `roll_packed` with transformers and return its name. May be called repeatedly."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, read_mask_span)
    return ATTENTION
