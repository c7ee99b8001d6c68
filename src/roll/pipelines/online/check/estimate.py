"""Estimates of a run before anything is loaded: batch arithmetic, memory by role, disk.

Pure functions of the configuration and the model's sizes. Memory is an upper estimate for full-length answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll.config.activation_memory import ModelSizes, element_bytes, gathered_bytes, logit_bytes
from roll.config.estimate import (
    JudgeEngines,
    RoleMemory,
    engine_bytes,
    frozen_bytes,
    heap_bytes,
    host_memory_roles,
    kernel_bytes,
    num_quantized_parameters,
    training_bytes,
)
from roll.config.generating import GeneratingConfig
from roll.config.judge import JudgeConfig
from roll.config.training import trims_heap

__all__ = [
    "NOTHING_FURTHER",
    "BatchArithmetic",
    "ExtraMemory",
    "batch_arithmetic",
    "frozen_memory",
    "memory_by_role",
    "rollout_bytes",
    "trainer_memory",
]

STATS_BYTES_PER_ROLLOUT_TOKEN = 12
"""Token id, log-prob and policy version of a recorded token, before compression."""
WRITER_BYTES = 96 * 2**20
"""Memory of the run's process for recording rollouts: pyarrow and its buffers. Measured: 90 to 110 MiB."""
REWARD_WORKER_BYTES = 96 * 2**20
"""Memory of a reward worker process. Measured as PSS: 94 MiB for mathematics, 35 MiB for rewards without a library."""


@dataclass(frozen=True, kw_only=True)
class BatchArithmetic:
    """The sizes of a step and a run; token counts are for answers of full length."""

    prompts_per_step: int
    rollouts_per_step: int
    generated_tokens: int
    """Largest number of generated tokens per step."""
    trained_tokens: int
    """Largest number of tokens per step that go through the network, shared prompts once."""
    micro_batches: int
    """Approximate number per rank and step."""
    tokens_per_micro_batch: int
    evaluation_samples: int
    num_evaluations: int
    epochs: Mapping[str, float]
    """By domain: number of passes of the run over the source's training prompts."""


def batch_arithmetic(
    config: GeneratingConfig,
    *,
    longest_prompt: int,
    train_prompts: Mapping[str, int],
    held_out_prompts: int,
    trained_per_group: tuple[int, int] | None = None,
) -> BatchArithmetic:
    """Compute the sizes of a step and a run.

    Args:
        config: The run's configuration.
        longest_prompt: Tokens of the longest prompt.
        train_prompts: Number of training prompts by domain.
        held_out_prompts: Number of held-out prompts.
        trained_per_group: Largest number of trained units and answers per group; by default one unit of all answers.
    """
    rollout, training, evaluation = config.rollout, config.training, config.evaluation
    units, answers = trained_per_group or (1, rollout.group_size)
    per_group = (units if training.share_prefix else answers) * longest_prompt + answers * config.max_answer_tokens
    trained = rollout.prompts_per_step * per_group
    per_rank = math.ceil(trained * training.parallel.share_ranks / config.num_ranks)
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
        epochs={
            domain: prompts_in_run * weights[domain] / total_weight / count
            for domain, count in train_prompts.items()
            if count and domain in weights
        },
    )


def _num_evaluations(config: GeneratingConfig) -> int:
    steps, every = config.training.num_steps, config.evaluation.every_num_steps
    during = (steps - 1) // every if every else 0
    return during + 1 + config.evaluation.before_training


@dataclass(frozen=True, kw_only=True)
class ExtraMemory:
    """Memory of a pipeline apart from policy, engines and judge."""

    held: Mapping[str, int] = field(default_factory=dict)
    """Additional bytes of a rank of the policy's trainer, by content."""
    roles: Sequence[RoleMemory] = ()
    num_trained: int = 0
    """Number of weights that other trainers train."""


NOTHING_FURTHER = ExtraMemory()


