"""Estimates of a run before anything is loaded: batch arithmetic, memory by role, disk.

Pure functions of the configuration and the model's sizes. Memory is an upper estimate for full-length answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll.config.activation_memory import ModelSizes, estimate_gathered_bytes, estimate_logit_bytes, get_element_bytes
from roll.config.estimate import (
    JudgeEngines,
    RoleMemory,
    add_host_memory,
    count_quantized_parameters,
    estimate_engine_bytes,
    estimate_frozen_bytes,
    estimate_heap_bytes,
    estimate_kernel_bytes,
    estimate_sync_bytes,
    estimate_training_bytes,
)
from roll.config.judge import JudgeConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.config.training import should_trim_heap

__all__ = [
    "NO_EXTRA_MEMORY",
    "ExtraMemory",
    "RunSizes",
    "compute_run_sizes",
    "estimate_frozen_memory",
    "estimate_memory_by_role",
    "estimate_rollout_bytes",
    "estimate_trainer_memory",
]

STATS_BYTES_PER_ROLLOUT_TOKEN = 12
"""Token id, log-prob and policy version of a recorded token, before compression."""
WRITER_BYTES = 96 * 2**20
"""Memory of the run's process for recording rollouts: pyarrow and its buffers. Measured: 90 to 110 MiB."""
REWARD_WORKER_BYTES = 96 * 2**20
"""Memory of a reward worker process. Measured as PSS: 94 MiB for mathematics, 35 MiB for rewards without a library."""


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """Numbers of prompts, rollouts, tokens and evaluations of a run; answers are assumed to have full length."""

    prompts_per_step: int
    rollouts_per_step: int
    generated_tokens: int
    """Maximum number of generated tokens per step."""
    trained_tokens: int
    """Maximum number of tokens in a step's forward passes; shared prompts are counted once."""
    micro_batches: int
    """Approximate number of micro-batches per rank and step."""
    tokens_per_micro_batch: int
    media_tokens: int
    """Maximum number of feature tokens per micro-batch; repeated images are counted once."""
    evaluation_samples: int
    num_evaluations: int
    epochs: Mapping[str, float]
    """Number of passes of the run over each source's training prompts, by domain."""


def compute_run_sizes(
    config: RolloutRunConfig,
    *,
    longest_prompt: int,
    train_prompts: Mapping[str, int],
    held_out_prompts: int,
    trained_per_group: tuple[int, int] | None = None,
    media_per_prompt: int = 0,
) -> RunSizes:
    """Compute the numbers of prompts, rollouts, tokens and evaluations of a run.

    Args:
        config: The run's configuration.
        longest_prompt: Tokens of the longest prompt.
        train_prompts: Number of training prompts by domain.
        held_out_prompts: Number of held-out prompts.
        trained_per_group: Maximum numbers of loss units (such as pairs) and of answers per group that are trained on;
            by default, one unit with all answers.
        media_per_prompt: Maximum number of feature tokens per prompt; repeated images are counted once.
    """
    rollout, training, evaluation = config.rollout, config.training, config.evaluation
    units, answers = trained_per_group or (1, rollout.group_size)
    per_group = (units if training.share_prefix else answers) * longest_prompt + answers * config.max_answer_tokens
    trained = rollout.prompts_per_step * per_group
    per_rank = math.ceil(trained * training.parallel.ranks_per_batch_shard / config.num_ranks)
    prompts_in_run = training.num_steps * rollout.prompts_per_step
    micro = min(per_rank, training.max_tokens_per_micro_batch)
    weights = {entry.domain or entry.source: entry.weight for entry in config.data}
    total_weight = sum(weights.values())
    return RunSizes(
        prompts_per_step=rollout.prompts_per_step,
        rollouts_per_step=config.rollouts_per_step,
        generated_tokens=config.rollouts_per_step * config.max_answer_tokens,
        trained_tokens=trained,
        micro_batches=math.ceil(per_rank / training.max_tokens_per_micro_batch),
        tokens_per_micro_batch=micro,
        media_tokens=media_per_prompt * min(math.ceil(micro / max(per_group, 1)), rollout.prompts_per_step),
        evaluation_samples=min(evaluation.num_prompts, held_out_prompts) * evaluation.samples_per_prompt,
        num_evaluations=_count_evaluations(config) if held_out_prompts else 0,
        epochs={
            domain: prompts_in_run * weights[domain] / total_weight / count
            for domain, count in train_prompts.items()
            if count and domain in weights
        },
    )


