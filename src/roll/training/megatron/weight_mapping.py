"""The locations of HF checkpoint weights in Megatron's modules, for the supported model families.

    q_proj, k_proj, v_proj [.., H]   ─►  linear_qkv: by key-value head, its queries, its key, its value
    gate_proj, up_proj [F, H]        ─►  linear_fc1: all gates, then all ups
    everything else                  ─►  one parameter

Each tp rank fuses its slices of the HF weights, so each slice is a view of the fused parameter. Weights and optimizer
states are read and written in the same way. Adapters are not fused: each linear layer of the HF
model has its own adapter, as in `peft`. Each ep rank has some of a layer's experts, which the HF model stacks in
tensors of three dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from roll.errors import ModelError
from roll.training.megatron.supported import check_family
from roll.training.network.lora import get_checkpoint_name
from roll.training.parallel.collectives import all_gather

__all__ = ["Heads", "Shards", "WeightLocation", "get_adapter_module", "locate_weights"]

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
_EXPERTS = re.compile(r"mlp\.(?:gate|experts|shared_expert|shared_expert_gate)\..+")
"""The weights of an MoE block, which is a module of the HF model."""
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])\.\w+\.weight")
"""The names of an adapter's matrices in `peft`."""


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
    """The dimension along which the HF weight is sharded; `None` if every rank has the full weight."""
    part: Literal["q", "k", "v", "gate", "up"] | None
    """The part of a fused parameter."""
    heads: Heads
    is_expert: bool = False
    """True if the weight is sharded over ep instead of tp."""

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

    def write(self, fused: Tensor, weight: Tensor, ranks: ProcessGroup | None) -> None:
        """Copy this rank's slice of a full HF weight into `fused`, a tensor shaped like the rank's parameter.

        `ranks` are the ranks over which the weight is sharded.
        """
        if ranks is not None and self.dim is not None:
            weight = weight.chunk(ranks.size(), self.dim)[ranks.rank()]
        target = self.view(fused)
        target.copy_(weight.reshape(target.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The ranks over which a network's weights are sharded; `None` if a dimension has one rank."""

    tp: ProcessGroup | None = None
    ep: ProcessGroup | None = None

    def get_ranks(self, location: WeightLocation) -> ProcessGroup | None:
        """Return the ranks over which a weight is sharded; `None` if every rank has the full weight."""
        ranks = self.ep if location.is_expert else self.tp
        return None if location.dim is None else ranks

    def gather(self, part: Tensor, location: WeightLocation) -> Tensor:
        """Gather a full HF weight from this rank's slice. Collective."""
        ranks, dim = self.get_ranks(location), location.dim
        if ranks is None or dim is None:
            return part
        return all_gather(part.movedim(dim, 0).contiguous(), ranks).movedim(0, dim).contiguous()


def locate_weights(names: list[str], config: Any) -> dict[str, WeightLocation]:
    """Return the location of each weight in Megatron's modules, by HF name.

    Args:
        names: The names of all weights of a model.
        config: The configuration of the HF model.

    Raises:
        ModelError: The model family, or one of its weights, is not supported.
    """
    check_family(config.model_type)
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    heads = Heads(queries=queries // keys, width=getattr(config, "head_dim", None) or config.hidden_size // queries)
    locations = {name: _locate(get_checkpoint_name(name), heads) for name in names}
    unknown = [name for name, location in locations.items() if location is None]
    if unknown:
        raise ModelError(
            f"training.backend 'megatron' does not support {len(unknown)} weights of the model type "
            f"'{config.model_type}', for example '{unknown[0]}': set training.backend to 'torch'"
        )
    return {name: location for name, location in locations.items() if location is not None}


def get_adapter_module(location: WeightLocation) -> str:
    """Return the name of the module of the adapter of the weight at a location."""
    return f"{location.parameter.removesuffix('.weight')}.adapters.{location.part or 'whole'}"


def _locate(name: str, heads: Heads) -> WeightLocation | None:
    adapter = _ADAPTER.fullmatch(name)
    if adapter is not None:
        adapted = _locate(f"{adapter['layer']}.weight", heads)
        return None if adapted is None else _locate_adapter(adapted, adapter["matrix"])
    if name in _MODEL_WEIGHTS:
        parameter, dim = _MODEL_WEIGHTS[name]
        return WeightLocation(parameter=parameter, dim=dim, part=None, heads=heads)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return None
    number, inside = match.groups()
    before = f"model.layers.{number}.inside."
    if _EXPERTS.fullmatch(inside):
        is_expert = inside.startswith("mlp.experts.")
        return WeightLocation(
            parameter=f"{before}mlp.block.{inside.removeprefix('mlp.')}",
            dim=0 if is_expert else None,
            part=None,
            heads=heads,
            is_expert=is_expert,
        )
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


def _locate_adapter(adapted: WeightLocation, matrix: str) -> WeightLocation:
    """Return the location of a matrix of a linear layer's adapter.

    The matrix that reads sharded inputs (A), or writes sharded outputs (B), is sharded like the weight. Every rank has
    the other matrix.
    """
    sharded = 1 if matrix == "A" else 0
    return WeightLocation(
        parameter=f"{get_adapter_module(adapted)}.lora_{matrix}",
        dim=sharded if adapted.dim == sharded else None,
        part=None,
        heads=adapted.heads,
    )
