"""Attention by `attention.c`, in every way that it multiplies, against attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GlmConfig, LlamaConfig, Olmo2Config, Qwen3Config
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from roll.models import AttentionParams, AttentionSpan
from roll.training.attention import native as native_attention
from roll.training.attention.native import Rotation, attend, build_tree_ranges
from roll.training.attention.packed import ATTENTION_NAME, register_attention
from roll.training.attention.plan import build_plan
from roll.training.kernels.native import load_native_library
from roll.training.network.fused import use_fused_kernels
from roll.training.packing.layout import PackedLayout, Segment, Tree

KINDS = range(native_attention._detect_bfloat16_instructions() + 1) if load_native_library() is not None else ()
pytestmark = pytest.mark.skipif(load_native_library() is None, reason="needs a C compiler")
FORK = ((-1, 33), (0, 16), (1, 40), (1, 1), (0, 70))
"""A tree: by segment its parent, and its length."""
ERROR = 5e-3
"""Relative, of a result in bfloat16."""


def row_of(*trees: tuple[tuple[int, int], ...]) -> PackedLayout:
    """Trees, one after the other."""
    blocks, positions, start = [], [], 0
    for tree in trees:
        segments: list[Segment] = []
        for parent, length in tree:
            at = segments[parent].position + segments[parent].length if parent >= 0 else 0
            segments.append(Segment(start=start, length=length, parent=parent, position=at))
            positions.append(at + torch.arange(length))
            start += length
        blocks.append(Tree(segments=tuple(segments)))
    row = torch.cat(positions).numpy()
    return PackedLayout(
        token_ids=row, position_ids=row, blocks=tuple(blocks), rows=row, targets=row, spans=(), uses=row
    )


def seen(layout: PackedLayout) -> Tensor:
    """[N, N] whether an entry sees another: its ancestors', and its own before it."""
    visible = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for tree in layout.blocks:
        for i, own in enumerate(tree.segments):
            rows = slice(own.start, own.start + own.length)
            visible[rows, rows] = torch.ones(own.length, own.length).tril().bool()
            while (i := tree.segments[i].parent) >= 0:
                above = tree.segments[i]
                visible[rows, above.start : above.start + above.length] = True
    return visible


def turned(x: Tensor, rotation: Rotation | None) -> Tensor:
    """As transformers' Llama does, of the first numbers of every head."""
    if rotation is None:
        return x
    cosine, sine = (part[:, None].double() for part in rotation)
    first, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    a, b = first.chunk(2, dim=-1)
    return torch.cat([first * cosine + torch.cat([-b, a], dim=-1) * sine, rest], dim=-1)


def written_out(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, way: Rotation | None) -> Tensor:
    q, k = turned(q, way), turned(k, way)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen(layout), float("-inf")).softmax(-1), v)


def given_tensors(layout: PackedLayout, heads: int, groups: int, d: int, w: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, d), (groups, d), (groups, w), (heads, w))
    return [
        torch.randn(layout.num_tokens, n, x, generator=generator).to(torch.bfloat16).requires_grad_() for n, x in shapes
    ]


def rotation_of(layout: PackedLayout, width: int) -> Rotation:
    """By angles that differ between the halves, which a gradient must not mix up."""
    angles = torch.from_numpy(layout.position_ids)[:, None] * torch.linspace(0.1, 0.9, width)
    return Rotation(angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16))


def results(layout: PackedLayout, tensors: list[Tensor], scale: float, way: Rotation | None = None) -> list[Tensor]:
    *inputs, grad = tensors
    found = attend(*inputs, build_tree_ranges(layout), scale, way)
    return [found.detach(), *torch.autograd.grad(found, inputs, grad)]


