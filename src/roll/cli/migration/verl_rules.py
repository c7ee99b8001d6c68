"""Keys of verl's `ppo_trainer`, with its defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from roll.cli.migration.rules import (
    LibraryValues,
    Rule,
    UnsupportedValueError,
    companion_rule,
    conversion_rule,
    ignored_key_rule,
    renamed_key_rule,
    unsupported_key_rule,
)
from roll.cli.migration.verl_ignored import IGNORED_RULES
from roll.cli.migration.verl_loss import LOSS_RULES
from roll.errors import ConfigError

__all__ = ["VERL_RULES"]

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def _convert_name(values: LibraryValues) -> Mapping[str, Any]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(values.trainer.experiment_name)).lstrip("._-")
    return {"name": name or "from-verl"}


def _convert_batch(values: LibraryValues) -> Mapping[str, Any]:
    prompts, part = int(values.data.train_batch_size), int(values[f"{_ACTOR}.ppo_mini_batch_size"])
    if prompts % part and part < prompts:
        raise ConfigError(f"train_batch_size ({prompts}) must be divisible by ppo_mini_batch_size ({part}).")
    return {"rollout.prompts_per_step": prompts, "algorithm.updates.num_minibatches": max(1, prompts // part)}


def _convert_steps(value: Any, values: LibraryValues) -> int:
    if value is not None:
        return int(value)
    if values.rows is None:
        raise ConfigError(
            "the length is given in epochs (trainer.total_epochs), but ROLL counts the steps of a run with rollouts: "
            "set --rows to the number of rows of the dataset."
        )
    return max(1, int(values.rows) // int(values.data.train_batch_size) * int(values.trainer.total_epochs))


def _convert_warmup(value: Any, values: LibraryValues) -> int:
    if value is not None and value >= 0:
        return int(value)
    share = float(values[f"{_ACTOR}.optim.lr_warmup_steps_ratio"])
    return round(share * _convert_steps(values.trainer.total_training_steps, values)) if share else 0


def _convert_schedule(value: str, values: LibraryValues) -> str:
    value = values[f"{_ACTOR}.optim.warmup_style"] or value
    if value not in ("constant", "cosine", "linear"):
        raise UnsupportedValueError(
            f"{value} is not supported (supported: constant, linear, cosine); the converted file has ROLL's default, "
            "constant"
        )
    return value


def _expand_path(path: Any) -> str:
    return os.path.expanduser(os.path.expandvars(str(path)))


def _expand_files(value: Any) -> list[str]:
    return [_expand_path(file) for file in (value if isinstance(value, list) else [value])]


def _convert_data(values: LibraryValues) -> Mapping[str, Any]:
    training, held_out = _expand_files(values.data.train_files), _expand_files(values.data.val_files)
    path, name = values.custom_reward_function.path, values.custom_reward_function.name
    reward: Any = {"type": "math", "require_finished": False}
    if path:
        reward = {"type": "python", "function": f"{_expand_path(path)}:{name}", "require_finished": False}
    if values.reward_model.enable:
        reward = {
            "type": "reward_model",
            "path": _expand_path(values.reward_model.model.path),
            "require_finished": False,
        }
    entries = []
    for number, file in enumerate(training):
        entry: dict[str, Any] = {"source": "file", "path": file, "reward": reward}
        if len(held_out) == len(training):
            entry["held_out_path"] = held_out[number]
        if values.data.prompt_key != "prompt":
            entry["prompt_key"] = values.data.prompt_key
        if values.data.train_max_samples > 0:
            entry["limit"] = values.data.train_max_samples
        entry |= {"domain": f"{PurePath(file).parent.name or 'file'}-{number}"} if len(training) > 1 else {}
        entries.append(entry)
    return {"data": entries}


def _reject_answers(_: LibraryValues) -> Mapping[str, Any]:
    raise UnsupportedValueError(
        "verl's rows have the reference in reward_model.ground_truth: copy it to a separate column `answer` "
        "(docs/migration.md has the code). verl selects a scorer by this column; the converted file has `math` for all "
        "rows"
    )


def _convert_devices(values: LibraryValues) -> Mapping[str, Any]:
    count = int(values.trainer.nnodes) * int(values.trainer.n_gpus_per_node)
    if count == 1:
        return {}
    devices = list(range(count))
    return {
        "cluster.type": "ray",
        "cluster.device_mapping.actor_train": devices,
        "cluster.device_mapping.actor_infer": list(devices),
    }


def _convert_lora(values: LibraryValues) -> Mapping[str, Any]:
    rank = int(values[f"{_MODEL}.lora_rank"])
    if not rank:
        return {}
    targets = values[f"{_MODEL}.target_modules"]
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": float(values[f"{_MODEL}.lora_alpha"]),
        "model.lora.target_modules": targets,
    }


def _convert_logger(values: LibraryValues) -> Mapping[str, Any]:
    names = values.trainer.logger
    names = [names] if isinstance(names, str) else list(names)
    known = ("wandb", "swanlab")
    found = {f"tracking.{name}": str(values.trainer.project_name) for name in names if name in known}
    other = [name for name in names if name not in (*known, "console", "tensorboard", "file")]
    if other:
        raise UnsupportedValueError(
            f"trackers that are not converted: {', '.join(other)}; metrics.jsonl and TensorBoard are always written"
        )
    return found


def _convert_micro_batch(values: LibraryValues) -> Mapping[str, Any]:
    if not values[f"{_ACTOR}.use_dynamic_bsz"]:
        return {}
    return {"training.max_tokens_per_micro_batch": int(values[f"{_ACTOR}.ppo_max_token_len_per_gpu"])}


def _convert_temperature(_: Any, values: LibraryValues) -> float:
    sampled = values[f"{_ROLLOUT}.val_kwargs.do_sample"]
    return float(values[f"{_ROLLOUT}.val_kwargs.temperature"]) if sampled else 0.0


def _convert_quantization(value: str | None, _: LibraryValues) -> str:
    if value not in (None, "fp8"):
        raise UnsupportedValueError(
            f"quantization {value} is not supported (supported: fp8); engines use the trainer's weights without "
            "quantization"
        )
    return value or "none"


def _convert_frequency(value: int, _: LibraryValues) -> int:
    return max(0, int(value))


_BATCH_KEYS = ("rollout.prompts_per_step", "algorithm.updates.num_minibatches")
_LORA_KEYS = ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")
_DEVICE_KEYS = ("cluster.type", "cluster.device_mapping.actor_train", "cluster.device_mapping.actor_infer")

VERL_RULES: list[Rule] = [
    conversion_rule(
        "data.train_batch_size",
        1024,
        _BATCH_KEYS,
        _convert_batch,
        "num_minibatches = train_batch_size / ppo_mini_batch_size",
    ),
    companion_rule(f"{_ACTOR}.ppo_mini_batch_size", 256, _BATCH_KEYS, "with data.train_batch_size"),
    renamed_key_rule(f"{_ACTOR}.ppo_epochs", 1, "algorithm.updates.num_epochs"),
    renamed_key_rule(f"{_ROLLOUT}.n", 1, "rollout.group_size"),
    renamed_key_rule("trainer.total_training_steps", None, "training.num_steps", _convert_steps),
    companion_rule("trainer.total_epochs", 30, ["training.num_steps"], "times (rows // train_batch_size)"),
    conversion_rule("data.train_files", "~/data/rlhf/gsm8k/train.parquet", ["data"], _convert_data, "parquet or JSONL"),
    companion_rule("data.val_files", "~/data/rlhf/gsm8k/test.parquet", ["data"], "data.0.held_out_path"),
    companion_rule("data.prompt_key", "prompt", ["data"], "data.0.prompt_key"),
    companion_rule("data.train_max_samples", -1, ["data"], "data.0.limit"),
    conversion_rule("data.reward_fn_key", "data_source", ["data"], _reject_answers, "data.0.reward"),
    companion_rule(
        "custom_reward_function.path", None, ["data"], "data.0.reward of type python; arguments are passed by name"
    ),
    companion_rule("custom_reward_function.name", "compute_score", ["data"], "with custom_reward_function.path"),
    companion_rule("reward_model.enable", False, ["data"], "data.0.reward of type reward_model"),
    companion_rule("reward_model.model.path", None, ["data"], "with reward_model.enable"),
    renamed_key_rule("data.max_response_length", 512, "rollout.max_new_tokens"),
    renamed_key_rule("data.seed", None, "seed", lambda value, _: int(value or 0)),
    renamed_key_rule(
        f"{_MODEL}.path", "~/models/deepseek-llm-7b-chat", "model.path", lambda value, _: _expand_path(value)
    ),
    renamed_key_rule(f"{_MODEL}.trust_remote_code", False, "model.trust_remote_code"),
    renamed_key_rule(f"{_MODEL}.enable_gradient_checkpointing", True, "training.activation_checkpointing"),
    renamed_key_rule(
        f"{_ACTOR}.freeze_vision_tower", False, "model.vision.freeze", lambda value, _: ["tower"] if value else []
    ),
    conversion_rule(f"{_MODEL}.lora_rank", 0, _LORA_KEYS, _convert_lora, "0 trains all weights"),
    companion_rule(f"{_MODEL}.lora_alpha", 16, _LORA_KEYS, "with lora_rank"),
    companion_rule(f"{_MODEL}.target_modules", "all-linear", _LORA_KEYS, "with lora_rank"),
    renamed_key_rule(f"{_ACTOR}.optim.lr", 1e-6, "training.learning_rate"),
    renamed_key_rule(f"{_ACTOR}.optim.lr_warmup_steps", -1, "training.warmup_steps", _convert_warmup),
    companion_rule(f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0.0, ["training.warmup_steps"], "times all steps"),
    renamed_key_rule(f"{_ACTOR}.optim.lr_scheduler_type", "constant", "training.schedule", _convert_schedule),
    companion_rule(f"{_ACTOR}.optim.warmup_style", None, ["training.schedule"], "older name of lr_scheduler_type"),
    renamed_key_rule(f"{_ACTOR}.optim.weight_decay", 0.01, "training.weight_decay"),
    renamed_key_rule(f"{_ACTOR}.optim.betas", [0.9, 0.999], "training.beta1", lambda value, _: value[0]),
    renamed_key_rule(f"{_ACTOR}.optim.clip_grad", 1.0, "training.max_grad_norm"),
    ignored_key_rule(f"{_ACTOR}.grad_clip", 1.0, "optim.clip_grad becomes training.max_grad_norm"),
    unsupported_key_rule(
        f"{_ACTOR}.optim.optimizer", "AdamW", "the only optimizer is AdamW, in float32 or 8 bits (training.optimizer)"
    ),
    unsupported_key_rule(f"{_ACTOR}.optim.min_lr_ratio", 0.0, "schedules end at 0"),
    unsupported_key_rule(f"{_ACTOR}.optim.num_cycles", 0.5, "the cosine schedule is half a cycle"),
    unsupported_key_rule(f"{_ACTOR}.optim.override_optimizer_config", None, "see training.beta1, beta2, epsilon"),
    renamed_key_rule(f"{_ACTOR}.ulysses_sequence_parallel_size", 1, "training.parallel.cp"),
    conversion_rule(
        f"{_ACTOR}.use_dynamic_bsz",
        False,
        ["training.max_tokens_per_micro_batch"],
        _convert_micro_batch,
        "micro-batches are always packed by tokens",
    ),
    companion_rule(
        f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384, ["training.max_tokens_per_micro_batch"], "with use_dynamic_bsz"
    ),
    renamed_key_rule(f"{_ROLLOUT}.temperature", 1.0, "rollout.temperature", lambda value, _: float(value)),
    renamed_key_rule(f"{_ROLLOUT}.top_p", 1, "rollout.top_p", lambda value, _: float(value)),
    renamed_key_rule(f"{_ROLLOUT}.top_k", -1, "rollout.top_k", _convert_frequency, "-1 (all tokens) becomes 0"),
    renamed_key_rule(f"{_ROLLOUT}.tensor_model_parallel_size", 2, "inference.tensor_parallel"),
    renamed_key_rule(f"{_ROLLOUT}.max_model_len", None, "inference.max_context"),
    renamed_key_rule(f"{_ROLLOUT}.max_num_seqs", 256, "inference.max_num_seqs"),
    renamed_key_rule(f"{_ROLLOUT}.quantization", None, "inference.quantization", _convert_quantization),
    unsupported_key_rule(
        f"{_ROLLOUT}.name", "vllm", "engines are vLLM or ROLL's own (inference.engine)", equivalent_values=(None, "hf")
    ),
    unsupported_key_rule(f"{_ROLLOUT}.ignore_eos", False, "answers always end at the end token"),
    unsupported_key_rule(f"{_ROLLOUT}.over_sample_rate", 0, "see rollout.scheduling.rollout_redundancy"),
    unsupported_key_rule(f"{_ROLLOUT}.multi_turn.enable", False, "see data.0.source: environment, or rollout.agent"),
    unsupported_key_rule(f"{_ROLLOUT}.multi_turn.tool_config_path", None, "see data.0.tools"),
    unsupported_key_rule(f"{_ROLLOUT}.enable_rollout_routing_replay", False, "see training.router_replay: engine"),
    renamed_key_rule(
        f"{_ROLLOUT}.val_kwargs.temperature", 0, "evaluation.temperature", _convert_temperature, "0 without do_sample"
    ),
    companion_rule(f"{_ROLLOUT}.val_kwargs.do_sample", False, ["evaluation.temperature"], "greedy if it is false"),
    renamed_key_rule(f"{_ROLLOUT}.val_kwargs.n", 1, "evaluation.samples_per_prompt"),
    renamed_key_rule(
        "trainer.test_freq",
        -1,
        "evaluation.every_num_steps",
        _convert_frequency,
        "-1 becomes 0, which evaluates only before and after training",
    ),
    renamed_key_rule("trainer.val_before_train", True, "evaluation.before_training"),
    renamed_key_rule(
        "data.val_max_samples", -1, "evaluation.num_prompts", lambda value, _: value if value > 0 else 10**6
    ),
    renamed_key_rule("trainer.save_freq", -1, "checkpoint.every_num_steps", _convert_frequency),
    renamed_key_rule("trainer.max_actor_ckpt_to_keep", None, "checkpoint.keep_last", lambda value, _: value or 10**6),
    conversion_rule(
        "trainer.experiment_name", "gsm8k", ["name"], _convert_name, "name of the run and of its directory"
    ),
    conversion_rule(
        "trainer.logger", ["console", "wandb"], ["tracking.wandb"], _convert_logger, "TensorBoard is always written"
    ),
    companion_rule(
        "trainer.project_name", "verl_examples", ["tracking.wandb", "tracking.swanlab"], "with trainer.logger"
    ),
    conversion_rule(
        "trainer.n_gpus_per_node",
        8,
        _DEVICE_KEYS,
        _convert_devices,
        "times nnodes; trainers and engines share all devices",
    ),
    companion_rule("trainer.nnodes", 1, _DEVICE_KEYS, "with n_gpus_per_node"),
    unsupported_key_rule("trainer.val_only", False, "`roll eval FILE` evaluates without training"),
    unsupported_key_rule(
        "data.truncation", "error", "prompts are never truncated; a prompt that is too long ends the run"
    ),
    unsupported_key_rule(
        "data.filter_overlong_prompts", False, "remove long prompts from the file", equivalent_values=()
    ),
    unsupported_key_rule("data.tokenizer", None, "the model's own tokenizer is used"),
    unsupported_key_rule("data.custom_cls.path", None, "see data.0.source: python"),
    unsupported_key_rule("data.sampler.class_path", None, "rows are drawn in random order, and sources by weight"),
    unsupported_key_rule("data.datagen.path", None, "see data.0.source: python"),
    unsupported_key_rule(
        "data.apply_chat_template_kwargs", {}, "write them into a column chat_template_kwargs of the rows"
    ),
    unsupported_key_rule(f"{_MODEL}.custom_chat_template", None, "put the template into the model's directory"),
    unsupported_key_rule(f"{_MODEL}.tokenizer_path", None, "put the tokenizer into the model's directory"),
    unsupported_key_rule(f"{_MODEL}.hf_config_path", None, "put the configuration into the model's directory"),
    unsupported_key_rule(f"{_MODEL}.override_config", {}, "put the configuration into the model's directory"),
    unsupported_key_rule(f"{_MODEL}.external_lib", None, "import the model's dependencies in your own package"),
    unsupported_key_rule(f"{_MODEL}.lora_adapter_path", None, "merge the adapter into the model first"),
    unsupported_key_rule(
        f"{_MODEL}.exclude_modules", None, "list the modules with an adapter: model.lora.target_modules"
    ),
    *LOSS_RULES,
    *IGNORED_RULES,
]
