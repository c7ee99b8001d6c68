"""Describes a model from its config.json and the headers of its files, in milliseconds, without torch."""

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
from roll.models.directory import list_weight_files, read_tensor_headers
from roll.models.omni import SPEECH_PREFIXES
from roll.models.resolve import find_model, resolve_model
from roll.models.sizes import get_text_config, get_thinker_config, read_config
from roll.models.tied_weights import find_tied_copy
from roll.models.towers import TowerDescription, describe_towers, is_tower_weight

__all__ = [
    "ModelDescription",
    "WeightCounts",
    "check_experts",
    "check_files",
    "check_quantizable",
    "check_rope_scaling",
    "count_parameters",
    "describe_model",
    "make_description",
    "read_context_length",
    "read_rope_scaling_length",
]

DTYPE_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
}
MAX_PACKING = 8
"""Maximum number of quantized weights that are packed into one stored number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """Sizes of a causal language model, for memory estimates and FLOP counts."""

    architecture: str
    num_parameters: int
    """The number of parameters; tied weights are counted once."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """The inner size of an MLP; for a mixture of experts, the sum over the experts that process one token."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """The maximum sequence length of the model, in tokens."""
    dtype: str
    """The dtype of the stored weights."""
    experts_per_token: int = 0
    """The number of experts chosen per token in each layer; 0 for dense models."""
    num_experts: int = 0
    """The number of experts in each layer; 0 for dense models."""
    expert_parameters: int = 0
    """The total number of parameters of all experts in all layers."""
    has_untied_lm_head: bool = False
    """True if the projection to the vocabulary is not tied to the embeddings."""
    norm_width: int = 0
    """The total width of one layer's norms, including query and key norms."""
    has_fusable_norms: bool = True
    """True if norms can be fused as in Llama; assumed for SiLU models, which do not add 1 to the norm weights."""
    has_fusable_gates: bool = True
    """True if the MLPs are SwiGLU with separate gate and up matrices."""
    tower: TowerDescription | None = None
    """The vision tower, whose weights are in `num_parameters`; `None` for a model that reads only text."""

    def compute_kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Return the size of one token's keys and values over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def describe_model(path: str | Path) -> ModelDescription:
    """Describe a model. A catalogue model is described without preparing it; a hub model is downloaded.

    Raises:
        ModelError: the model does not exist, or its config.json lacks a size or contradicts its files.
    """
    entry = CATALOGUE.get(str(path))
    directory = find_model(path, allow_quantized=True)
    if directory is None and entry is not None:
        return make_description(entry.config, WeightCounts(entry.num_parameters, 0, 0, "bfloat16"), entry.name)
    return make_description(*check_files(directory or resolve_model(path, allow_quantized=True)), str(path))


def count_parameters(path: str | Path) -> int:
    """Return the number of parameters of a model; tied weights are counted once."""
    return describe_model(path).num_parameters


def read_context_length(path: str | Path) -> int:
    """Return the maximum sequence length that a model supports, in tokens."""
    return describe_model(path).context_length


def read_rope_scaling_length(text_config: Mapping[str, Any]) -> int | None:
    """Return the sequence length up to which the rotary frequencies are constant; `None` if they never change.

    Beyond that length, the RoPE types `dynamic` and `longrope` use different frequencies for all tokens of the forward
    pass. In a packed row, or in an engine that allows longer sequences, shorter sequences are then affected too.

    Args:
        text_config: The settings of the language model in config.json.
    """
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return None
    found: list[Any] = []
    for own in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind, longest = own.get("rope_type") or own.get("type"), text_config.get("max_position_embeddings")
        if kind in ("longrope", "su"):  # `su` is the older name
            name = "original_max_position_embeddings"
            found.append(text_config.get(name) or own.get(name) or longest)
        elif kind == "dynamic":
            found.append(longest)
    return min((length for length in found if isinstance(length, int) and length), default=None)


def check_rope_scaling(directory: Path, length: int, setting: str) -> None:
    """Reject a maximum sequence length that changes the model's rotary frequencies: see `read_rope_scaling_length`.

    Args:
        directory: The directory of the model.
        length: The maximum sequence length, in tokens.
        setting: The configuration key that sets this length.

    Raises:
        ConfigError: `length` is above the limit.
    """
    limit = read_rope_scaling_length(get_text_config(read_config(directory)))
    if limit is not None and length > limit:
        raise ConfigError(
            f"sequences may have {length} tokens, but beyond {limit} tokens the RoPE scaling of model '{directory}' "
            f"(dynamic or longrope) changes the rotary frequencies of every sequence in the same micro-batch: set "
            f"{setting} to at most {limit}"
        )


