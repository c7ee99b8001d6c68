"""A model's description from its files' headers, within milliseconds. Does not import torch or read weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from roll.errors import ConfigError, ModelError
from roll.models.catalogue import CATALOGUE
from roll.models.directory import stored_tensors, weight_files
from roll.models.resolve import find_model, resolve_model
from roll.models.sizes import read_config, text_part
from roll.models.tied_weights import tied_copy

__all__ = [
    "ModelDescription",
    "WeightCounts",
    "check_experts",
    "check_files",
    "check_linear",
    "check_rope_scaling",
    "context_length",
    "describe_model",
    "make_description",
    "num_parameters",
    "rope_scaling_length",
]

DTYPE_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
}
MAX_PACKING = 8
"""Largest number of quantized weights packed into one stored number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """Sizes of a causal language model, for memory estimates and FLOP counts."""

    architecture: str
    num_parameters: int
    """The number of parameters, tied weights once."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """The inner size of an MLP, or of all experts together that one token goes through."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """The longest sequence that the model was made for, in tokens."""
    dtype: str
    """The dtype of the stored weights."""
    experts_per_token: int = 0
    """The number of experts chosen per token in each layer; 0 for dense models."""
    num_experts: int = 0
    """The number of experts of a layer to choose from."""
    expert_parameters: int = 0
    """The number of parameters of all these experts, in all layers together."""
    has_own_projection: bool = False
    """Whether the projection to the vocabulary is not tied to the embeddings."""
    norm_width: int = 0
    """The numbers per token that all norms of one layer process, including those of queries and keys."""
    has_fusable_norms: bool = True
    """Whether norms are probably Llama's: models gated by SiLU do not use norms that add 1 to their weights."""
    has_fusable_gates: bool = True
    """Whether an MLP is SwiGLU of two matrices."""

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Return the size of one token's keys and values over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def describe_model(path: str | Path) -> ModelDescription:
    """Describe a model. A catalogue model need not be prepared for it; a hub model is downloaded.

    Raises:
        ModelError: the model does not exist, or its config.json lacks a size or contradicts its files.
    """
    entry = CATALOGUE.get(str(path))
    directory = find_model(path, allow_quantized=True)
    if directory is None and entry is not None:
        return make_description(entry.config, WeightCounts(entry.num_parameters, 0, 0, "bfloat16"), entry.name)
    return make_description(*check_files(directory or resolve_model(path, allow_quantized=True)), str(path))


def num_parameters(path: str | Path) -> int:
    """Return the number of weights, tied ones counted once."""
    return describe_model(path).num_parameters


def context_length(path: str | Path) -> int:
    """Return the longest sequence that the model was made for, in tokens."""
    return describe_model(path).context_length


def rope_scaling_length(text: Mapping[str, Any]) -> int | None:
    """Return the length up to which a model uses the same rotary frequencies; `None` where it always does.

    Beyond it, RoPE of the kinds `dynamic` and `longrope` uses other frequencies for all tokens that are computed
    together. In a packed row, or in an engine that allows such lengths, this changes shorter texts as well.

    Args:
        text: The settings of the language model, as in its config.json.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return None
    found: list[Any] = []
    for own in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind, longest = own.get("rope_type") or own.get("type"), text.get("max_position_embeddings")
        if kind in ("longrope", "su"):  # `su` is the older name
            name = "original_max_position_embeddings"
            found.append(text.get(name) or own.get(name) or longest)
        elif kind == "dynamic":
            found.append(longest)
    return min((length for length in found if isinstance(length, int) and length), default=None)


def check_rope_scaling(directory: Path, length: int, setting: str) -> None:
    """Reject texts of a length that changes a model's RoPE scaling: see `rope_scaling_length`.

    Args:
        directory: The directory of the model.
        length: The length of the longest text, in tokens.
        setting: The setting that limits it.

    Raises:
        ConfigError: the length is above the limit.
    """
    limit = rope_scaling_length(text_part(read_config(directory)))
    if limit is not None and length > limit:
        raise ConfigError(
            f"texts may have {length} tokens, but beyond {limit} tokens the RoPE scaling of model '{directory}' "
            f"(dynamic or longrope) changes the positions of every text in the same micro-batch: set {setting} to at "
            f"most {limit}"
        )


def check_experts(directory: Path, ranks: int) -> None:
    """Reject a number of ranks (`training.parallel.ep`) that does not divide a model's experts evenly.

    Raises:
        ModelError: states the number of experts.
    """
    if ranks == 1:
        return
    count = _num_experts(text_part(read_config(directory)))
    if count == 0 or count % ranks:
        has = f"has {count} experts, which it does not divide" if count else "is not a mixture of experts"
        raise ModelError(
            f"training.parallel.ep is {ranks}, but the model '{directory}' {has}: change it, or set it to 1"
        )


def check_linear(directory: Path) -> None:
    """Reject 8-bit linear weights for engines (`inference.quantization`) for models whose experts are not stored as
    matrices.

    Raises:
        ModelError: the checkpoint stores all experts of a layer in one tensor.
    """
    from safetensors import safe_open

    for file in weight_files(directory):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if ".experts." in name and len(tensors.get_slice(name).get_shape()) > 2:
                    raise ModelError(
                        f"the linear weights of '{directory}' cannot be sent to engines in 8 bits: its checkpoint "
                        f"has '{name}' of all experts in one tensor. Set inference.quantization to none."
                    )


class WeightCounts(NamedTuple):
    """Counts of a model's stored weights."""

    number: int
    num_tensors: int
    of_experts: int
    dtype: str
    """The dtype of most weights."""
    norms: Mapping[str, int] = MappingProxyType({})
    """The sizes of the first layer's norms, by module name; empty without files."""
    has_gates: bool = True
    """Whether MLPs have a matrix `gate_proj`."""
    has_projection: bool = False
    """Whether a projection is stored in addition to the embeddings."""


