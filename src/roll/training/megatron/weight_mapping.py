"""The locations of HF checkpoint weights in Megatron's modules, for the supported model families.

    q_proj, k_proj, v_proj [.., H]   ─►  linear_qkv: by key-value head, its queries, its key, its value
    gate_proj, up_proj [F, H]        ─►  linear_fc1: all gates, then all ups
    everything else                  ─►  one parameter

Each tp rank has a slice of every HF weight, and fuses its slices. So a part of a fused parameter is a view of it, and
weights and optimizer states are read and written in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from roll.errors import ModelError
from roll.training.parallel.collectives import all_gather

__all__ = ["FAMILIES", "Heads", "WeightLocation", "gather_weight", "locate_weights"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of `model_type`; all are dense models with rotary positions and gated MLPs."""

_MODEL_WEIGHTS = {
    "model.embed_tokens.weight": ("model.embedding.weight", 0),
    "model.norm.weight": ("model.norm.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
    **{f"{head}.{part}": (f"{head}.{part}", None) for head in ("score", "value_head") for part in ("weight", "bias")},
}
_LAYER_WEIGHTS = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight", None),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight", None),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight", 1),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", 1),
}
_FUSED_WEIGHTS = {
    "q_proj": ("self_attention.linear_qkv", "q"),
    "k_proj": ("self_attention.linear_qkv", "k"),
    "v_proj": ("self_attention.linear_qkv", "v"),
    "gate_proj": ("mlp.linear_fc1", "gate"),
    "up_proj": ("mlp.linear_fc1", "up"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The number and the width of a model's attention heads."""

    queries: int
    """The number of query heads per key-value head."""
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLocation:
    """The location of one HF weight in Megatron's modules."""

    parameter: str
    """The name of Megatron's parameter that is, or contains, the weight."""
    dim: int | None
    """The dimension along which the HF weight is sharded over tp; `None`: every rank has the full weight."""
    part: Literal["q", "k", "v", "gate", "up"] | None
    """The part of a fused parameter."""
    heads: Heads

    def view(self, fused: Tensor) -> Tensor:
        """Return a view of the HF weight's entries in `fused`, a tensor shaped like this rank's parameter."""
        if self.part is None:
            return fused
        if self.part in ("gate", "up"):
            return fused.chunk(2)[self.part == "up"]
        each = self.heads.queries
        # Megatron stores [query heads of a group, key, value] for one key-value head after the other.
        by_head = fused.unflatten(0, (-1, each + 2, self.heads.width))
        return by_head[:, {"q": slice(0, each), "k": slice(each, each + 1), "v": slice(each + 1, None)}[self.part]]

    def read(self, fused: Tensor) -> Tensor:
        """Return this rank's slice of the HF weight from `fused`, in the shape of HF weights."""
        weight = self.view(fused)
        return weight.flatten(0, 2) if self.part in ("q", "k", "v") else weight

    def write(self, fused: Tensor, weight: Tensor, tp: ProcessGroup | None) -> None:
        """Copy this rank's slice of a full HF weight into `fused`, a tensor shaped like the rank's parameter."""
        if tp is not None and self.dim is not None:
            weight = weight.chunk(tp.size(), self.dim)[tp.rank()]
        target = self.view(fused)
        target.copy_(weight.reshape(target.shape))


def gather_weight(part: Tensor, location: WeightLocation, tp: ProcessGroup | None) -> Tensor:
    """Gather the full HF weight from the slices of all tp ranks. Collective."""
    if tp is None or location.dim is None:
        return part
    return all_gather(part.movedim(location.dim, 0).contiguous(), tp).movedim(0, location.dim).contiguous()


def locate_weights(names: list[str], config: Any) -> dict[str, WeightLocation]:
    """Return the location of each weight in Megatron's modules, by HF name.

    Args:
        names: The names of all weights of a model.
        config: The configuration of the HF model.

    Raises:
        ModelError: The model family, or one of its weights, is not supported.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"training.backend 'megatron' supports the model families {', '.join(FAMILIES)}, but this model is "
            f"'{config.model_type}': set training.backend to 'torch'"
        )
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    heads = Heads(queries=queries // keys, width=getattr(config, "head_dim", None) or config.hidden_size // queries)
    locations = {name: _locate(name, heads) for name in names}
    unknown = [name for name, location in locations.items() if location is None]
    if unknown:
        raise ModelError(
            f"training.backend 'megatron' does not support {len(unknown)} weights of the model type "
            f"'{config.model_type}', for example '{unknown[0]}': set training.backend to 'torch'"
        )
    return {name: location for name, location in locations.items() if location is not None}


def _locate(name: str, heads: Heads) -> WeightLocation | None:
    if name in _MODEL_WEIGHTS:
        parameter, dim = _MODEL_WEIGHTS[name]
        return WeightLocation(parameter=parameter, dim=dim, part=None, heads=heads)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return None
    number, inside = match.groups()
    before = f"model.layers.{number}.inside."
    if inside in _LAYER_WEIGHTS:
        parameter, dim = _LAYER_WEIGHTS[inside]
        return WeightLocation(parameter=before + parameter, dim=dim, part=None, heads=heads)
    fused = re.fullmatch(r"(?:self_attn|mlp)\.(\w+)\.(weight|bias)", inside)
    if fused is None or fused[1] not in _FUSED_WEIGHTS:
        return None
    parameter, part = _FUSED_WEIGHTS[fused[1]]
    if fused[2] == "bias" and part in ("gate", "up"):
        return None
    return WeightLocation(parameter=f"{before}{parameter}.{fused[2]}", dim=0, part=part, heads=heads)  # type: ignore[arg-type]
