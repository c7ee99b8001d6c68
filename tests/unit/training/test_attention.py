"""Every way of computing packed attention equals attention written out token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from training_helpers import branching_batch, make_batch, needs_cuda

from roll.errors import ModelError
from roll.models import AttentionParams
from roll.training.attention import matmul_attention, varlen
from roll.training.attention import plan as attention
from roll.training.attention.calls import Prefixes, RowIndex, TreeCall, compute_call
from roll.training.attention.packed import packed_attention
from roll.training.attention.plan import build_plan
from roll.training.packing import blocks
from roll.training.packing.layout import PackedLayout, build_layout
from roll.training.packing.micro_batches import pack

HEADS, GROUPS, WIDTH = 4, 2, 8
WRITTEN_OUT: dict[Any, tuple[PackedLayout, list[Tensor]]] = {}


@cache
def make_layout(seed: int = 0, *, share: bool = True) -> PackedLayout:
    """Blocks of one to five samples of all lengths, some of a single token; and of forks upon forks."""
    samples = [*make_batch(seed, groups=5, group_size=5, prompt=(1, 30), response=(1, 25)).samples[:-4]]
    samples += [replace(s, unit=s.unit + 5) for s in branching_batch(seed, grown=(1, 20)).samples]
    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 4):
        ((micro,),) = pack(samples, max_tokens=10_000, share_prefix=share)
    layout = build_layout(micro)
    assert max(s.parent for tree in layout.blocks for s in tree.segments) >= (2 if share else -1)
    return layout


def visible_rows(layout: PackedLayout, window: int | None) -> list[np.ndarray]:
    """By entry of the row, the entries that it may see: those before it in the samples that it is part of."""
    seen = []
    for block in layout.blocks:
        for segment, context in zip(block.segments, block.list_contexts(), strict=True):
            own = segment.start + np.arange(segment.length)
            seen += [np.concatenate([context, own[: i + 1]]) for i in range(segment.length)]
    return [rows[-window:] if window else rows for rows in seen]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    result = []
    for row, rows in enumerate(visible_rows(layout, window)):
        heads = []
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = scale * k[0, group, rows] @ q[0, head, row]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp() / (scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp()))
            heads.append(weights @ v[0, group, rows])
        result.append(torch.stack(heads))
    return torch.stack(result)[None]


def tensors(layout: PackedLayout, dtype: torch.dtype, device: str = "cpu", groups: int = GROUPS) -> list[Tensor]:
    """Queries, keys, values, and a gradient of the result, in the order of memory that models have."""
    generator = torch.Generator().manual_seed(1)

    def make(heads: int) -> Tensor:
        x = torch.randn(1, layout.num_tokens, heads, WIDTH, generator=generator, dtype=torch.float64)
        return x.to(device, dtype)

    grad = make(HEADS)
    return [*(make(h).transpose(1, 2).requires_grad_() for h in (HEADS, groups, groups)), grad]


def compare(
    layout: PackedLayout, *, dtype: torch.dtype, limit: float, window: int | None = None, groups: int = GROUPS,
    device: str = "cpu",
) -> None:  # fmt: skip
    q, k, v, grad = tensors(layout, dtype, device, groups)
    plan = build_plan(layout, torch.device(device), dtype)
    found, nothing = packed_attention(
        torch.nn.Identity(), q, k, v, None, scaling=0.3, roll_plan=plan, sliding_window=window, is_causal=True
    )
    assert nothing is None
    found.backward(grad)
    expected, *gradients = written_out_once(layout, dtype, groups, window)
    torch.testing.assert_close(found.detach().cpu().double(), expected, rtol=limit, atol=limit)
    for mine, theirs in zip((q, k, v), gradients, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu().double(), theirs, rtol=limit, atol=limit)


def written_out_once(layout: PackedLayout, dtype: torch.dtype, groups: int, window: int | None) -> list[Tensor]:
    """Attention of `tensors`, in float64, and the gradients of queries, keys and values: the same for every way."""
    key = id(layout), dtype, groups, window, WIDTH
    if key not in WRITTEN_OUT:
        *inputs, grad = tensors(layout, dtype, groups=groups)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = written_out(*exact, layout, 0.3, window)
        gradients = torch.autograd.grad(expected, exact, grad.double())
        WRITTEN_OUT[key] = layout, [expected.detach(), *gradients]
    return WRITTEN_OUT[key][1]


@pytest.mark.parametrize(
    ("small_tokens", "dense_tokens", "dense_pairs", "blocked"),
    [
        (0, 0, 0, True),
        (0, 0, 0, False),
        (0, 10, 10_000, True),
        (40, 40, 300, True),
        (40, 40, 300, False),
        (10_000, 10_000, 0, True),
    ],
)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("groups", [GROUPS, HEADS, 1])
@pytest.mark.integration
def test_attention_products_and_sdpa_equal_attention_written_out(
    monkeypatch: pytest.MonkeyPatch, small_tokens: int, dense_tokens: int, dense_pairs: int, blocked: bool, share: bool,
    groups: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention, "is_blocked_attention_faster", lambda device: blocked)
    monkeypatch.setattr(attention, "MAX_TREE_TOKENS", small_tokens)
    monkeypatch.setattr(attention, "MAX_DENSE_TOKENS", dense_tokens)
    monkeypatch.setattr(attention, "MAX_DENSE_PAIRS", dense_pairs)
    compare(make_layout(share=share), dtype=torch.float64, limit=1e-10, groups=groups)


@pytest.mark.parametrize(("rows", "weights"), [(1, 1), (7, 1), (5, 200), (64, 1000)])
def test_attention_blocked_products_in_tiles_of_any_size_equal_attention_written_out(
    monkeypatch: pytest.MonkeyPatch, rows: int, weights: int
) -> None:
    for name in ("MAX_TREE_TOKENS", "MAX_DENSE_TOKENS", "MAX_DENSE_PAIRS"):
        monkeypatch.setattr(attention, name, 0)
    monkeypatch.setattr(matmul_attention, "MAX_TILE_ROWS", rows)
    monkeypatch.setattr(matmul_attention, "MAX_TILE_WEIGHTS", weights)
    compare(make_layout(), dtype=torch.float64, limit=1e-10)


def test_attention_a_branch_that_is_left_on_its_way_is_one_sequence() -> None:
    tokens = np.arange(250, dtype=np.int32)
    tails = [np.full(50, 500 + i, dtype=np.int32) for i in range(4)]
    parts = [tokens[:100], tokens[:150], tokens[:200], tokens]
    contexts = [np.concatenate([part, tail]) for part, tail in zip(parts, tails, strict=True)]
    samples = [replace(make_batch(0).samples[0], unit=0, sample_id=str(i), token_ids=ids, prefix_length=len(part),
                       loss_mask=np.arange(len(ids)) >= len(part), advantages=np.zeros(len(ids), np.float32),
                       rollout_logprobs=np.zeros(len(ids), np.float32))
               for i, (ids, part) in enumerate(zip(contexts, parts, strict=True))]  # fmt: skip
    ((micro,),) = pack(samples, max_tokens=10_000)
    layout = build_layout(micro)
    (tree,) = layout.blocks
    assert [segment.parent for segment in tree.segments] == [-1, 0, 0, 2, 2, 4, 4]
    plan = build_plan(layout, torch.device("cpu"), torch.float32)
    lengths = sorted(
        n for call in plan.get_calls(AttentionParams(1.0)) for n in [call.rows.size[1]] * call.rows.size[0]
    )
    assert lengths == [49, 99, 99, 99, 100]  # a sample's own tokens each, and the root's


def laid_out(*sequences: list[int], unit: int | None = None) -> PackedLayout:
    """Sequences of these tokens, the shortest first; of one unit, or of one each."""
    plain = make_batch(0).samples[0]
    samples = [replace(plain, unit=i if unit is None else unit, sample_id=str(i), token_ids=np.array(ids, np.int32),
                       prefix_length=1, loss_mask=np.arange(len(ids)) > 0, advantages=np.zeros(len(ids), np.float32),
                       rollout_logprobs=np.zeros(len(ids), np.float32))
               for i, ids in enumerate(sequences)]  # fmt: skip
    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 4):
        ((micro,),) = pack(samples, max_tokens=10_000)
    return build_layout(sorted(micro, key=lambda block: block.num_tokens))


def test_attention_gradients_are_added_up_where_one_branchs_context_is_part_of_anothers() -> None:
    trunk = list(range(100))
    layout = laid_out(
        *([*trunk[:n], *range(1000 * i, 1000 * i + 31)] for i, n in enumerate((90, 90, 95, 95), 1)), unit=0
    )
    plan = build_plan(layout, torch.device("cpu"), torch.float64)
    shared = [call for call in plan.get_calls(AttentionParams(scale=1.0))
              if isinstance(call, TreeCall)]  # fmt: skip
    assert any(len(call.prefixes.rows.members) > len(call.prefixes.rows.members.unique()) for call in shared)
    compare(layout, dtype=torch.float64, limit=1e-10)


def test_attention_a_short_sequence_before_a_longer_one_in_one_call_keeps_its_place() -> None:
    layout = laid_out(list(range(9)), list(range(100, 111)))
    assert [tree.num_tokens for tree in layout.blocks] == [8, 10]
    assert len(build_plan(layout, torch.device("cpu"), torch.float64).get_calls(AttentionParams(scale=1.0))) == 1
    compare(layout, dtype=torch.float64, limit=1e-10)


@pytest.mark.parametrize("window", [8, 9, 10])
def test_attention_a_window_as_long_as_the_longest_sequence_hides_nothing_and_a_shorter_one_does(window: int) -> None:
    compare(laid_out(list(range(11))), dtype=torch.float64, limit=1e-10, window=window)


@pytest.mark.parametrize("how", ["dense", "blocked", "all together"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_attention_soft_caps_sinks_and_narrower_values_equal_attention_written_out(
    monkeypatch: pytest.MonkeyPatch, how: str, softcap: float | None, with_sinks: bool
) -> None:
    for name in ("MAX_TREE_TOKENS", "MAX_DENSE_TOKENS", "MAX_DENSE_PAIRS"):
        monkeypatch.setattr(attention, name, 0 if how == "blocked" else 10_000)
    monkeypatch.setattr(attention, "is_blocked_attention_faster", lambda device: how != "all together")
    monkeypatch.setattr(matmul_attention, "MAX_TILE_ROWS", 5)
    layout = make_layout()
    q, k, v, grad = tensors(layout, torch.float64)
    v, grad = v.detach()[..., :5].clone().requires_grad_(), grad[..., :5]
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_() if with_sinks else None
    plan = build_plan(layout, torch.device("cpu"), torch.float64)
    found, _ = packed_attention(
        torch.nn.Identity(), q, k, v, None, scaling=0.3, roll_plan=plan, softcap=softcap, s_aux=sinks
    )
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    expected = written_out(q, k, v, layout, 0.3, None, softcap, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    mine, theirs = (torch.autograd.grad(x, inputs, grad) for x in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_attention_sliding_windows(window: int) -> None:
    compare(make_layout(), dtype=torch.float64, limit=1e-10, window=window)


def test_attention_float32_and_bfloat16_are_as_near_as_their_digits_allow() -> None:
    compare(make_layout(), dtype=torch.float32, limit=1e-5)
    compare(make_layout(), dtype=torch.bfloat16, limit=0.1)


def test_attention_gradients_of_what_many_queries_share_are_added_up_in_float32() -> None:
    # in bfloat16, 256 + 1 is 256
    q, v = torch.zeros(1, 300, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 300, 1, 8, dtype=torch.bfloat16)
    k = torch.zeros_like(v)
    q[..., 0], k[0, 0, 0, 0] = 8, 64  # all look at the first key alone
    v.requires_grad_()
    with mock.patch.object(matmul_attention, "MAX_TILE_ROWS", 1):
        matmul_attention.blocked_attention(q, k, v, None, AttentionParams(1.0)).sum().backward()
    assert v.grad is not None and v.grad[0, 0].tolist() == [[300.0] * 8]


@pytest.mark.parametrize("own_prefixes", [False, True])
def test_attention_gradients_of_a_common_prefix_are_added_up_in_float32(own_prefixes: bool) -> None:
    def rows(entries: list[int]) -> RowIndex:
        index = torch.tensor(entries)
        return RowIndex(index, index, torch.arange(len(entries)), (len(entries), 1))

    x = torch.zeros(301, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    before = rows([0] * 300) if own_prefixes else rows([0])
    owners = torch.arange(300) if own_prefixes else torch.zeros(300, dtype=torch.int64)
    bias = torch.zeros(300, 1, 1, 1, 2)
    call = TreeCall(rows(list(range(1, 301))), Prefixes(before, owners, own_prefixes), "dense", bias)
    # queries are 0, so that each segment gives half of its weight to the prefix; in bfloat16, 128 + 1/2 is 128
    compute_call(call, torch.zeros_like(x), torch.zeros_like(x), x, AttentionParams(1.0)).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [150.0] + [0.5] * 300


def documented_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, *args: Any, enable_gqa: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`varlen_attn` as documented: causal from the end of the keys. Its kernels take heads of some sizes only."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    left, right = options["window_size"]
    assert right == 0
    assert args == (int(q_starts.diff().max()), int(k_starts.diff().max()))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    parts = []
    for i in range(len(q_starts) - 1):
        queries = q[q_starts[i] : q_starts[i + 1]]
        keys, values = (
            x[k_starts[i] : k_starts[i + 1]].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)
        )
        distance = (torch.arange(len(queries)) + len(keys) - len(queries))[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | ((distance > left) if left >= 0 else False)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * options["scale"]
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("share", [True, False])
def test_attention_the_arguments_of_varlen_attention_mean_packed_attention(
    monkeypatch: pytest.MonkeyPatch, share: bool, window: int | None
) -> None:
    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", documented_varlen)
    monkeypatch.setattr(attention, "is_varlen_supported", lambda device, dtype: True)
    limit = 1e-5 if share else 1e-10  # repeated keys sum their gradients in float32
    compare(make_layout(share=share), dtype=torch.float64, limit=limit, window=window)


@pytest.mark.parametrize("width", [12, 264])
def test_attention_heads_that_flash_attention_does_not_take_are_widened_or_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", documented_varlen)
    monkeypatch.setattr(attention, "is_varlen_supported", lambda device, dtype: True)
    monkeypatch.setitem(globals(), "WIDTH", width)
    compare(make_layout(), dtype=torch.float64, limit=1e-5)


def test_attention_varlen_attention_is_not_used_on_a_cpu() -> None:
    assert not varlen.is_varlen_supported(torch.device("cpu"), torch.bfloat16)


def test_attention_a_model_that_generates_or_needs_more_than_packing_has_is_refused() -> None:
    layout = make_layout()
    q, k, v, _ = tensors(layout, torch.float32)
    with pytest.raises(ModelError, match="is only for training"):
        packed_attention(torch.nn.Identity(), q, k, v, None)
    plan = build_plan(layout, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="position_bias"):
        packed_attention(torch.nn.Identity(), q, k, v, None, roll_plan=plan, position_bias=torch.zeros(HEADS))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_attention_varlen_attention_on_cuda_equals_attention_written_out(
    share: bool, window: int | None, groups: int
) -> None:
    assert varlen.is_varlen_supported(torch.device("cuda"), torch.bfloat16)
    compare(make_layout(share=share), dtype=torch.bfloat16, limit=0.1, window=window, groups=groups, device="cuda")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("width", [12, 64, 128, 256, 264])
def test_attention_heads_of_any_size_on_cuda(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setitem(globals(), "WIDTH", width)
    compare(make_layout(), dtype=torch.bfloat16, limit=0.2, device="cuda")


@pytest.mark.gpu
@needs_cuda
def test_attention_sdpa_on_cuda_in_float32_equals_attention_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TREE_TOKENS", "MAX_DENSE_TOKENS", "MAX_DENSE_PAIRS"):
        monkeypatch.setattr(attention, name, 0)
    compare(make_layout(), dtype=torch.float32, limit=1e-4, device="cuda")