def memory_by_role(
    config: GeneratingConfig,
    sizes: ModelSizes,
    batch: BatchArithmetic,
    *,
    engine_kind: str,
    max_context: int,
    on_accelerator: bool,
    judge: JudgeEngines | None = None,
    further: ExtraMemory = NOTHING_FURTHER,
) -> list[RoleMemory]:
    """Estimate the memory of each role.

    Args:
        config: The run's configuration.
        sizes: Sizes of the model.
        batch: The result of `batch_arithmetic`.
        engine_kind: Kind of engine; see `ENGINES`.
        max_context: Longest prompt plus answer, in tokens.
        on_accelerator: Whether to estimate device memory; host libraries are then left out.
        judge: The run's own judge, if it has one of known size.
        further: Memory of the pipeline's other roles.
    """
    element, ranks, number = element_bytes(config.model.dtype), config.num_ranks, config.num_engines
    policy = trainer_memory(config, sizes, batch, ranks, on_accelerator=on_accelerator)
    own = batch.tokens_per_micro_batch // config.training.parallel.ranks_per_micro_batch
    policy["logits"] = logit_bytes(sizes, own, element, layer=policy.get("a layer", 0))
    in_run = config.training.num_steps * batch.micro_batches
    policy |= kernel_bytes(config.model, config.training, sizes, in_run, on_accelerator=on_accelerator)
    if not on_accelerator:
        policy |= heap_bytes(policy, trimmed=trims_heap(config.model, config.training, ranks))
    beyond = num_quantized_parameters(config.inference, sizes) - policy["activations"]  # freed when weights are sent
    if config.cluster.type == "local" and beyond > 0:
        policy["weights in codes"] = beyond
    engine = engine_bytes(
        config.inference,
        sizes,
        num_requests=math.ceil(max(config.rollouts_per_step, batch.evaluation_samples) / number),
        kind=engine_kind,
        max_context=max_context,
        element=element,
        on_accelerator=on_accelerator,
    )
    roles = [
        RoleMemory(role="actor_train", count=ranks, parts={**policy, **further.held}),
        RoleMemory(role="actor_infer", count=number, parts=engine),
        *further.roles,
    ]
    if config.judge is not None and judge is not None:
        roles.append(_judge(config, config.judge, judge, on_accelerator))
    if on_accelerator:
        return roles
    writer = RoleMemory(role="rollouts", count=1, parts={"their writer": WRITER_BYTES})
    workers = RoleMemory(
        role="rewards", count=config.rollout.reward_workers, parts={"worker processes": REWARD_WORKER_BYTES}
    )
    return [*host_memory_roles(roles, config), workers, *([writer] if config.tracking.rollouts else [])]


def frozen_memory(
    config: GeneratingConfig,
    role: str,
    sizes: ModelSizes,
    batch: BatchArithmetic,
    num_models: int = 1,
    *,
    on_accelerator: bool,
) -> RoleMemory:
    """Estimate the memory of frozen models that only compute log-probs, on the devices of a role."""
    element, ranks = element_bytes(config.model.dtype), config.roles[role].count
    parallel = config.training.parallel
    parts = {"weights": frozen_bytes(sizes, parallel, ranks, element)}
    parts |= gathered_bytes(parallel, sizes, ranks, element, learns=False, on_accelerator=on_accelerator)
    parts["logits"] = logit_bytes(sizes, _micro_batch(config, batch, ranks) // parallel.ranks_per_micro_batch, element)
    return RoleMemory(role=role, count=ranks * num_models, parts=parts)


def trainer_memory(
    config: GeneratingConfig, sizes: ModelSizes, batch: BatchArithmetic, ranks: int, *, on_accelerator: bool
) -> dict[str, int]:
    """Estimate the memory of a trainer's rank, up to the final hidden states."""
    return training_bytes(
        config.model,
        config.training,
        sizes,
        _micro_batch(config, batch, ranks),
        ranks,
        micro_batches=batch.micro_batches,
        on_accelerator=on_accelerator,
    )


def _micro_batch(config: GeneratingConfig, batch: BatchArithmetic, ranks: int) -> int:
    """Return the number of tokens in a micro-batch."""
    training = config.training
    return min(
        math.ceil(batch.trained_tokens * training.parallel.share_ranks / ranks), training.max_tokens_per_micro_batch
    )


def _judge(config: GeneratingConfig, section: JudgeConfig, judge: JudgeEngines, on_accelerator: bool) -> RoleMemory:
    parts = engine_bytes(
        section,
        judge.sizes,
        num_requests=math.ceil(config.rollouts_per_step / config.num_judges),
        kind=judge.kind,
        max_context=judge.max_context,
        element=element_bytes(section.dtype),
        on_accelerator=on_accelerator,
    )
    return RoleMemory(role="judge", count=config.num_judges, parts=parts)


def rollout_bytes(config: GeneratingConfig, batch: BatchArithmetic, longest_prompt: int) -> int:
    """Estimate the disk space of recorded rollouts."""
    rollouts = config.training.num_steps * batch.rollouts_per_step + batch.num_evaluations * batch.evaluation_samples
    tokens = config.max_answer_tokens + longest_prompt
    return rollouts * tokens * STATS_BYTES_PER_ROLLOUT_TOKEN if config.tracking.rollouts else 0
