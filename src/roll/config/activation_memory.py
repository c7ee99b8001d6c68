"""Estimates of the activation memory of a micro-batch's forward and backward pass; `estimate` adds the other memory.

The coefficients count the tensors that autograd keeps in layers like those of Llama, Qwen3, GLM-4 and Gemma 3. They do
not include attention scores, which are kept only if attention is neither flash attention nor ROLL's native attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.config.staging import assign_layers
from roll.config.tower_memory import TowerSizes
from roll.config.training import TrainingConfig

__all__ = [
    "ModelSizes",
    "PeakStageFractions",
    "compute_peak_stage_fractions",
    "estimate_activation_bytes_per_token",
    "estimate_forward_backward_bytes",
    "estimate_gathered_bytes",
    "estimate_logit_bytes",
    "get_element_bytes",
]

LOGIT_CHUNK_BYTES = 2 * 64 * 2**20
"""Bytes of one chunk of the vocabulary projection's logits and of its gradient."""
KEPT_LOGIT_BYTES = 512 * 2**20
"""Maximum bytes of a micro-batch's logits that are kept for the backward pass; larger logits are recomputed."""


class ModelSizes(Protocol):
    """Sizes of a decoder; `roll.models.ModelDescription` implements it.

    `num_parameters` counts all weights of a multimodal model, including the weights of `tower`.
    """

    @property
    def num_parameters(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_parameters(self) -> int: ...
    @property
    def has_untied_lm_head(self) -> bool: ...
    @property
    def norm_width(self) -> int: ...
    @property
    def has_fusable_norms(self) -> bool: ...
    @property
    def has_fusable_gates(self) -> bool: ...
    @property
    def tower(self) -> TowerSizes | None: ...


def get_element_bytes(dtype: str) -> int:
    """Return the size of one element of a dtype, in bytes."""
    return 2 if dtype == "bfloat16" else 4


def estimate_activation_bytes_per_token(
    sizes: ModelSizes,
    element_bytes: int,
    *,
    checkpointing: bool,
    mlp_slice: float | None = None,
    fused: bool = False,
    offloaded: bool = False,
    lora_rank: int = 0,
    dora: bool = False,
) -> tuple[int, int]:
    """Estimate the activation bytes of one token.

    Returns:
        The bytes that autograd keeps until the backward pass, and the temporary bytes of one layer.

    Each layer keeps 2 hidden vectors, the inputs of norms, queries and attention output, keys and values, 4 vectors
    inside the gated MLP, and 2 hidden vectors per expert, all in the compute dtype, plus a float32 copy of the inputs
    of norms; norms other than Llama's keep both copies of their inputs in float32. A fused norm
    (`roll.training.network.fused`) keeps one float32 number instead of the float32 copy, and a fused gate keeps 3
    vectors inside an MLP. With activation checkpointing, one hidden vector per layer is kept, and one whole layer with
    two gradients inside its MLP is temporary. With offloading, nothing is kept, and the inputs of an MLP's gate are
    temporary. An adapter keeps the values between its two matrices even with offloading, since transferring such small
    tensors is not worthwhile.

    Args:
        sizes: the sizes of the model.
        element_bytes: bytes of one element in the compute dtype.
        checkpointing: whether layers run again in the backward pass.
        mlp_slice: fraction of a row's tokens in each slice, if MLPs run in slices and again in the backward pass; then
            only one slice of one MLP is in memory at a time.
        fused: whether norms and gates are fused where possible, as on a CPU in bfloat16.
        offloaded: whether activations are offloaded to host memory.
        lora_rank: rank of the adapters of linear layers; 0 without adapters.
        dora: whether adapters train row norms, so that the outputs of layer and adapter are kept.
    """
    hidden, queries = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    in_norms = 2 if fused and sizes.has_fusable_norms else sizes.norm_width + sizes.num_heads + 2
    in_gate = 3 if fused and sizes.has_fusable_gates and not sizes.experts_per_token else 4
    in_adapters = element_bytes * lora_rank * (4 if sizes.experts_per_token else 7)
    if dora:
        mlp_outputs = 0 if sizes.experts_per_token else 2 * sizes.intermediate_size + hidden
        in_adapters += element_bytes * 2 * (queries + 2 * keys + hidden + mlp_outputs)
    normed = (element_bytes if sizes.has_fusable_norms else 4) * sizes.norm_width
    around = element_bytes * (2 * hidden + 2 * queries + 2 * keys) + normed + 4 * in_norms + in_adapters
    inside = element_bytes * (in_gate * sizes.intermediate_size + 2 * sizes.experts_per_token * hidden)
    part = 1 if mlp_slice is None else mlp_slice
    if checkpointing:
        kept = 0 if offloaded else sizes.num_layers * hidden * element_bytes
        return kept, around + round(part * (inside + 2 * element_bytes * sizes.intermediate_size))
    if offloaded:
        passing = element_bytes * hidden + round(part * (inside + element_bytes * sizes.intermediate_size))
        return sizes.num_layers * in_adapters, passing
    if mlp_slice is None:
        return sizes.num_layers * (around + inside), 0
    return sizes.num_layers * around, round(2 * part * inside)


@dataclass(frozen=True, kw_only=True)
class PeakStageFractions:
    """The largest fractions of the weights and of the activations in one pipeline stage; 1 for a single stage."""

    weights: float
    activations: float
    """Fraction relative to `ParallelConfig.compute_peak_activations`, which assumes equal stages."""


def compute_peak_stage_fractions(sizes: ModelSizes, parallel: ParallelConfig) -> PeakStageFractions:
    """Compute the largest fractions of the weights and of the activations in one pipeline stage.

    This is usually the first stage: it has the embeddings in addition to its layers, more layers than the last stage,
    and more micro-batches in flight.

    Args:
        sizes: the sizes of the model; both the first and the last stage contain a tied embedding matrix.
        parallel: the trainer's parallel layout.
    """
    stages = parallel.pp
    if stages == 1:
        return PeakStageFractions(weights=1.0, activations=1.0)
    embedding = sizes.vocab_size * sizes.hidden_size
    matrices = 2 if sizes.has_untied_lm_head else 1
    layer = max(sizes.num_parameters - matrices * embedding, 1) / sizes.num_layers
    idle = sizes.expert_parameters / sizes.num_layers * (1 - sizes.experts_per_token / max(sizes.num_experts, 1))
    parts = assign_layers(sizes.num_layers, stages, parallel.vpp, embedding / max(layer - idle, 1))
    layers = [sum(parts[i::stages]) for i in range(stages)]
    weights = [layer * own + embedding * (i in (0, stages - 1)) for i, own in enumerate(layers)]
    in_flight = [own * (stages - i) for i, own in enumerate(layers)]
    return PeakStageFractions(
        weights=max(weights) / sizes.num_parameters, activations=max(in_flight) / sizes.num_layers
    )


def estimate_forward_backward_bytes(
    model: ModelConfig,
    training: TrainingConfig,
    sizes: ModelSizes,
    num_tokens: int,
    ranks: int,
    *,
    micro_batches: int,
    on_accelerator: bool,
) -> dict[str, int]:
    """Estimate a rank's memory for forward and backward passes, in bytes by content; logits are not included.

    A step has `micro_batches` micro-batches of `num_tokens` tokens each.
    """
    element_bytes, is_trained = get_element_bytes(model.dtype), model.lora is None
    own = num_tokens // training.parallel.ranks_per_micro_batch
    mlp_slice = min(training.tiled_mlp_tokens / max(own, 1), 1.0) if training.tiled_mlp_tokens else None
    kept, passing = estimate_activation_bytes_per_token(
        sizes,
        element_bytes,
        checkpointing=training.activation_checkpointing,
        mlp_slice=mlp_slice,
        fused=element_bytes == 2 and not on_accelerator,
        offloaded=training.offload_activations and on_accelerator,
        lora_rank=model.lora.max_rank if model.lora else 0,
        dora=model.lora is not None and model.lora.use_dora,
    )
    shared = estimate_gathered_bytes(
        training.parallel, sizes, ranks, element_bytes, is_trained=is_trained, on_accelerator=on_accelerator
    )
    in_flight = (
        training.parallel.compute_peak_activations(micro_batches)
        * compute_peak_stage_fractions(sizes, training.parallel).activations
    )
    parts = {**shared, "activations": round(own * kept * in_flight)}
    return parts | ({"a layer": own * passing} if passing else {})


def estimate_gathered_bytes(
    parallel: ParallelConfig,
    sizes: ModelSizes,
    ranks: int,
    element_bytes: int,
    *,
    is_trained: bool,
    on_accelerator: bool,
) -> dict[str, int]:
    """Estimate a rank's temporary memory for gathering weights that are sharded over the ranks of its stage.

    Units are gathered one at a time, so the largest unit determines the memory: a layer or the vocabulary's matrix
    (with `tp`, the rank's part of the matrix). A rank gathers only the experts that `ep` assigns to it, and only if
    other ranks have shards of these experts.

    A layer is gathered into a buffer and copied from there. If it is trained, its gradient is copied into a float32
    buffer to be reduced. On an accelerator, the next layer is gathered and the previous layer's gradient is reduced at
    the same time; on a CPU nothing overlaps with a collective (`roll.training.parallel.fsdp`).

    Args:
        parallel: the trainer's parallel layout.
        sizes: the sizes of the model.
        ranks: number of the trainer's ranks.
        element_bytes: bytes of one element in the compute dtype.
        is_trained: whether the weights are trained and have gradients.
        on_accelerator: whether the rank is on an accelerator.
    """
    if ranks == parallel.pp:
        return {}
    embedding, layers = sizes.vocab_size * sizes.hidden_size, max(1, sizes.num_layers)
    tower = 0 if sizes.tower is None else sizes.tower.num_parameters + sizes.tower.projector_parameters
    layer = max(0, sizes.num_parameters - embedding - tower) // layers
    own = 0
    if parallel.ep > 1:
        experts = sizes.expert_parameters // layers
        layer -= experts
        own = experts // parallel.ep if ranks > parallel.pp * parallel.dp_replicate * parallel.ep else 0
    gathered, added_up = 2 * element_bytes, element_bytes + 4
    of_end = max(gathered, added_up) if is_trained else gathered
    of_layer = (3 * element_bytes + 4 if on_accelerator else of_end) if is_trained else gathered
    return {"gathered weights": max(of_layer * (layer // parallel.tp + own), of_end * embedding // parallel.tp)}


def estimate_logit_bytes(sizes: ModelSizes, num_tokens: int, element_bytes: int, *, layer_bytes: int = 0) -> int:
    """Estimate the bytes that logits add to the peak memory.

    Args:
        sizes: the sizes of the model.
        num_tokens: tokens of the micro-batch.
        element_bytes: bytes of one element in the compute dtype.
        layer_bytes: temporary bytes of a layer. They are freed before logits are computed, so they are subtracted.
    """
    logits = num_tokens * sizes.vocab_size * element_bytes
    kept = logits if logits <= KEPT_LOGIT_BYTES else KEPT_LOGIT_BYTES // 2
    found = min(
        num_tokens * sizes.vocab_size * (8 + element_bytes), LOGIT_CHUNK_BYTES + max(kept, KEPT_LOGIT_BYTES // 2)
    )
    return max(found - layer_bytes, 0)