def check_experts(directory: Path, ranks: int) -> None:
    """Reject a number of ranks (`training.parallel.ep`) over which a model's experts cannot be sharded evenly.

    Raises:
        ModelError: the number of experts is not a multiple of `ranks`, or the model is dense.
    """
    if ranks == 1:
        return
    count = _count_experts(get_text_config(read_config(directory)))
    if count == 0 or count % ranks:
        has = f"has {count} experts, which is not a multiple of {ranks}" if count else "is not a mixture of experts"
        raise ModelError(
            f"training.parallel.ep is {ranks}, but the model '{directory}' {has}: change training.parallel.ep, or set "
            "it to 1"
        )


def check_quantizable(directory: Path, key: str = "weight_sync.quantization") -> None:
    """Reject 8-bit weights for a model whose checkpoint does not store each expert's matrices separately.

    Args:
        directory: A model directory.
        key: The key of the configuration that sets the format, for the message.

    Raises:
        ModelError: the checkpoint stores all experts of a layer in one tensor.
    """
    from safetensors import safe_open

    for file in list_weight_files(directory):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (`safe_open` is not a mapping)
                if ".experts." in name and len(tensors.get_slice(name).get_shape()) > 2:
                    raise ModelError(
                        f"the weights of '{directory}' cannot be quantized for the engines: its checkpoint stores "
                        f"'{name}' of all experts in one tensor. Set {key} to none."
                    )


class WeightCounts(NamedTuple):
    """Counts and properties of the weights in a model's files."""

    num_elements: int
    """The number of elements of all weights; tied weights are counted once."""
    num_tensors: int
    num_expert_elements: int
    """The total number of elements of the experts' weights in all layers."""
    dtype: str
    """The dtype of most weights."""
    norms: Mapping[str, int] = MappingProxyType({})
    """The sizes of the first layer's norms, by module name; empty if there are no weight files."""
    has_gates: bool = True
    """True if MLPs have a matrix `gate_proj`."""
    has_projection: bool = False
    """True if a projection is stored in addition to the embeddings."""
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    """The shapes of a multimodal model's weights by name; empty for other models."""


