"""Attention over a packed row: a segment attends only to its ancestors and itself.

HF models call `packed_attention` instead of their own attention (it is registered as `roll_packed`) with the
`AttentionPlan` of the micro-batch, built once for all layers. A plan is a list of independent calls, chosen by cost:

    dense    small blocks, batched: plain matmuls with a mask
    causal   longer plain sequences and roots of trees, batched by similar length
    shared   branches of all trees, batched by similar length, each after its ancestors' keys

Causal and longer shared calls are blocked products on a CPU (see `matmul_attention`), and SDPA elsewhere. Padding
exists only inside a call and is never attended to: it follows its sequence, and attention is causal.

Plain attention in half precision needs no such calls: `torch.nn.attention.varlen` on CUDA, and
`native.attend` on a CPU, compute the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError, UnsupportedError
from roll.models import AttentionParams, AttentionSpan, compute_position_scale, read_attention_params, read_mask_span
from roll.training.attention.calls import Call, CausalCall, DenseCall, Prefixes, RowIndex, TreeCall, compute_call
from roll.training.attention.mixers import Paths
from roll.training.attention.native import Rotation, attend, build_tree_ranges, is_native_attention_supported, rotate
from roll.training.attention.varlen import MAX_HEAD_DIM, VarlenPlan, is_varlen_supported, varlen_attention
from roll.training.packing.layout import Int64Array, PackedLayout, Tree
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.training.transfers import to_device

__all__ = [
    "ATTENTION_NAME",
    "AttentionObserver",
    "AttentionPlan",
    "is_blocked_attention_faster",
    "packed_attention",
    "register_attention",
]

ATTENTION_NAME = "roll_packed"

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


class AttentionPlan:
    """The plan of a micro-batch's attention, built once and used by every layer.

    Args:
        layout: The packed row.
        device: The device of the network.
        dtype: The dtype of queries, keys and values.
        observer: An observer that receives queries and keys of some layers.
        shard: This rank's shard of the tokens.
        images: The number of each token's image, shape [N], 0 for text; only for models whose image tokens also attend
            to later tokens of the same image.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device,
        dtype: torch.dtype,
        observer: AttentionObserver | None = None,
        shard: TokenShard = WHOLE_ROW,
        images: Int64Array | None = None,
    ) -> None:
        self.share = shard
        self.images = images
        self.observer = observer
        self.num_calls = 0
        """The number of attention layers that have run so far."""
        self.longest = int(layout.position_ids.max()) + 1
        self.varlen = VarlenPlan(layout, device) if is_varlen_supported(device, dtype) and images is None else None
        is_native = is_native_attention_supported(device, dtype) and images is None
        self.tree_ranges = build_tree_ranges(layout) if is_native else None
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._blocked = is_blocked_attention_faster(device)
        self.uses = to_device(shard.select_local_tokens(layout, layout.uses), device)
        """The number of samples that share each of the tokens whose experts this rank computes."""
        routed = None if layout.experts is None else shard.select_local_tokens(layout, layout.experts)
        self.experts = None if routed is None else to_device(routed, device)
        self._paths: Paths | None = None
        self.positions = to_device(layout.position_ids, device)
        self._calls: dict[tuple[AttentionSpan, bool], list[Call]] = {}

    @property
    def paths(self) -> Paths:
        """The row's root-to-leaf paths, for recurrent layers."""
        if self._paths is None:
            self._paths = Paths(self._layout, self._device)
        return self._paths

    def advance_observer(self) -> AttentionObserver | None:
        """Advance to the next layer; return the observer if it observes this layer, otherwise `None`."""
        layer, self.num_calls = self.num_calls, self.num_calls + 1
        return self.observer if self.observer is not None and self.observer.is_observed(layer) else None

    def get_calls(self, params: AttentionParams) -> list[Call]:
        """Return a layer's attention calls; layers with the same span and type of calls share the calls."""
        span, dense = params.span.limit_to(self.longest), not (params.is_plain or self._blocked)
        if (span, dense) not in self._calls:
            self._calls[span, dense] = self._build_calls(span, dense)
        return self._calls[span, dense]

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

    def _build_calls(self, span: AttentionSpan, dense: bool) -> list[Call]:
        # Only dense calls support arbitrary masks and soft caps.
        if span != AttentionSpan() or dense or self.images is not None:
            return [self._build_dense_call([tree], span) for tree in self._layout.blocks]
        whole: list[Tree] = []
        plain: list[Int64Array] = []
        branches: list[_Branch] = []
        for tree in self._layout.blocks:
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
            CausalCall(rows=self._build_row_index(batch), blocked=self._blocked)
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
        if self._blocked and not dense:
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
                owners=to_device(owners, self._device),
                overlap=any(number for _, number in contexts),  # prefixes overlap if they extend beyond roots
            ),
            kernel="dense" if dense else "blocked" if self._blocked else "sdpa",
            bias=bias,
        )

    def _build_row_index(self, sequences: Sequence[Int64Array]) -> RowIndex:
        longest = max(map(len, sequences))
        index = np.stack([entries[np.minimum(np.arange(longest), len(entries) - 1)] for entries in sequences])
        members = np.concatenate(sequences)
        inverse = np.concatenate([i * longest + np.arange(len(entries)) for i, entries in enumerate(sequences)])
        order = np.argsort(members, kind="stable")
        return RowIndex(
            index=to_device(index.reshape(-1), self._device),
            members=to_device(members[order], self._device),
            inverse=to_device(inverse[order], self._device),
            size=(len(sequences), longest),
        )

    def _build_dense_call(self, trees: Sequence[Tree], span: AttentionSpan) -> DenseCall:
        rows = self._build_row_index([tree.start + np.arange(tree.num_tokens) for tree in trees])
        visible = np.stack([_build_tree_mask(tree, rows.size[1], span, self.images) for tree in trees])
        return DenseCall(rows=rows, bias=self._build_bias(visible)[:, None, None])

    def _build_bias(self, visible: np.ndarray) -> Tensor:
        """Return the bias that masks scores: 0 where `visible` is true, else -inf."""
        bias = torch.zeros(visible.shape, dtype=torch.promote_types(self._dtype, torch.float32))
        bias.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return to_device(bias, self._device)


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
        attention_mask: The result of `read_mask_span`; the plan contains the mask of the packed row.
        scaling: The scale of the scores; by default 1 / sqrt(d).
        roll_plan: The plan of the micro-batch; the trainer passes it through the model.
        sliding_window: The window of this layer, in tokens.
        kwargs: See `read_attention_params`.

    Returns:
        The attention [1, N, H, w], and `None` for the attention weights.

    Raises:
        ModelError: The model's attention needs a feature that packing does not support.
        UnsupportedError: The observer does not support this attention.
    """
    if roll_plan is None:
        raise ModelError(f"attention '{ATTENTION_NAME}' is only for training: to generate, load the model without it")
    observer = roll_plan.advance_observer()
    params = read_attention_params(module, query.shape[-1], attention_mask, scaling, sliding_window, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    share = roll_plan.share
    if share.cp is not None:
        if params.sinks is not None or getattr(module, "attn_temperature_tuning", False):
            raise ModelError(
                f"{type(module).__name__} has attention sinks or scales queries by position in the row, so context "
                "parallelism cannot split its rows: set training.parallel.cp to 1"
            )
        # Ulysses (arXiv 2309.14509): each rank exchanges its tokens of all heads for all tokens of some heads.
        q, k, v = (share.all_to_all_heads(x) for x in (q, k, v))
    position_scale = compute_position_scale(module, roll_plan.positions, q.dtype)
    if position_scale is not None:
        q = (q * position_scale[:, None, None]).to(q.dtype)
    span = params.span.limit_to(roll_plan.longest)
    if observer is not None:
        if not params.is_plain or span.chunk is not None or roll_plan.images is not None:
            raise UnsupportedError(
                "attention credit supports plain causal softmax attention only, but this model has sinks, soft caps, "
                "chunks or bidirectional images: choose an algorithm.credit.type other than local, global or coupled"
            )
        observer.observe(q, k, params.scale, span.window)
    result = _attend_by_plan(roll_plan, q, k, v, params)
    return (result if share.cp is None else share.all_to_all_tokens(result))[None], None


def _attend_by_plan(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Compute the attention [N, H, d] of the whole row with the fastest kernel that supports it."""
    span = params.span.limit_to(plan.longest)
    if plan.varlen is not None and params.is_plain and span.chunk is None and q.shape[-1] <= MAX_HEAD_DIM:
        return varlen_attention(q, k, v, plan.varlen, params.scale, span.window)
    if plan.tree_ranges is not None and plan.is_native_supported(params):
        return attend(q, k, v, plan.tree_ranges, params.scale)
    calls = plan.get_calls(params)
    parts = [compute_call(call, q, k, v, params) for call in calls]
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

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, read_mask_span)
    return ATTENTION_NAME