def check_files(directory: Path) -> tuple[Mapping[str, Any], WeightCounts]:
    """Return a model's configuration and weight counts; reject contradicting ones before loading starts.

    Raises:
        ModelError: config.json states an impossible size, or one for which there are far too few weights.
    """
    config = read_config(directory)
    weights = _count(config, weight_files(directory))
    text = text_part(config)
    layers, hidden, vocabulary = (text.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if isinstance(layers, int) and layers > weights.num_tensors:
        raise ModelError(
            f"'{directory / 'config.json'}' has num_hidden_layers: {layers}, but the weight files hold "
            f"{weights.num_tensors} tensors in total: copy the model again."
        )
    if isinstance(hidden, int) and isinstance(vocabulary, int) and hidden * vocabulary > MAX_PACKING * weights.number:
        raise ModelError(
            f"'{directory / 'config.json'}' has vocab_size: {vocabulary} and hidden_size: {hidden}, but the weight "
            f"files hold {weights.number:,} values in total: copy the model again."
        )
    return config, weights


def make_description(config: Mapping[str, Any], weights: WeightCounts, name: str) -> ModelDescription:
    """Return the sizes of a model.

    Args:
        config: The config.json of the model.
        weights: The counts of its weights.
        name: The name of the model, for messages.

    Raises:
        ModelError: config.json lacks a size.
    """
    text = text_part(config)

    def size(*keys: str) -> int:
        for key in keys:
            if isinstance(text.get(key), int):
                return int(text[key])
        raise ModelError(
            f"model '{name}': its config.json has no '{keys[0]}': check that it is a causal language model."
        )

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    has = {key for key, value in text.items() if value is not None}
    latent = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"} <= has  # keys and values are stored per head
    if latent:
        head_dim = (size("qk_nope_head_dim") + size("qk_rope_head_dim") + size("v_head_dim") + 1) // 2
    else:
        head_dim = size("head_dim") if "head_dim" in has else hidden // heads
    kv_heads = size("num_key_value_heads") if "num_key_value_heads" in has and not latent else heads
    copies = {"q_": heads, "k_": kv_heads}  # the number of heads that share a norm
    norms = [n * (copies.get(name[:2], 1) if n == head_dim else 1) for name, n in weights.norms.items()]
    is_silu = (text.get("hidden_activation") or text.get("hidden_act") or "silu") in ("silu", "swish")
    return ModelDescription(
        architecture=_architecture(config),
        num_parameters=weights.number,
        num_layers=size("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        intermediate_size=_inner_size(text, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=size("vocab_size"),
        context_length=size("max_position_embeddings", "n_positions"),
        dtype=weights.dtype,
        experts_per_token=_experts_per_token(text),
        num_experts=_num_experts(text),
        expert_parameters=weights.of_experts,
        has_own_projection=weights.has_projection,
        norm_width=sum(norms) or 2 * hidden,
        has_fusable_norms=is_silu,
        has_fusable_gates=is_silu and weights.has_gates,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type", "unknown"))


def _experts_per_token(text: Mapping[str, Any]) -> int:
    return _read_int(text, "num_experts_per_tok") if _num_experts(text) > 1 else 0


def _num_experts(text: Mapping[str, Any]) -> int:
    counts = [text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    return next((n for n in counts if isinstance(n, int)), 0)


def _inner_size(text: Mapping[str, Any], hidden: int) -> int:
    """Return the inner size of an MLP, or of the experts that a token goes through, including shared experts."""
    dense = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    if not isinstance(dense, int):  # some families have one for each layer
        dense = max((size for size in dense if isinstance(size, int)), default=4 * hidden)
    chosen = _experts_per_token(text)
    if not chosen:
        return dense
    own = _read_int(text, "moe_intermediate_size") or dense
    shared = _read_int(text, "shared_expert_intermediate_size") or own * _read_int(text, "n_shared_experts")
    return chosen * own + shared


def _read_int(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    return value if isinstance(value, int) else 0


def _count(config: Mapping[str, Any], files: list[Path]) -> WeightCounts:
    """Count the elements in safetensors files from the files' headers, tied weights once."""
    tensors = stored_tensors(files)
    copy = tied_copy(config, tensors)
    by_dtype, num_tensors, of_experts = Counter[str](), 0, 0
    norms, has_gates, has_projection = dict[str, int](), False, False
    for name, tensor in tensors.items():
        if copy is not None and name == copy[0]:
            continue
        number = math.prod(tensor.shape)
        by_dtype[tensor.dtype] += number
        num_tensors += 1
        of_experts += number if ".experts." in name else 0
        has_gates |= ".gate_proj." in name
        has_projection |= name.endswith("lm_head.weight")
        if ".layers.0." in name and name.endswith("norm.weight"):
            norms[name.split(".")[-2]] = number
    common = by_dtype.most_common(1)[0][0]
    dtype = DTYPE_NAMES.get(common, common.lower())
    return WeightCounts(by_dtype.total(), num_tensors, of_experts, dtype, norms, has_gates, has_projection)