def _count_evaluations(config: RolloutRunConfig) -> int:
    steps, every = config.training.num_steps, config.evaluation.every_num_steps
    during = (steps - 1) // every if every else 0
    return during + 1 + config.evaluation.before_training


@dataclass(frozen=True, kw_only=True)
class ExtraMemory:
    """Memory that a pipeline needs in addition to policy, engines and judge."""

    policy_bytes: Mapping[str, int] = field(default_factory=dict)
    """Additional bytes on a rank of the policy's trainer, by component."""
    roles: Sequence[RoleMemory] = ()
    num_trained: int = 0
    """Number of weights that other trainers train."""


NO_EXTRA_MEMORY = ExtraMemory()


def estimate_memory_by_role(
    config: RolloutRunConfig,
    sizes: ModelSizes,
    batch: RunSizes,
    *,
    engine_kind: str,
    max_context: int,
    on_accelerator: bool,
    judge: JudgeEngines | None = None,
    extra: ExtraMemory = NO_EXTRA_MEMORY,
) -> list[RoleMemory]:
    """Estimate the memory of each role.

    Args:
        config: The run's configuration.
        sizes: Sizes of the model.
        batch: The result of `compute_run_sizes`.
        engine_kind: Type of engine; see `ENGINES`.
        max_context: Longest prompt plus answer, in tokens.
        on_accelerator: Whether to estimate device memory, which excludes the memory of host libraries.
        judge: The run's judge; `None` if the run has no judge or the judge's size is unknown.
        extra: Memory of the pipeline's other roles.
    """
    element, ranks, number = get_element_bytes(config.model.dtype), config.num_ranks, config.num_engines
    policy = estimate_trainer_memory(config, sizes, batch, ranks, on_accelerator=on_accelerator)
    own = batch.tokens_per_micro_batch // config.training.parallel.ranks_per_micro_batch
    policy["logits"] = estimate_logit_bytes(sizes, own, element, layer_bytes=policy.get("a layer", 0))
    in_run = config.training.num_steps * batch.micro_batches
    policy |= estimate_kernel_bytes(config.model, config.training, sizes, in_run, on_accelerator=on_accelerator)
    if not on_accelerator:
        policy |= estimate_heap_bytes(policy, trimmed=should_trim_heap(config.model, config.training, ranks))
    beyond = count_quantized_parameters(config.sent_quantization, sizes) - policy["activations"]
    if config.cluster.type == "local" and beyond > 0:  # activations are freed when weights are sent
        policy["weights in codes"] = beyond
    engine = estimate_engine_bytes(
        config.inference,
        sizes,
        width=config.inference.width,  # the narrowest engines, which need the most memory together
        num_requests=math.ceil(max(config.rollouts_per_step, batch.evaluation_samples) / number),
        kind=engine_kind,
        max_context=max_context,
        element_bytes=element,
        on_accelerator=on_accelerator,
    )
    roles = [
        RoleMemory(role="actor_train", count=ranks, parts={**policy, **extra.policy_bytes}),
        RoleMemory(role="actor_infer", count=number, parts=engine),
        *extra.roles,
    ]
    if config.judge is not None and judge is not None:
        roles.append(_estimate_judge_memory(config, config.judge, judge, on_accelerator))
    if on_accelerator:
        return roles
    writer = RoleMemory(role="rollouts", count=1, parts={"writer": WRITER_BYTES})
    workers = RoleMemory(
        role="rewards", count=config.rollout.reward_workers, parts={"worker processes": REWARD_WORKER_BYTES}
    )
    roles += _estimate_store_memory(config, sizes)
    roles = add_host_memory(roles, config, reads_images=sizes.tower is not None)
    return [*roles, workers, *([writer] if config.tracking.rollouts else [])]


