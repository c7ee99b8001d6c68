"""Memory estimates of each role, computed before a model is loaded; a pipeline adds them up.

As in `activation_memory`, all functions are pure functions of sections and of a model's sizes. The results are upper
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roll.config.activation_memory import (
    ModelSizes,
    compute_peak_stage_fractions,
    estimate_forward_backward_bytes,
    get_element_bytes,
)
from roll.config.adapter_parameters import count_lora_parameters
from roll.config.engines import get_engine_capabilities
from roll.config.inference import EngineOptions
from roll.config.model import LoRAConfig, ModelConfig
from roll.config.operations import Quantization
from roll.config.parallel import ParallelConfig
from roll.config.run import RunConfig
from roll.config.tower_memory import count_frozen_parameters, count_tower_adapters, estimate_tower_bytes
from roll.config.training import TrainingConfig

__all__ = [
    "LIBRARIES_BYTES",
    "DiskUse",
    "JudgeEngines",
    "RoleMemory",
    "add_host_memory",
    "compute_moment_bytes",
    "count_quantized_parameters",
    "count_trained_parameters",
    "estimate_disk_use",
    "estimate_engine_bytes",
    "estimate_frozen_bytes",
    "estimate_heap_bytes",
    "estimate_kernel_bytes",
    "estimate_sync_bytes",
    "estimate_trained_bytes",
    "estimate_training_bytes",
]

GIB = 2**30
LIBRARIES_BYTES = int(0.54 * GIB)
"""Memory of a process that trains on a CPU, without its tensors: torch, transformers and a run's other imports."""
PROCESSOR_BYTES = 80 * 2**20
"""Additional memory of a process that reads images: the processor of the model, and images that it caches."""
DEFAULT_CPU_KV_BYTES = 256 * 2**20
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Bytes of a weight in 4 bits, including its fraction of the scales."""
KERNEL_BYTES = 0.57 * 2**20
"""Code and tables of a matmul of any size on a CPU in bfloat16 (oneDNN); measured: 0.53 to 0.65 MiB."""
MAX_KERNELS = 1024
"""Number of kernels that oneDNN caches; it creates one for each product size."""
_KERNEL_CACHE = "matmul kernels"


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Memory of one rank or engine of a role."""

    role: str
    count: int
    """Number of ranks or engines of the role, over all critics if there are several."""
    parts: Mapping[str, int]
    """Bytes by content, such as `gradients`."""

    @property
    def bytes_each(self) -> int:
        """Bytes of one rank or engine."""
        return sum(self.parts.values())

    @property
    def bytes_total(self) -> int:
        """Bytes of all ranks or engines."""
        return self.count * self.bytes_each


