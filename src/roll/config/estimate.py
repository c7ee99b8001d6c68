"""What a configuration will need, computed before anything is loaded: memory by role, batch arithmetic, disk.

Pure functions of the configuration and the model's sizes. Memory is an upper estimate for full-length
answers; the coefficients of the activations were counted from the tensors that autograd keeps for a
Llama-like layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from roll.config.inference import InferenceConfig
from roll.config.judge import JudgeConfig
from roll.config.pipelines.rlvr import RLVRConfig

__all__ = [
    "BatchArithmetic",
    "DiskUse",
    "JudgeEngines",
    "ModelSizes",
    "RoleMemory",
    "activation_bytes_per_token",
    "batch_arithmetic",
    "disk_use",
    "memory_by_role",
    "num_lora_parameters",
]

GIB = 2**30
LIBRARIES_BYTES = int(0.5 * GIB)
"""Resident memory of a process that has imported torch and transformers."""
VLLM_BYTES = int(0.85 * GIB)
"""What a vLLM engine takes besides weights and KV cache, on CPU."""
DEFAULT_CPU_KV_BYTES = 256 * 2**20
LOGIT_CHUNK_BYTES = 3 * 128 * 2**20
"""Most that the chunked vocabulary projection holds: a chunk, its gradient, and the logits it keeps."""
STATS_BYTES_PER_ROLLOUT_TOKEN = 12
"""Token id, log-prob and policy version of a recorded token, before compression."""


class ModelSizes(Protocol):
    """Sizes of a decoder; `roll.models.ModelDescription` has them."""

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


@dataclass(frozen=True, kw_only=True)
class BatchArithmetic:
    """How a step and a run divide; token counts are for answers of full length."""

    prompts_per_step: int
    rollouts_per_step: int
    generated_tokens: int
    """Per step, at most."""
    trained_tokens: int
    """Per step and at most: what goes through the network, shared prompts once."""
    micro_batches: int
    """Per rank and step, about."""
    tokens_per_micro_batch: int
    evaluation_samples: int
    num_evaluations: int
    prompts_in_run: int
    epochs: Mapping[str, float]
    """By domain: how often the run goes through the source's training prompts."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Memory of one rank or engine of a role."""

    role: str
    count: int
    """Ranks or engines; of several critics all."""
    parts: Mapping[str, int]
    """Bytes by what they hold."""

    @property
    def bytes_each(self) -> int:
        """One rank or engine."""
        return sum(self.parts.values())

    @property
    def bytes_total(self) -> int:
        """All of them."""
        return self.count * self.bytes_each


@dataclass(frozen=True, kw_only=True)
class JudgeEngines:
    """What the run's own judge runs on."""

    sizes: ModelSizes
    kind: str
    """`vllm` or `hf`."""
    max_context: int
    """Longest request plus reply, in tokens."""


@dataclass(frozen=True, kw_only=True)
class DiskUse:
    """What a run writes."""

    checkpoint_bytes: int
    num_checkpoints: int
    """Kept at the end; one more exists while saving."""
    rollout_bytes: int
    """All recorded rollouts, at most."""

    @property
    def peak_bytes(self) -> int:
        """At most, while the last checkpoint is being saved."""
        extra = 1 if self.num_checkpoints else 0
        return self.checkpoint_bytes * (self.num_checkpoints + extra) + self.rollout_bytes


def batch_arithmetic(
    config: RLVRConfig, *, longest_prompt: int, train_prompts: Mapping[str, int], held_out_prompts: int
) -> BatchArithmetic:
    """Divide a step and a run.

    Args:
        config: the run.
        longest_prompt: tokens of the longest prompt.
        train_prompts: by domain, how many prompts there are to train on.
        held_out_prompts: how many there are for evaluation.
    """
    rollout, training, evaluation = config.rollout, config.training, config.evaluation
    copies = 1 if training.share_prefix else rollout.group_size
    per_group = copies * longest_prompt + rollout.group_size * config.max_answer_tokens
    trained = rollout.prompts_per_step * per_group
    per_rank = math.ceil(trained / config.num_ranks)
    prompts_in_run = training.num_steps * rollout.prompts_per_step
    weights = {entry.domain or entry.source: entry.weight for entry in config.data}
    total_weight = sum(weights.values())
    return BatchArithmetic(
        prompts_per_step=rollout.prompts_per_step,
        rollouts_per_step=config.rollouts_per_step,
        generated_tokens=config.rollouts_per_step * config.max_answer_tokens,
        trained_tokens=trained,
        micro_batches=math.ceil(per_rank / training.max_tokens_per_micro_batch),
        tokens_per_micro_batch=min(per_rank, training.max_tokens_per_micro_batch),
        evaluation_samples=min(evaluation.num_prompts, held_out_prompts) * evaluation.samples_per_prompt,
        num_evaluations=_num_evaluations(config) if held_out_prompts else 0,
        prompts_in_run=prompts_in_run,
        epochs={
            domain: prompts_in_run * weights[domain] / total_weight / count
            for domain, count in train_prompts.items()
            if count and domain in weights
        },
    )


