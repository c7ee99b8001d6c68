"""RoPE (rotary embedding) fused into attention, on a CPU in bfloat16.

    projections ─ (a norm per head) ─► attention.c, which rotates inputs and gradients ─► projection

In HF models, RoPE takes ten passes over memory, forward and backward. A module is recognized by its outputs, as in
`network.fused`: the replacement must give the same outputs as the module on random inputs. Calls that are not plain
attention over a whole row (windows, caps, rows split over ranks) are computed by the module itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import ModelError
from roll.training.attention.native import Rotation, is_native_attention_supported
from roll.training.attention.plan import AttentionPlan, build_plan
from roll.training.packing.layout import PackedLayout, Segment, Tree

__all__ = ["build_fused_attention"]

TOLERANCE = 2.0**-5
"""Largest norm of the difference, relative to the norm of the result. The module rounds between its passes, and large
scores amplify the errors. The results of a different type of RoPE differ by 0.5 or more."""


def build_fused_attention(module: Any) -> Callable[..., Any] | None:
    """Return a fused replacement for an attention module's `forward`, or `None` if its results would differ."""
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in ("q_proj", "k_proj", "v_proj", "o_proj")):
        return None
    weight = module.q_proj.weight
    if not is_native_attention_supported(weight.device, weight.dtype) or not isinstance(
        getattr(module, "head_dim", None), int
    ):
        return None
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None and getattr(norm, "weight", torch.empty(0)).shape != (module.head_dim,) for norm in norms):
        return None
    replacement = _build_forward(module)
    return replacement if _has_same_result(module, replacement) else None


def _build_forward(module: Any) -> Callable[..., Any]:
    original_forward = module.forward

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        plan: AttentionPlan | None = kwargs.get("roll_plan")
        window = getattr(module, "sliding_window", None)
        params = None if plan is None else plan.find_fused_rotary_params(module, attention_mask, window, kwargs)
        if (
            plan is None
            or params is None
            or position_embeddings is None
            or position_embeddings[0].dtype != torch.bfloat16
        ):
            return original_forward(
                hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
            )
        shape = (hidden_states.shape[1], -1, module.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
        if getattr(module, "q_norm", None) is not None:
            q, k = module.q_norm(q), module.k_norm(k)
        attended = plan.attend_with_rope(
            q, k, v, params, Rotation(position_embeddings[0][0], position_embeddings[1][0])
        )
        return module.o_proj(attended.flatten(1)[None]), None

    return forward


@torch.no_grad()
def _has_same_result(module: Any, replacement: Callable[..., Any]) -> bool:
    """Return whether module and replacement give the same result on a random row of a prompt and two answers."""
    weight = module.q_proj.weight
    segments = tuple(Segment(start=s, length=n, parent=p, position=x) for s, n, p, x in _TEST_SEGMENTS)
    positions = torch.cat([torch.arange(s.position, s.position + s.length) for s in segments])
    layout = PackedLayout(
        token_ids=positions.numpy(),
        position_ids=positions.numpy(),
        blocks=(Tree(segments=segments),),
        rows=positions.numpy(),
        targets=positions.numpy(),
        spans=(),
        uses=positions.numpy(),
    )
    plan = build_plan(layout, weight.device, weight.dtype)
    if plan.tree_ranges is None:
        return False
    generator = torch.Generator().manual_seed(0)
    angles = positions[:, None] * torch.rand(module.head_dim // 2, generator=generator)
    both = torch.cat([angles, angles], dim=1)[None]
    rotation = both.cos().to(torch.bfloat16), both.sin().to(torch.bfloat16)
    x = torch.randn(1, len(positions), weight.shape[1], generator=generator).to(torch.bfloat16)
    try:
        expected, found = (
            forward(x, rotation, None, past_key_values=None, roll_plan=plan)[0].float()
            for forward in (module.forward, replacement)
        )
    except (TypeError, ValueError, AttributeError, RuntimeError, ModelError):  # its signature or structure differs
        return False
    return expected.shape == found.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())


_TEST_SEGMENTS = ((0, 5, -1, 0), (5, 3, 0, 5), (8, 4, 0, 5))
