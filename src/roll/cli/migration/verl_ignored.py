"""Keys of verl that are ignored, because they only affect placement, performance and logging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.cli.migration.rules import Rule, ignored_key_rule

__all__ = ["IGNORED_RULES"]

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_KEYS_BY_REASON: Mapping[str, Sequence[str]] = {
    "micro-batches are packed by tokens (training.max_tokens_per_micro_batch) and never change the result": (
        f"{_ACTOR}.ppo_micro_batch_size",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{_ACTOR}.use_remove_padding",
        f"{_MODEL}.use_remove_padding",
        f"{_ACTOR}.use_prefix_grouper",
        "trainer.balance_batch",
    ),
    "weights are sharded with FSDP2; set training.parallel and training.backend": (
        f"{_ACTOR}.fsdp_config.*",
        f"{_ACTOR}.strategy",
        f"{_ACTOR}.megatron.*",
    ),
    "affects only speed or memory; ROLL's own settings are in the section training": (
        f"{_ACTOR}.use_torch_compile",
        f"{_ACTOR}.use_fused_kernels",
        f"{_ACTOR}.entropy_from_logits_with_chunking",
        f"{_ACTOR}.entropy_checkpointing",
        f"{_ACTOR}.sum_pi_squared_checkpointing",
        f"{_MODEL}.use_shm",
        f"{_MODEL}.use_liger",
        f"{_MODEL}.use_fused_kernels",
        f"{_MODEL}.fused_kernel_options.*",
        f"{_ACTOR}.optim.optimizer_impl",
    ),
    "affects only memory; see training.tiled_mlp_tokens": (f"{_MODEL}.tiled_mlp.*",),
    "affects only memory; see training.offload_activations": (f"{_MODEL}.enable_activation_offload",),
    "multi-token prediction is not supported": (f"{_MODEL}.mtp.*",),
    "training.num_steps sets the length of the schedule": (f"{_ACTOR}.optim.total_training_steps",),
    "the reference is loaded if algorithm.kl.coefficient is above 0, on the trainer's devices": (
        "actor_rollout_ref.ref.*",
    ),
    "for these keys, the critic has the policy's settings": ("critic.*",),
    "a reward model runs in separate processes": ("reward_model.*", "reward_manager.*"),
    "affects only verl's engines; set further arguments of vLLM in inference.options": (
        f"{_ROLLOUT}.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
    ),
    "ROLL always records this": (f"{_ACTOR}.calculate_entropy",),
    "every run writes trace.json": (f"{_ACTOR}.profiler.*", "global_profiler.*"),
    "has no effect without another key that ROLL does not support": (f"{_ACTOR}.router_replay.*", "algorithm.pf_ppo.*"),
    "checkpoints always contain the whole state": (f"{_ACTOR}.checkpoint.*",),
    "the key seed determines every random order": (f"{_ACTOR}.shuffle", f"{_ACTOR}.data_loader_seed"),
    "affects only how verl starts processes and moves data": (
        f"{_ACTOR}.rollout_n",
        "trainer.*",
        "transfer_queue.*",
        "ray_kwargs.*",
    ),
    "prompts can have any length; ROLL computes a sufficient context length (inference.max_context)": (
        "data.max_prompt_length",
    ),
    "affects only verl's dataset reader": ("data.*",),
}

IGNORED_RULES: list[Rule] = [
    ignored_key_rule(key, None, note) for note, keys in _KEYS_BY_REASON.items() for key in keys
]
"""The first rule that covers a key applies, so these rules, which cover whole sections, come last."""
