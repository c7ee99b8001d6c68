"""Keys of verl that need no counterpart: placement, performance, and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.cli.migration.rules import Rule, ignored

__all__ = ["NEEDLESS"]

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_REASONS: Mapping[str, Sequence[str]] = {
    "micro-batches are packed by tokens (training.max_tokens_per_micro_batch) and never change the result": (
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{_ACTOR}.use_remove_padding",
        f"{_MODEL}.use_remove_padding",
        f"{_ACTOR}.use_prefix_grouper",
        "trainer.balance_batch",
    ),
    "ranks share weights by FSDP2; training.parallel and training.backend say how": (
        f"{_ACTOR}.fsdp_config.*",
        f"{_ACTOR}.strategy",
        f"{_ACTOR}.megatron.*",
        f"{_ACTOR}.use_torch_compile",
        f"{_ACTOR}.use_fused_kernels",
        f"{_ACTOR}.entropy_from_logits_with_chunking",
        f"{_ACTOR}.entropy_checkpointing",
        f"{_ACTOR}.sum_pi_squared_checkpointing",
        f"{_MODEL}.use_shm",
        f"{_MODEL}.use_liger",
        f"{_MODEL}.use_fused_kernels",
        f"{_MODEL}.fused_kernel_options.*",
        f"{_MODEL}.tiled_mlp.*",
        f"{_MODEL}.enable_activation_offload",
        f"{_MODEL}.mtp.*",
        f"{_ACTOR}.freeze_vision_tower",
        f"{_ACTOR}.optim.optimizer_impl",
        f"{_ACTOR}.optim.total_training_steps",
    ),
    "the reference is loaded where algorithm.kl.coefficient is above 0, on the trainer's devices": (
        "actor_rollout_ref.ref.*",
    ),
    "the critic's other settings are the policy's": ("critic.*",),
    "a reward model runs in processes of its own": ("reward_model.*", "reward_manager.*"),
    "of verl's engines and their place; further arguments of vLLM are inference.options": (
        f"{_ROLLOUT}.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
    ),
    "recorded, or counted, in any case": (
        f"{_ACTOR}.calculate_entropy",
        f"{_ACTOR}.profiler.*",
        f"{_ACTOR}.router_replay.*",
        f"{_ACTOR}.checkpoint.*",
        f"{_ACTOR}.rollout_n",
        f"{_ACTOR}.shuffle",
        f"{_ACTOR}.data_loader_seed",
        "trainer.*",
        "global_profiler.*",
        "transfer_queue.*",
        "ray_kwargs.*",
        "algorithm.pf_ppo.*",
    ),
    "prompts may have any length; contexts are made large enough (inference.max_context)": ("data.max_prompt_length",),
    "how verl's data set is read": ("data.*",),
}

NEEDLESS: list[Rule] = [ignored(key, None, note) for note, keys in _REASONS.items() for key in keys]
"""The first rule that covers a key applies, so these rules, which cover whole sections, come last."""
