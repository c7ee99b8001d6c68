"""Keys of TRL 1.16's `GRPOConfig` and of its script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roll.cli.migration.rules import (
    LibraryValues,
    Rule,
    UnsupportedValueError,
    companion_rule,
    conversion_rule,
    ignored_key_rules,
    renamed_key_rule,
    unsupported_key_rule,
)
from roll.cli.migration.trl_common import COMMON_RULES, compute_generation_sizes, count_epoch_rows
from roll.cli.migration.trl_data import build_data_rules, build_step_rules
from roll.errors import ConfigError

__all__ = ["GRPO_RULES", "count_steps", "count_updates"]

_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant_length",
    "luspo": "sequence_sum",
}


def count_updates(values: LibraryValues) -> int:
    """Return the number of TRL's optimizer steps that correspond to one step of ROLL."""
    return compute_generation_sizes(values)[1] * int(values.num_iterations)


def count_steps(values: LibraryValues) -> int:
    """Return the number of ROLL steps of the whole run; each step generates once."""
    if values.max_steps > 0:
        return math.ceil(values.max_steps / count_updates(values))
    prompts = compute_generation_sizes(values)[0] // int(values.num_generations)
    return math.ceil(count_epoch_rows(values) / prompts)


def _convert_batch(values: LibraryValues) -> Mapping[str, Any]:
    completions, minibatches = compute_generation_sizes(values)
    group = int(values.num_generations)
    if completions % group:
        raise ConfigError(
            f"the number of completions per generation batch ({completions}) must be divisible by num_generations "
            f"({group})."
        )
    return {
        "rollout.prompts_per_step": completions // group,
        "rollout.group_size": group,
        "algorithm.updates.num_minibatches": minibatches,
    }


def _convert_loss(values: LibraryValues) -> Mapping[str, Any]:
    kind = values.loss_type
    if kind not in _AGGREGATIONS:
        raise UnsupportedValueError(
            f"loss_type {kind} is not supported (supported: {', '.join(_AGGREGATIONS)}); the converted file has "
            "GRPO's loss"
        )
    low, high = float(values.epsilon), values.epsilon_high
    high = low if high is None else float(high)
    gate: dict[str, Any]
    if kind == "cispo":
        gate = {"type": "stop_gradient", "lower": 0.0, "upper": high}
    elif kind == "sapo":
        gate = {
            "type": "soft",
            "tau_positive": float(values.sapo_temperature_pos),
            "tau_negative": float(values.sapo_temperature_neg),
        }
    elif values.delta is not None:
        gate = {"type": "dual_clip", "low": low, "high": high, "bound": float(values.delta)}
    else:
        gate = {"type": "min_clip", "low": low, "high": high}
    return {"algorithm.gate": gate, "algorithm.aggregation": _AGGREGATIONS[kind]}


def _convert_correction(values: LibraryValues) -> Mapping[str, Any]:
    if not (values.use_vllm and values.vllm_importance_sampling_correction):
        return {"algorithm.correction.upper": None}
    level, form = str(values.vllm_importance_sampling_mode).split("_")
    low, high = values.vllm_importance_sampling_clip_min, values.vllm_importance_sampling_clip_max
    cap = values.vllm_importance_sampling_cap
    high = cap if cap is not None else high
    if low is not None and form == "truncate":
        raise UnsupportedValueError(
            "importance weights are truncated only from above, so vllm_importance_sampling_clip_min has no counterpart"
        )
    if high is None:
        raise UnsupportedValueError(
            "importance weights without an upper bound are not supported; the converted file truncates them at 2"
        )
    found: dict[str, Any] = {"level": level, "upper": float(high)}
    if form == "mask":
        found |= {"mask_high": float(high)} | ({"mask_low": float(low)} if low is not None else {})
    return {f"algorithm.correction.{name}": value for name, value in found.items()}


def _convert_std(value: Any, _: LibraryValues) -> str:
    return {True: "group", False: "none", "True": "group", "False": "none"}.get(value, value)


def _read_reward_names(values: LibraryValues) -> list[str]:
    """Return the names in `reward_funcs`, which may also be one string, as on TRL's command line.

    Raises:
        ConfigError: `reward_funcs` is not a name or a list of names.
    """
    given = values.reward_funcs or ()
    names = given.split() if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"reward_funcs must be a list of names, such as [accuracy_reward], got {str(given)[:80]!r}.")
    return list(names)