@dataclass(frozen=True, kw_only=True)
class JudgeEngines:
    """The engines of the run's judge."""

    sizes: ModelSizes
    kind: str
    """Type of the engines, see `ENGINES`."""
    max_context: int
    """Maximum length of a request plus its response, in tokens."""


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """Sizes of the files that a run writes."""

    checkpoint_bytes: int
    num_checkpoints: int
    """Number of checkpoints at the end; one more exists while saving."""
    num_scheduled: int
    """Maximum number of concurrent checkpoints, without those that a time limit or a signal triggers."""
    rollout_bytes: int
    """Upper bound of all recorded rollouts."""
    stored_bytes: int = 0
    """Bytes of the stored outputs of a reference or of teachers."""

    def find_problem(self, free_bytes: int) -> str:
        """Return the problem and a remedy if the checkpoints exceed `free_bytes`; otherwise an empty string."""
        needed = self.num_scheduled * self.checkpoint_bytes
        if needed <= free_bytes:
            return ""
        what = f"{self.num_scheduled} checkpoints" if self.num_scheduled > 1 else "a checkpoint"
        return (
            f"the disk has {_format_size(free_bytes)} of free space, but the run needs space for {what} of "
            f"{_format_size(self.checkpoint_bytes)}: choose another output_dir, save less often, or set model.lora."
        )

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the total size, reached while the last checkpoint is being saved."""
        extra = 1 if self.num_checkpoints else 0
        return self.checkpoint_bytes * (self.num_checkpoints + extra) + self.rollout_bytes + self.stored_bytes


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def estimate_disk_use(
    config: RunConfig,
    training: TrainingConfig,
    sizes: ModelSizes,
    num_steps: int,
    *,
    num_other_parameters: int = 0,
    rollout_bytes: int = 0,
    stored_bytes: int = 0,
) -> DiskUse:
    """Estimate the size of the run directory: checkpoints with optimizer states, and the pipeline's other files.

    Args:
        config: the run.
        training: the training section of the run.
        sizes: the sizes of the run's model.
        num_steps: number of optimizer steps of the run.
        num_other_parameters: number of weights of other trained models, such as critics.
        rollout_bytes: upper bound of the size of all recorded rollouts.
        stored_bytes: bytes of the stored outputs of a reference or of teachers.
    """
    checkpoint, trained = config.checkpoint, count_trained_parameters(config.model, sizes) + num_other_parameters
    saves = (num_steps // checkpoint.every_num_steps if checkpoint.every_num_steps else 0) + checkpoint.at_end
    return DiskUse(
        checkpoint_bytes=sizes.num_parameters * get_element_bytes(config.model.dtype)
        + round((4 + compute_moment_bytes(config.model, training)) * trained),
        num_checkpoints=min(saves, checkpoint.keep_last) + (checkpoint.keep_best and saves > 1),
        num_scheduled=min(saves, checkpoint.keep_last + 1),
        rollout_bytes=rollout_bytes,
        stored_bytes=stored_bytes,
    )


def add_host_memory(roles: Sequence[RoleMemory], config: RunConfig, *, reads_images: bool = False) -> list[RoleMemory]:
    """Add the additional host memory of a run without accelerators to the memory of its roles.

    The additional memory holds the copies for asynchronous checkpoints and the libraries of every process.

    Args:
        roles: the memory of the roles.
        config: the run.
        reads_images: whether the model has a vision tower.
    """
    checkpoint = config.checkpoint
    if checkpoint.asynchronous and checkpoint.every_num_steps:
        roles = [replace(role, parts={**role.parts, **_estimate_copied_bytes(role.parts)}) for role in roles]
    count = 1 + (sum(role.count for role in roles) if config.cluster.type == "ray" else 0)
    parts = {"libraries": LIBRARIES_BYTES} | ({"image processor": PROCESSOR_BYTES} if reads_images else {})
    return [*roles, RoleMemory(role="processes", count=count, parts=parts)]


def _estimate_copied_bytes(parts: Mapping[str, int]) -> dict[str, int]:
    """Estimate the bytes that a trainer's rank copies for asynchronous checkpoints: AdamW moments and float32 weights.

    The float32 weights are as large as the gradients.
    """
    return {"copy that is written": parts["gradients"] + parts["AdamW"]} if "AdamW" in parts else {}


def estimate_heap_bytes(parts: Mapping[str, int], *, trimmed: bool) -> dict[str, int]:
    """Estimate the free heap memory that the C library has not returned to the system.

    Args:
        parts: memory of a trainer's rank.
        trimmed: whether free pieces are returned to the system (`roll.training.memory.malloc_trim`).
    """
    tensors = sum(parts.values()) - parts.get(_KERNEL_CACHE, 0)
    # malloc_trim runs as soon as an eighth of the live memory is free; kernels leave no holes in the heap. Without it,
    # the share depends on the temporaries of the processor's products: measured, 0.2 to 0.3 of the activations with
    # native attention, 0.3 to 0.9 without.
    activations = parts["activations"] + parts.get("vision tower", 0)
    return {"heap": round(tensors / 8 if trimmed else 0.4 * activations)}


def estimate_kernel_bytes(
    model: ModelConfig, training: TrainingConfig, sizes: ModelSizes, micro_batches: int, *, on_accelerator: bool
) -> dict[str, int]:
    """Estimate the memory of the kernels that oneDNN caches for the matmuls of a step's micro-batches on a CPU.

    Every micro-batch has a different number of tokens, and every expert gets a different fraction of them, so their
    matmuls need different kernels. A matrix has three matmuls: one for the output and one for each of the two
    gradients. Layers share their kernels.
    """
    if on_accelerator or get_element_bytes(model.dtype) != 2:
        return {}
    experts = sizes.num_layers // training.parallel.pp * (sizes.num_experts // training.parallel.ep)
    matrices = 5 + 2 * experts if experts else 6  # attention, MLP or router, and vocabulary
    matrices += 5 if model.lora else 0  # adapters: inputs of two widths, outputs of three
    return {_KERNEL_CACHE: round(KERNEL_BYTES * min(3 * matrices * micro_batches, MAX_KERNELS))}


def count_linear_parameters(sizes: ModelSizes) -> int:
    """Count the weights in the linear layers of a gated decoder, without experts."""
    heads = 2 * sizes.num_heads * sizes.head_dim + 2 * sizes.num_kv_heads * sizes.head_dim
    inner = 0 if sizes.experts_per_token else sizes.intermediate_size
    return sizes.num_layers * sizes.hidden_size * (heads + 3 * inner)


def count_quantized_parameters(quantization: Quantization, sizes: ModelSizes) -> int:
    """Count the weights that are quantized to 8 bits; 0 if `quantization` is `none`."""
    if quantization == "none":
        return 0
    return min(count_linear_parameters(sizes) + sizes.expert_parameters, sizes.num_parameters)


def estimate_sync_bytes(
    quantization: Quantization, sizes: ModelSizes, element_bytes: int, adapter: LoRAConfig | None = None
) -> int:
    """Estimate the bytes that a weight sync sends, without quantization scales, which add less than 1 %.

    With `adapter`, only the adapter is sent.
    """
    if adapter is not None:
        return count_lora_parameters(sizes, adapter) * element_bytes
    in_codes = count_quantized_parameters(quantization, sizes)
    return (sizes.num_parameters - in_codes) * element_bytes + in_codes


def count_trained_parameters(model: ModelConfig, sizes: ModelSizes) -> int:
    """Count the weights that the optimizer updates."""
    if model.lora is None:
        return sizes.num_parameters - count_frozen_parameters(model.vision, sizes.tower, sizes.num_parameters)
    decoder = 0 if "language_model" in model.vision.freeze else count_lora_parameters(sizes, model.lora)
    return decoder + count_tower_adapters(model.vision, sizes.tower, model.lora.rank)


def compute_moment_bytes(model: ModelConfig, training: TrainingConfig) -> float:
    """Compute the bytes of both AdamW moments of one weight.

    In 8 bits, every 256 moments share a scale. LoRA matrices are small, so most of their moments stay in float32.
    """
    return 2 + 8 / 256 if training.optimizer == "adamw_8bit" and model.lora is None else 8


def estimate_trained_bytes(
    model: ModelConfig, training: TrainingConfig, sizes: ModelSizes, ranks: int, *, on_accelerator: bool
) -> dict[str, int]:
    """Estimate the bytes of weights, optimizer states and gradients on the rank with the largest part.

    One copy of the weights is sharded over `ranks` ranks. With FSDP, all weights, including frozen weights, are stored
    as float32 master weights; otherwise the network has a copy in the compute dtype. With offloading, an accelerator
    has only the weights, and the gradients that are being transferred.
    """
    trained, element_bytes = count_trained_parameters(model, sizes), get_element_bytes(model.dtype)
    offloaded = training.offload_optimizer and on_accelerator
    is_shared = training.backend == "torch" and ranks * training.parallel.dp_replicate > training.parallel.pp
    own_copy = element_bytes != 4 and not offloaded and not is_shared
    share = _compute_rank_share(sizes, training.parallel, ranks)
    parts = {"master weights": round(4 * trained * share)} if own_copy or (model.lora and not offloaded) else {}
    whole = sizes.num_parameters
    if model.lora is not None and model.lora.base == "nf4":
        in_4_bits = min(count_linear_parameters(sizes), whole)
        parts["weights in 4 bits"] = round(NF4_BYTES * in_4_bits)  # every rank holds all of them
        whole -= in_4_bits
    parts["weights"] = round(whole * (4 if is_shared else element_bytes) * share)
    if offloaded:
        return parts | _estimate_offloaded_bytes(
            training, sizes, whole, 0 if model.lora is None else trained, ranks, element_bytes
        )
    moments = round(compute_moment_bytes(model, training) * trained * share)
    return parts | {"gradients": round(4 * trained * share), "AdamW": moments}


def _compute_rank_share(sizes: ModelSizes, parallel: ParallelConfig, ranks: int) -> float:
    """Compute the largest fraction of the weights on one rank, if one copy is sharded over `ranks` ranks."""
    return compute_peak_stage_fractions(sizes, parallel).weights * parallel.pp / ranks


def estimate_frozen_bytes(sizes: ModelSizes, parallel: ParallelConfig, ranks: int, element_bytes: int) -> int:
    """Estimate the bytes of a frozen model on the trainer's rank with the largest part."""
    share = _compute_rank_share(sizes, parallel, ranks // parallel.dp_replicate)
    return round(sizes.num_parameters * element_bytes * share)


def estimate_training_bytes(
    model: ModelConfig,
    training: TrainingConfig,
    sizes: ModelSizes,
    num_tokens: int,
    ranks: int,
    *,
    micro_batches: int,
    on_accelerator: bool,
    media_tokens: int = 0,
) -> dict[str, int]:
    """Estimate the memory of one trainer rank, by content; logits are not included.

    On a CPU, the backward pass allocates gradients while it frees activations, so gradients do not add to the peak
    during the first micro-batch. The gradients of weights that have a copy in another dtype (such as experts with `ep`)
    are an exception and need additional memory. On a device, gradients always add to the peak.

    Args:
        model: the model section of the run.
        training: the training section of the run.
        sizes: the sizes of the model.
        num_tokens: tokens of a micro-batch.
        ranks: number of the trainer's ranks.
        micro_batches: number of micro-batches of a step.
        on_accelerator: whether the rank is on an accelerator.
        media_tokens: feature tokens of the distinct images of a micro-batch; every rank of `tp` and `cp` computes all
            of them.
    """
    shards = ranks // training.parallel.dp_replicate
    parts = estimate_trained_bytes(model, training, sizes, shards, on_accelerator=on_accelerator)
    parts |= estimate_forward_backward_bytes(
        model, training, sizes, num_tokens, ranks, micro_batches=micro_batches, on_accelerator=on_accelerator
    )
    have_copies = "master weights" in parts or training.parallel.ep > 1
    if micro_batches == 1 and not have_copies and not on_accelerator:
        first = 4 * sizes.vocab_size * sizes.hidden_size // shards if model.lora is None else 0
        parts["activations"] -= min(max(parts["gradients"] - first, 0), parts["activations"])
    element_bytes, checkpointing = get_element_bytes(model.dtype), training.activation_checkpointing
    return parts | estimate_tower_bytes(
        model.vision, sizes.tower, media_tokens, element_bytes, checkpointing=checkpointing
    )


def _estimate_offloaded_bytes(
    training: TrainingConfig,
    sizes: ModelSizes,
    num_parameters: int,
    lora_parameters: int,
    ranks: int,
    element_bytes: int,
) -> dict[str, int]:
    """Estimate a rank's device memory for weights and gradients if optimizer states are offloaded to the host.

    FSDP keeps the weights in float32. It keeps only the gradient of the vocabulary's matrix until the backward pass
    ends; `estimate_forward_backward_bytes` counts the other gradients.
    """
    parallel = training.parallel
    is_shared = ranks * parallel.dp_replicate > parallel.pp
    embedding = 0 if lora_parameters else sizes.vocab_size * sizes.hidden_size
    gradients = 0 if is_shared else element_bytes * embedding
    weights = round(
        (num_parameters + lora_parameters)
        * (4 if is_shared else element_bytes)
        * _compute_rank_share(sizes, parallel, ranks)
    )
    return {"weights": weights, "gradients": gradients // parallel.tp}


def estimate_engine_bytes(
    section: EngineOptions,
    sizes: ModelSizes,
    *,
    width: int,
    num_requests: int,
    kind: str,
    max_context: int,
    element_bytes: int,
    on_accelerator: bool,
) -> dict[str, int]:
    """Estimate the memory of an engine of the type `kind` on all its `width` devices, in bytes by content. It serves
    `num_requests` concurrent requests of `max_context` tokens."""
    capabilities = get_engine_capabilities(kind)
    cache = section.kv_cache_bytes
    if cache is None:
        running = min(section.max_num_seqs, num_requests)
        cache = running * max_context * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * element_bytes
        if not on_accelerator:
            cache = DEFAULT_CPU_KV_BYTES if capabilities.reserves_kv_cache else min(cache, DEFAULT_CPU_KV_BYTES)
    in_codes = count_quantized_parameters(section.quantization, sizes)
    # On a CPU, fp8 products use an additional copy of the codes in the compute dtype.
    code_bytes = 1 if on_accelerator or section.quantization == "int8" else 1 + element_bytes
    weights = (sizes.num_parameters - in_codes) * element_bytes + in_codes * code_bytes
    parts = {"weights": weights, "KV cache": cache * width}
    if capabilities.host_bytes and not on_accelerator:
        parts["engine"] = capabilities.host_bytes
    return parts