def estimate_frozen_memory(
    config: RolloutRunConfig,
    role: str,
    sizes: ModelSizes,
    batch: RunSizes,
    num_models: int = 1,
    *,
    on_accelerator: bool,
) -> RoleMemory:
    """Estimate the memory of `num_models` frozen models that only compute log-probs, on the devices of a role."""
    element, ranks = get_element_bytes(config.model.dtype), config.roles[role].count
    parallel = config.training.parallel
    parts = {"weights": estimate_frozen_bytes(sizes, parallel, ranks, element)}
    parts |= estimate_gathered_bytes(parallel, sizes, ranks, element, is_trained=False, on_accelerator=on_accelerator)
    parts["logits"] = estimate_logit_bytes(
        sizes, _estimate_micro_batch_tokens(config, batch, ranks) // parallel.ranks_per_micro_batch, element
    )
    return RoleMemory(role=role, count=ranks * num_models, parts=parts)


def estimate_trainer_memory(
    config: RolloutRunConfig, sizes: ModelSizes, batch: RunSizes, ranks: int, *, on_accelerator: bool
) -> dict[str, int]:
    """Estimate the memory of one trainer rank in bytes, by component; logits are not included."""
    return estimate_training_bytes(
        config.model,
        config.training,
        sizes,
        _estimate_micro_batch_tokens(config, batch, ranks),
        ranks,
        micro_batches=batch.micro_batches,
        on_accelerator=on_accelerator,
        media_tokens=batch.media_tokens,
    )


def _estimate_micro_batch_tokens(config: RolloutRunConfig, batch: RunSizes, ranks: int) -> int:
    """Return the maximum number of tokens in a micro-batch of a trainer with `ranks` ranks."""
    training = config.training
    return min(
        math.ceil(batch.trained_tokens * training.parallel.ranks_per_batch_shard / ranks),
        training.max_tokens_per_micro_batch,
    )


def _estimate_store_memory(config: RolloutRunConfig, sizes: ModelSizes) -> list[RoleMemory]:
    """Estimate the memory of the trainer's copy of the weights, which the weight transport `store` needs for deltas."""
    if config.weight_sync.store is None:
        return []
    element_bytes = get_element_bytes(config.model.dtype)
    copied = estimate_sync_bytes(config.sent_quantization, sizes, element_bytes, config.synced_adapter)
    return [RoleMemory(role="weight store", count=1, parts={"copy of the weights": copied})]


def _estimate_judge_memory(
    config: RolloutRunConfig, section: JudgeConfig, judge: JudgeEngines, on_accelerator: bool
) -> RoleMemory:
    parts = estimate_engine_bytes(
        section,
        judge.sizes,
        width=section.tensor_parallel,
        num_requests=math.ceil(config.rollouts_per_step / config.num_judges),
        kind=judge.kind,
        max_context=judge.max_context,
        element_bytes=get_element_bytes(section.dtype),
        on_accelerator=on_accelerator,
    )
    return RoleMemory(role="judge", count=config.num_judges, parts=parts)


def estimate_rollout_bytes(config: RolloutRunConfig, batch: RunSizes, longest_prompt: int) -> int:
    """Estimate the disk space of all rollouts that the run records; 0 without `tracking.rollouts`."""
    rollouts = config.training.num_steps * batch.rollouts_per_step + batch.num_evaluations * batch.evaluation_samples
    tokens = config.max_answer_tokens + longest_prompt
    return rollouts * tokens * STATS_BYTES_PER_ROLLOUT_TOKEN if config.tracking.rollouts else 0