def _convert_rewards(values: LibraryValues) -> Mapping[str, Any]:
    names = _read_reward_names(values)
    model = values.reward_model_name_or_path
    if not names and not model:
        raise ConfigError(
            "one of reward_funcs and reward_model_name_or_path is required, such as TRL's accuracy_reward or your "
            "module.function."
        )
    rewards: list[dict[str, Any]] = (
        [{"type": "reward_model", "path": model, "require_finished": False}] if model else []
    )
    more: dict[str, Any] = {"answer_key": None}
    for name in names:
        if name in ("accuracy_reward", "reasoning_accuracy_reward"):
            rewards.append({"type": "math", "require_finished": False})
            more["answer_key"] = "solution"
        elif name == "think_format_reward":
            rewards.append(
                {"type": "format", "pattern": r"<think>(?!.*<think>).*?</think>.*", "require_finished": False}
            )
        elif name == "get_soft_overlong_punishment":
            rewards.append({"type": "length", "free_tokens": 1024, "full_tokens": 1280})
        else:
            module, _, function = name.rpartition(".")
            if not module:
                raise ConfigError(
                    f"reward_funcs: '{name}' is neither a reward of TRL nor a dotted path (module.function)."
                )
            rewards.append({"type": "python", "function": f"{module}:{function}", "name": function})
    weights = values.reward_weights or [1.0] * len(rewards)
    if len(weights) != len(rewards):
        raise ConfigError(f"reward_weights has {len(weights)} entries for {len(rewards)} rewards.")
    return more | {
        "reward": [
            reward | ({"weight": float(weight)} if weight != 1 else {})
            for reward, weight in zip(rewards, weights, strict=True)
        ]
    }


def _check_functions(values: LibraryValues) -> Mapping[str, Any]:
    own = [name for name in _read_reward_names(values) if "." in name]
    if own:
        raise UnsupportedValueError(
            f"{', '.join(own)} must be rewritten: ROLL calls `def reward(text, answer, metadata) -> float` for each "
            "answer, while TRL passes all completions to the function"
        )
    return {}


def _check_bias_correction(values: LibraryValues) -> Mapping[str, Any]:
    if values.use_bias_correction_kl and values.beta:
        raise UnsupportedValueError(
            "KL terms are not weighted by the ratio; values agree at the first update of each batch, gradients differ"
        )
    return {}


_BATCH_KEYS = ("rollout.prompts_per_step", "rollout.group_size", "algorithm.updates.num_minibatches")
_GATE_KEYS = ("algorithm.gate", "algorithm.aggregation")
_CORRECTION_KEYS = ("algorithm.correction.level", "algorithm.correction.upper", "algorithm.correction.mask_high")