def check_files(directory: Path) -> tuple[Mapping[str, Any], WeightCounts]:
    """Return a model's config.json and weight counts, after checking that they do not contradict each other.

    Raises:
        ModelError: a size in config.json is invalid, or far too large for the stored weights.
    """
    config = read_config(directory)
    weights = _count_weights(config, list_weight_files(directory))
    text = get_text_config(config)
    layers, hidden, vocabulary = (text.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    if isinstance(layers, int) and layers > weights.num_tensors:
        raise ModelError(
            f"'{directory / 'config.json'}' has num_hidden_layers: {layers}, but the weight files contain "
            f"{weights.num_tensors} tensors in total: copy the model again."
        )
    if (
        isinstance(hidden, int)
        and isinstance(vocabulary, int)
        and hidden * vocabulary > MAX_PACKING * weights.num_elements
    ):
        raise ModelError(
            f"'{directory / 'config.json'}' has vocab_size: {vocabulary} and hidden_size: {hidden}, but the weight "
            f"files contain {weights.num_elements:,} values in total: copy the model again."
        )
    return config, weights


def make_description(config: Mapping[str, Any], weights: WeightCounts, name: str) -> ModelDescription:
    """Build the description of a model.

    Args:
        config: The config.json of the model.
        weights: The counts of the model's weights.
        name: The name of the model, for messages.

    Raises:
        ModelError: config.json lacks a size.
    """
    text = get_text_config(config)

    def read_size(*keys: str) -> int:
        for key in keys:
            if isinstance(text.get(key), int):
                return int(text[key])
        raise ModelError(
            f"the config.json of model '{name}' has no '{keys[0]}': check that the model is a causal language model."
        )

    hidden, heads = read_size("hidden_size", "n_embd"), read_size("num_attention_heads", "n_head")
    has = {key for key, value in text.items() if value is not None}
    latent = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"} <= has  # multi-head latent attention
    if latent:
        head_dim = (read_size("qk_nope_head_dim") + read_size("qk_rope_head_dim") + read_size("v_head_dim") + 1) // 2
    else:
        head_dim = read_size("head_dim") if "head_dim" in has else hidden // heads
    kv_heads = read_size("num_key_value_heads") if "num_key_value_heads" in has and not latent else heads
    # A norm with the size of one head (`q_norm`, `k_norm`) runs once per head; a larger norm covers all heads at once.
    copies = {"q_": heads, "k_": kv_heads}  # the number of heads that share a norm
    norms = [n * (copies.get(name[:2], 1) if n == head_dim else 1) for name, n in weights.norms.items()]
    is_silu = (text.get("hidden_activation") or text.get("hidden_act") or "silu") in ("silu", "swish")
    return ModelDescription(
        architecture=_read_architecture(config),
        num_parameters=weights.num_elements,
        num_layers=read_size("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        intermediate_size=_read_intermediate_size(text, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read_size("vocab_size"),
        context_length=read_size("max_position_embeddings", "n_positions"),
        dtype=weights.dtype,
        experts_per_token=_read_experts_per_token(text),
        num_experts=_count_experts(text),
        expert_parameters=weights.num_expert_elements,
        has_untied_lm_head=weights.has_projection,
        norm_width=sum(norms) or 2 * hidden,
        has_fusable_norms=is_silu,
        has_fusable_gates=is_silu and weights.has_gates,
        tower=describe_towers(get_thinker_config(config), weights.shapes, hidden),
    )


def _read_architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type", "unknown"))


def _read_experts_per_token(text_config: Mapping[str, Any]) -> int:
    return _read_int(text_config, "num_experts_per_tok") if _count_experts(text_config) > 1 else 0


def _count_experts(text_config: Mapping[str, Any]) -> int:
    counts = [text_config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    return next((n for n in counts if isinstance(n, int)), 0)


def _read_intermediate_size(text_config: Mapping[str, Any], hidden_size: int) -> int:
    """Return the inner size of an MLP; for MoE, the sum over all experts of a token, including shared experts."""
    dense = text_config.get("intermediate_size") or text_config.get("n_inner") or 4 * hidden_size
    if not isinstance(dense, int):  # some model families have one size per layer
        dense = max((size for size in dense if isinstance(size, int)), default=4 * hidden_size)
    chosen = _read_experts_per_token(text_config)
    if not chosen:
        return dense
    expert_size = _read_int(text_config, "moe_intermediate_size") or dense
    shared = _read_int(text_config, "shared_expert_intermediate_size") or expert_size * _read_int(
        text_config, "n_shared_experts"
    )
    return chosen * expert_size + shared


def _read_int(text_config: Mapping[str, Any], key: str) -> int:
    value = text_config.get(key)
    return value if isinstance(value, int) else 0


def _count_weights(config: Mapping[str, Any], files: list[Path]) -> WeightCounts:
    """Count the elements of safetensors files from their headers; tied weights are counted once."""
    tensors = read_tensor_headers(files)
    copy = find_tied_copy(config, tensors)
    by_dtype, num_tensors, num_expert_elements = Counter[str](), 0, 0
    norms, has_gates, has_projection = dict[str, int](), False, False
    for name, tensor in tensors.items():
        # Files often store tied weights twice.
        if (copy is not None and name == copy[0]) or name.startswith(SPEECH_PREFIXES):
            continue
        number = math.prod(tensor.shape)
        by_dtype[tensor.dtype] += number
        num_tensors += 1
        num_expert_elements += number if ".experts." in name else 0
        has_gates |= ".gate_proj." in name and not is_tower_weight(name)
        has_projection |= name.endswith("lm_head.weight")
        if ".layers.0." in name and name.endswith("norm.weight") and not is_tower_weight(name):
            norms[name.split(".")[-2]] = number
    common = by_dtype.most_common(1)[0][0]
    dtype = DTYPE_NAMES.get(common, common.lower())
    counts = WeightCounts(by_dtype.total(), num_tensors, num_expert_elements, dtype, norms, has_gates, has_projection)
    if get_thinker_config(config).get("vision_config") is None:
        return counts
    return counts._replace(shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()})