def _num_evaluations(config: RLVRConfig) -> int:
    steps, every = config.training.num_steps, config.evaluation.every_num_steps
    during = (steps - 1) // every if every else 0
    return during + 1 + config.evaluation.before_training


def num_lora_parameters(sizes: ModelSizes, rank: int) -> int:
    """Weights of adapters on all linear layers of a gated decoder: each adds rank x (inputs + outputs)."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    return sizes.num_layers * rank * (attention + 3 * (hidden + inner))


def activation_bytes_per_token(sizes: ModelSizes, element_bytes: int, *, checkpointing: bool) -> int:
    """What autograd keeps of one token until its backward pass.

    Per layer: 4 hidden vectors, queries and attention output, keys and values, 4 vectors inside the gated
    MLP, all in the computation's format, and 2 hidden vectors in float32 inside the norms. With
    checkpointing, one hidden vector per layer, and one layer in full.
    """
    hidden, queries = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    keys = sizes.num_kv_heads * sizes.head_dim
    elements = 4 * hidden + 2 * queries + 2 * keys + 4 * sizes.intermediate_size
    layer = element_bytes * elements + 4 * (2 * hidden + sizes.num_heads + 2)
    if checkpointing:
        return sizes.num_layers * hidden * element_bytes + layer
    return sizes.num_layers * layer


def memory_by_role(
    config: RLVRConfig,
    sizes: ModelSizes,
    batch: BatchArithmetic,
    *,
    engine_kind: str,
    max_context: int,
    on_accelerator: bool,
    critic_sizes: ModelSizes | None = None,
    judge: JudgeEngines | None = None,
) -> list[RoleMemory]:
    """Memory of each role.

    Args:
        config: the run.
        sizes: of the model.
        batch: from `batch_arithmetic`.
        engine_kind: `vllm` or `hf`.
        max_context: longest prompt plus answer, in tokens.
        on_accelerator: whether the figures are for a device's memory; host libraries are then left out.
        critic_sizes: of `algorithm.critic.model`, where it is not the policy's.
        judge: the run's own, where there is one and its sizes are known.
    """
    element = 2 if config.model.dtype == "bfloat16" else 4
    ranks = config.num_ranks
    policy = _trained(config, sizes, ranks, element) | _passes(config, sizes, batch, ranks, element)
    policy["logits"] = _logits(sizes, batch.tokens_per_micro_batch, element)
    if config.trainer_holds_reference and config.model.lora is None:
        policy["reference"] = sizes.num_parameters * element // ranks
    roles = [
        RoleMemory(role="actor_train", count=ranks, parts=policy),
        RoleMemory(
            role="actor_infer",
            count=config.num_engines,
            parts=_engines(
                config, config.inference, config.num_engines, sizes, engine_kind, max_context, element, on_accelerator
            ),
        ),
    ]
    if "critic" in config.roles:
        ranks, backbone = config.roles["critic"].count, critic_sizes or sizes
        parts = _trained(config, backbone, ranks, element) | _passes(config, backbone, batch, ranks, element)
        roles.append(RoleMemory(role="critic", count=ranks * config.algorithm.num_critic_models, parts=parts))
    if "reference" in config.roles:
        ranks = config.roles["reference"].count
        parts = {"weights": sizes.num_parameters * element // ranks, **_gathered(sizes, ranks, element)}
        parts["logits"] = _logits(sizes, _micro_batch(config, batch, ranks), element)
        roles.append(RoleMemory(role="reference", count=ranks, parts=parts))
    if config.judge is not None and judge is not None:
        roles.append(_judge(config, config.judge, judge, on_accelerator))
    if not on_accelerator:
        separate = config.cluster.type == "ray"
        processes = 1 + (sum(role.count for role in roles) if separate else 0)
        roles.append(RoleMemory(role="processes", count=processes, parts={"libraries": LIBRARIES_BYTES}))
    return roles


def _trained(config: RLVRConfig, sizes: ModelSizes, ranks: int, element: int) -> dict[str, int]:
    """A rank's share of what training keeps between steps, and of gradients."""
    trained = _num_trained(config, sizes)
    own_copy = element != 4
    parts = {"master weights": 4 * trained // ranks} if own_copy or config.model.lora else {}
    parts["weights"] = sizes.num_parameters * element // ranks
    parts["gradients"] = 4 * trained // ranks
    parts["AdamW"] = 8 * trained // ranks
    return parts


def _passes(config: RLVRConfig, sizes: ModelSizes, batch: BatchArithmetic, ranks: int, element: int) -> dict[str, int]:
    """What a forward and backward pass over a micro-batch needs besides, up to the final hidden states."""
    per_token = activation_bytes_per_token(sizes, element, checkpointing=config.training.activation_checkpointing)
    return {**_gathered(sizes, ranks, element), "activations": _micro_batch(config, batch, ranks) * per_token}


def _micro_batch(config: RLVRConfig, batch: BatchArithmetic, ranks: int) -> int:
    """Tokens that a rank sends through the network at once."""
    return min(math.ceil(batch.trained_tokens / ranks), config.training.max_tokens_per_micro_batch)


def _gathered(sizes: ModelSizes, ranks: int, element: int) -> dict[str, int]:
    """Weights that several ranks hold whole for the moment: embeddings, and two layers."""
    if ranks == 1:
        return {}
    embedding = sizes.vocab_size * sizes.hidden_size
    layer = max(0, sizes.num_parameters - embedding) // max(1, sizes.num_layers)
    return {"gathered weights": element * (embedding + 2 * layer)}


def _logits(sizes: ModelSizes, num_tokens: int, element: int) -> int:
    return min(num_tokens * sizes.vocab_size * (8 + element), LOGIT_CHUNK_BYTES)


def _num_trained(config: RLVRConfig, sizes: ModelSizes) -> int:
    lora = config.model.lora
    return num_lora_parameters(sizes, lora.rank) if lora else sizes.num_parameters


def _judge(config: RLVRConfig, section: JudgeConfig, judge: JudgeEngines, on_accelerator: bool) -> RoleMemory:
    element, count = 2 if section.dtype == "bfloat16" else 4, config.num_judges
    parts = _engines(config, section, count, judge.sizes, judge.kind, judge.max_context, element, on_accelerator)
    return RoleMemory(role="judge", count=count, parts=parts)


def _engines(
    config: RLVRConfig,
    section: InferenceConfig | JudgeConfig,
    count: int,
    sizes: ModelSizes,
    kind: str,
    max_context: int,
    element: int,
    on_accelerator: bool,
) -> dict[str, int]:
    """What one of `count` engines holds, on all its devices together."""
    cache = section.kv_cache_bytes
    if cache is None:
        running = min(section.max_num_seqs, math.ceil(config.rollouts_per_step / count))
        cache = running * max_context * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * element
        if not on_accelerator:  # vLLM takes all of it at once, the embedded engine what it needs of it
            cache = DEFAULT_CPU_KV_BYTES if kind == "vllm" else min(cache, DEFAULT_CPU_KV_BYTES)
    parts = {"weights": sizes.num_parameters * element, "keys and values": cache * section.tensor_parallel}
    if kind == "vllm" and not on_accelerator:
        parts["engine"] = VLLM_BYTES
    return parts


def disk_use(
    config: RLVRConfig,
    sizes: ModelSizes,
    batch: BatchArithmetic,
    *,
    longest_prompt: int,
    critic_sizes: ModelSizes | None = None,
) -> DiskUse:
    """What the run directory will hold: model and optimiser states per checkpoint, recorded rollouts."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    trained = _num_trained(config, sizes)
    trained += config.algorithm.num_critic_models * _num_trained(config, critic_sizes or sizes)
    checkpoint, steps = config.checkpoint, config.training.num_steps
    saves = (steps // checkpoint.every_num_steps if checkpoint.every_num_steps else 0) + checkpoint.at_end
    kept = min(saves, checkpoint.keep_last) + (checkpoint.keep_best and saves > 1)
    tokens = config.max_answer_tokens + longest_prompt
    rollouts = steps * batch.rollouts_per_step + batch.num_evaluations * batch.evaluation_samples
    return DiskUse(
        checkpoint_bytes=sizes.num_parameters * element + 12 * trained,
        num_checkpoints=kept,
        rollout_bytes=rollouts * tokens * STATS_BYTES_PER_ROLLOUT_TOKEN if config.tracking.rollouts else 0,
    )