def errors(layout: PackedLayout, tensors: list[Tensor], scale: float, way: Rotation | None = None) -> list[float]:
    """Of the result and the three gradients, relative to those in float64, and to what these are made of where little
    is left of that: gradients of scores add up to 0."""
    *exact, grad = (x.detach().double().requires_grad_() for x in tensors)
    expected = written_out(*exact, layout, scale, way)
    truth = [expected, *torch.autograd.grad(expected, exact, grad)]
    sizes = [x.norm() + 0.1 * scale * y.norm() for x, y in zip(truth, [expected, *exact], strict=True)]
    pairs = zip(results(layout, tensors, scale, way), truth, sizes, strict=True)
    return [float(((a.double() - b).norm() / size).detach()) for a, b, size in pairs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "groups", "d", "w", "turned"), [(9, 3, 64, 64, 64), (4, 4, 80, 48, 0), (2, 1, 24, 40, 16)]
)
def test_native_attention_and_its_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, kind: int, heads: int, groups: int, d: int, w: int, turned: int
) -> None:
    monkeypatch.setattr(native_attention, "_detect_bfloat16_instructions", lambda: kind)
    layout = row_of(FORK, ((-1, 1),), ((-1, 300), (0, 5), (0, 150)), ((-1, 16),))
    tensors = given_tensors(layout, heads, groups, d, w)
    assert max(errors(layout, tensors, d**-0.5, rotation_of(layout, turned) if turned else None)) < ERROR


@given(
    trees=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=6), min_size=1, max_size=3
    ),
    scale=st.sampled_from([0.02, 0.2, 0.5]),
)
def test_native_attention_any_trees(trees: list[list[tuple[int, int]]], scale: float) -> None:
    layout = row_of(*(tuple((min(p, i - 1), n) for i, (p, n) in enumerate(tree)) for tree in trees))
    assert max(errors(layout, given_tensors(layout, 4, 2, 16, 16), scale)) < 4 * ERROR


def test_native_attention_large_scores_are_no_overflow() -> None:
    layout = row_of(FORK)
    q, k, v, grad = given_tensors(layout, 2, 2, 32, 32)
    found = results(layout, [(q * 200).detach().requires_grad_(), (k * 200).detach().requires_grad_(), v, grad], 1.0)
    assert all(torch.isfinite(x).all() for x in found)


def test_native_attention_the_same_bits_whatever_the_number_of_threads() -> None:
    layout = row_of(FORK, ((-1, 90), (0, 20)), ((-1, 12),))
    tensors, before = given_tensors(layout, 4, 2, 32, 32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(layout, tensors, 0.2)
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(alone, results(layout, tensors, 0.2), strict=True))
    finally:
        torch.set_num_threads(before)


def test_native_attention_what_a_token_does_not_see_changes_no_bit() -> None:
    layout = row_of(FORK, ((-1, 40),))
    tensors = given_tensors(layout, 4, 2, 32, 32)
    before = results(layout, tensors, 0.2)[0]
    with torch.no_grad():
        for x in tensors[:3]:
            x[49:89] = 7.0  # the third segment, which no other sees
    after = results(layout, tensors, 0.2)[0]
    others = torch.ones(layout.num_tokens, dtype=torch.bool)
    others[49:89] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_native_attention_ancestors_that_lie_side_by_side_are_one_range() -> None:
    trees, segments, ranges = build_tree_ranges(row_of(((-1, 3),), ((-1, 5), (0, 2), (1, 4), (0, 6), (3, 1))))
    assert trees.tolist() == [[3, 18, 0, 5], [0, 3, 5, 1]]  # the larger first
    assert segments.tolist() == [[0, 5, 0, 0], [5, 2, 0, 1], [7, 4, 1, 1], [11, 6, 2, 1], [17, 1, 3, 2], [0, 3, 5, 0]]
    assert ranges.tolist() == [[0, 5], [0, 7], [0, 5], [0, 5], [11, 6]]


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def module_of(kind: type, config: type) -> nn.Module:
    torch.manual_seed(0)
    made = config(**SIZES, attn_implementation=register_attention(), pad_token_id=0)
    return kind(made, 0).to(torch.bfloat16)