GRPO_RULES: list[Rule] = [
    conversion_rule(
        "per_device_train_batch_size",
        8,
        _BATCH_KEYS,
        _convert_batch,
        "prompts = batch size x processes x steps_per_generation / num_generations",
    ),
    *(
        companion_rule(key, default, _BATCH_KEYS, "with per_device_train_batch_size")
        for key, default in (
            ("gradient_accumulation_steps", 1),
            ("generation_batch_size", None),
            ("steps_per_generation", None),
            ("num_generations", 8),
        )
    ),
    renamed_key_rule(
        "max_steps",
        -1,
        "training.num_steps",
        lambda _, values: count_steps(values),
        "TRL counts updates, and ROLL counts rounds of generation",
    ),
    companion_rule(
        "num_train_epochs", 3.0, ["training.num_steps"], "times rows / prompts_per_step, if max_steps is not set"
    ),
    renamed_key_rule("num_iterations", 1, "algorithm.updates.num_epochs"),
    renamed_key_rule("max_completion_length", 512, "rollout.max_new_tokens"),
    renamed_key_rule("temperature", 1.0, "rollout.temperature"),
    renamed_key_rule("top_p", 1.0, "rollout.top_p"),
    renamed_key_rule("top_k", 0, "rollout.top_k", lambda value, _: max(0, int(value or 0))),
    conversion_rule(
        "loss_type", "dapo", _GATE_KEYS, _convert_loss, "`bnpo` becomes `dapo`: a mean over the tokens of the batch"
    ),
    *(
        companion_rule(key, default, _GATE_KEYS[:1], "with loss_type")
        for key, default in (
            ("epsilon", 0.2),
            ("epsilon_high", None),
            ("delta", None),
            ("sapo_temperature_neg", 1.05),
            ("sapo_temperature_pos", 1.0),
        )
    ),
    renamed_key_rule("importance_sampling_level", "token", "algorithm.ratio.level"),
    renamed_key_rule(
        "beta", 0.0, "algorithm.kl.coefficient", lambda value, _: float(value), "k3 in the loss, as in TRL"
    ),
    renamed_key_rule("scale_rewards", "group", "algorithm.advantage.std", _convert_std),
    renamed_key_rule("mask_truncated_completions", False, "algorithm.filters.drop_unfinished"),
    renamed_key_rule("entropy_coef", 0.0, "algorithm.entropy.coefficient"),
    renamed_key_rule("router_aux_loss_coef", None, "training.router_aux_loss", lambda value, _: float(value or 0.0)),
    conversion_rule(
        "vllm_importance_sampling_correction",
        True,
        _CORRECTION_KEYS,
        _convert_correction,
        "only with use_vllm, as in TRL",
    ),
    *(
        companion_rule(key, default, _CORRECTION_KEYS, "with vllm_importance_sampling_correction")
        for key, default in (
            ("use_vllm", False),
            ("vllm_importance_sampling_mode", "sequence_mask"),
            ("vllm_importance_sampling_clip_max", 3.0),
            ("vllm_importance_sampling_clip_min", None),
            ("vllm_importance_sampling_cap", None),
        )
    ),
    renamed_key_rule("vllm_tensor_parallel_size", 1, "inference.tensor_parallel"),
    renamed_key_rule("vllm_max_model_length", None, "inference.max_context"),
    renamed_key_rule(
        "num_generations_eval", None, "evaluation.samples_per_prompt", lambda own, v: int(own or v["num_generations"])
    ),
    conversion_rule("reward_funcs", None, ["data"], _check_functions, "with dataset_name: data.0.reward"),
    companion_rule("reward_weights", None, ["data"], "with reward_funcs: the weight of each reward"),
    companion_rule("reward_model_name_or_path", None, ["data"], "with reward_funcs: a reward of type reward_model"),
    *build_data_rules(_convert_rewards),
    *build_step_rules(),
    *(
        unsupported_key_rule(key, default, note)
        for key, default, note in (
            ("vespo_k_pos", 2.0, "VESPO is not supported"),
            ("vespo_lambda_pos", 3.0, "VESPO is not supported"),
            ("vespo_k_neg", 3.0, "VESPO is not supported"),
            ("vespo_lambda_neg", 2.0, "VESPO is not supported"),
            ("multi_objective_aggregation", "sum_then_normalize", "weighted rewards are summed, then normalized"),
            ("min_p", None, "sampling supports temperature, top_p and top_k"),
            ("repetition_penalty", 1.0, "training needs samples of the policy's own distribution"),
            ("generation_kwargs", None, "set further arguments of an engine in inference.options"),
            ("chat_template_kwargs", None, "write them into a column chat_template_kwargs of the rows"),
            (
                "vllm_structured_outputs_regex",
                None,
                "training requires samples from the policy's own distribution; a reward of type format checks answers",
            ),
            ("sync_ref_model", False, "the reference is always the initial policy"),
            ("top_entropy_quantile", 1.0, "all tokens of an answer are trained"),
            ("use_adaptive_entropy", False, "the entropy bonus is constant"),
            ("off_policy_mask_threshold", None, "see algorithm.correction.mask_low and veto"),
            ("max_tool_calling_iterations", None, "tools belong to environments: data.0.tools"),
            ("log_completions_hub_repo", None, "completions are in rollouts/ of the run directory"),
            ("cast_lm_head_to_fp32", False, "log-probs are computed in float32 from the model's hidden states"),
            ("vllm_server_base_url", None, "ROLL starts the engines: cluster.device_mapping.actor_infer"),
            ("vllm_model_impl", "vllm", "models run with vLLM's implementation"),
        )
    ),
    *ignored_key_rules(
        {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}, "has no effect without sync_ref_model"
    ),
    *ignored_key_rules(
        {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2},
        "has no effect without use_adaptive_entropy",
    ),
    *ignored_key_rules(
        {
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": False,
            "vllm_server_host": "0.0.0.0",
            "vllm_server_port": 8000,
            "vllm_server_timeout": 240.0,
            "vllm_group_port": 51216,
            "vllm_gpu_memory_utilization": 0.3,
        },
        "cluster.device_mapping sets the engines' devices; engines on devices of trainers sleep during training",
    ),
    *ignored_key_rules(
        {
            "ds3_gather_for_generation": True,
            "pad_to_multiple_of": "auto",
            "cache_implementation": None,
            "use_transformers_continuous_batching": False,
            "transformers_continuous_batching_config": None,
            "use_transformers_paged": False,
        },
        "affects only generation in TRL",
    ),
    *ignored_key_rules({"disable_dropout": False}, "only adapters have dropout (model.lora.dropout)"),
    *ignored_key_rules({"shuffle_dataset": True}, "rows always come in random order"),
    *ignored_key_rules(
        {
            "log_completions": False,
            "log_multimodal": True,
            "num_completions_to_print": None,
            "log_unique_prompts": False,
        },
        "every rollout is recorded",
    ),
    conversion_rule("use_bias_correction_kl", True, [], _check_bias_correction, "has no effect without beta"),
    *COMMON_RULES,
]