@pytest.mark.skipif(len(KINDS) < 2, reason="needs bfloat16 products of the processor's own")
def test_native_attention_layers_that_are_more_than_plain_attention_are_computed_otherwise() -> None:
    """A window, a chunk, a cap, sinks and the like; a limit that no text comes to is none."""
    plan = build_plan(row_of(FORK), torch.device("cpu"), torch.bfloat16)
    assert plan.longest == 103
    plain = AttentionParams(0.2)
    for limits, native_serves in (((None, None), True), ((103, 103), True), ((102, None), False), ((None, 102), False)):
        assert plan.is_native_supported(plain._replace(span=AttentionSpan(*limits))) == native_serves
    for other in (plain._replace(softcap=2.0), plain._replace(sinks=torch.zeros(4)), plain._replace(scale=-0.2)):
        assert not plan.is_native_supported(other)
    assert build_plan(row_of(FORK), torch.device("cpu"), torch.float32).tree_ranges is None


@pytest.mark.skipif(len(KINDS) < 2, reason="needs bfloat16 products of the processor's own")
@pytest.mark.parametrize("width", [64, 16])
def test_native_attention_what_an_observer_is_shown_is_what_attention_reads(width: int) -> None:
    layout = row_of(FORK)
    q, k, v, _ = given_tensors(layout, 6, 2, 64, 48)
    way = rotation_of(layout, width)
    shown = [native_attention.rotate(x, way) for x in (q, k)]
    assert torch.equal(
        attend(*shown, v, build_tree_ranges(layout), 0.3),
        attend(q, k, v, build_tree_ranges(layout), 0.3, way),
    )


class Second:
    """An observer of a model's second layer."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def is_observed(self, layer: int) -> bool:
        return layer == 1

    def observe(self, queries: Tensor, keys: Tensor, scale: float, window: int | None) -> None:
        self.seen.append(len(queries))


@pytest.mark.skipif(len(KINDS) < 2, reason="needs bfloat16 products of the processor's own")
@pytest.mark.parametrize(("kind", "config"), [(LlamaAttention, LlamaConfig), (Qwen3Attention, Qwen3Config)])
def test_native_attention_a_fused_module_gives_what_the_module_gives(kind: type, config: type) -> None:
    layout = row_of(FORK)
    plan = build_plan(layout, torch.device("cpu"), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, layout.num_tokens, 64, generator=generator).to(torch.bfloat16).requires_grad_()
    angles = torch.from_numpy(layout.position_ids)[None, :, None] * torch.linspace(0.1, 0.9, 16).repeat(2)
    rotation = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    module = module_of(kind, config)
    assert module.config._attn_implementation == ATTENTION_NAME

    def run(**changes: object) -> list[Tensor]:
        module.zero_grad()
        found = module(x, rotation, None, **{"roll_plan": plan} | changes)[0]
        (own,) = torch.autograd.grad(found.square().sum(), x)
        return [found.detach(), own]

    plain = run()
    assert use_fused_kernels(module) == 1 + len([name for name, _ in module.named_modules() if name.endswith("norm")])
    for mine, theirs in zip(run(), plain, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.02
    second = Second()
    observed = build_plan(layout, torch.device("cpu"), torch.bfloat16, second)
    for shown in ([], [layout.num_tokens], [layout.num_tokens]):  # what it looks at, and no other layer
        assert float((run(roll_plan=observed)[0] - plain[0]).norm() / plain[0].norm()) < 0.02
        assert second.seen == shown


@pytest.mark.parametrize(("kind", "config"), [(GlmAttention, GlmConfig), (Olmo2Attention, Olmo2Config)])
def test_native_attention_other_rotations_and_norms_are_left_alone(kind: type, config: type) -> None:
    module = module_of(kind, config)
    before = module.forward
    use_fused_kernels(module)
    assert module.forward == before
