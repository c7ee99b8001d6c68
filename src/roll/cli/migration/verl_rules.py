"""Keys of verl's `ppo_trainer`, with its defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from roll.cli.migration.rules import (
    Rule,
    UnsupportedValue,
    Values,
    converted_with,
    handled_by,
    ignored,
    moved,
    unsupported,
)
from roll.cli.migration.verl_loss import LOSS_RULES
from roll.cli.migration.verl_needless import NEEDLESS
from roll.errors import ConfigError

__all__ = ["VERL"]

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def _name(values: Values) -> Mapping[str, Any]:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(values.trainer.experiment_name)).lstrip("._-")
    return {"name": name or "from-verl"}


def _batch(values: Values) -> Mapping[str, Any]:
    prompts, part = int(values.data.train_batch_size), int(values[f"{_ACTOR}.ppo_mini_batch_size"])
    if prompts % part and part < prompts:
        raise ConfigError(f"train_batch_size {prompts} is no multiple of ppo_mini_batch_size {part}.")
    return {"rollout.prompts_per_step": prompts, "algorithm.updates.num_minibatches": max(1, prompts // part)}


def _steps(own: Any, values: Values) -> int:
    if own is not None:
        return int(own)
    if values.rows is None:
        raise ConfigError(
            "the configuration counts epochs (trainer.total_epochs), and a run of ROLL that generates counts steps: "
            "say with --rows how many rows the data set has."
        )
    return max(1, int(values.rows) // int(values.data.train_batch_size) * int(values.trainer.total_epochs))


def _warmup(own: Any, values: Values) -> int:
    if own is not None and own >= 0:
        return int(own)
    share = float(values[f"{_ACTOR}.optim.lr_warmup_steps_ratio"])
    return round(share * _steps(values.trainer.total_training_steps, values)) if share else 0


def _schedule(value: str, values: Values) -> str:
    value = values[f"{_ACTOR}.optim.warmup_style"] or value
    if value not in ("constant", "cosine", "linear"):
        raise UnsupportedValue("schedules are constant, linear and cosine; the default is constant")
    return value


def _place(path: Any) -> str:
    return os.path.expanduser(os.path.expandvars(str(path)))


def _files(value: Any) -> list[str]:
    return [_place(file) for file in (value if isinstance(value, list) else [value])]


def _data(values: Values) -> Mapping[str, Any]:
    training, held_out = _files(values.data.train_files), _files(values.data.val_files)
    path, name = values.custom_reward_function.path, values.custom_reward_function.name
    reward: Any = {"type": "math", "require_finished": False}
    if path:
        reward = {"type": "python", "function": f"{_place(path)}:{name}", "require_finished": False}
    if values.reward_model.enable:
        reward = {"type": "reward_model", "path": _place(values.reward_model.model.path), "require_finished": False}
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


def _answers(_: Values) -> Mapping[str, Any]:
    raise UnsupportedValue(
        "verl's rows hold the reference in reward_model.ground_truth: write it into a column `answer` of its own "
        "(docs/migration.md has the lines). verl chooses a scorer by this column; the file has `math` for all rows"
    )


def _devices(values: Values) -> Mapping[str, Any]:
    count = int(values.trainer.nnodes) * int(values.trainer.n_gpus_per_node)
    if count == 1:
        return {}
    devices = list(range(count))
    return {
        "cluster.type": "ray",
        "cluster.device_mapping.actor_train": devices,
        "cluster.device_mapping.actor_infer": list(devices),
    }


def _lora(values: Values) -> Mapping[str, Any]:
    rank = int(values[f"{_MODEL}.lora_rank"])
    if not rank:
        return {}
    targets = values[f"{_MODEL}.target_modules"]
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": float(values[f"{_MODEL}.lora_alpha"]),
        "model.lora.target_modules": targets,
    }


def _logger(values: Values) -> Mapping[str, Any]:
    names = values.trainer.logger
    names = [names] if isinstance(names, str) else list(names)
    known = ("wandb", "swanlab")
    found = {f"tracking.{name}": str(values.trainer.project_name) for name in names if name in known}
    other = [name for name in names if name not in (*known, "console", "tensorboard", "file")]
    if other:
        raise UnsupportedValue(f"no such tracker: {', '.join(other)}; metrics.jsonl and TensorBoard are always written")
    return found


def _micro(values: Values) -> Mapping[str, Any]:
    if not values[f"{_ACTOR}.use_dynamic_bsz"]:
        return {}
    return {"training.max_tokens_per_micro_batch": int(values[f"{_ACTOR}.ppo_max_token_len_per_gpu"])}


def _greedy(_: Any, values: Values) -> float:
    sampled = values[f"{_ROLLOUT}.val_kwargs.do_sample"]
    return float(values[f"{_ROLLOUT}.val_kwargs.temperature"]) if sampled else 0.0


def _quantization(value: str | None, _: Values) -> str:
    if value not in (None, "fp8"):
        raise UnsupportedValue(
            f"quantization {value} is not among none, int8 and fp8; engines get the trainer's weights"
        )
    return value or "none"


def _frequency(value: int, _: Values) -> int:
    return max(0, int(value))


_BATCH = ("rollout.prompts_per_step", "algorithm.updates.num_minibatches")
_LORA = ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules")
_DEVICES = ("cluster.type", "cluster.device_mapping.actor_train", "cluster.device_mapping.actor_infer")

VERL: list[Rule] = [
    converted_with(
        "data.train_batch_size", 1024, _BATCH, _batch, "minibatches: train_batch_size / ppo_mini_batch_size"
    ),
    handled_by(f"{_ACTOR}.ppo_mini_batch_size", 256, _BATCH, "with data.train_batch_size"),
    moved(f"{_ACTOR}.ppo_epochs", 1, "algorithm.updates.num_epochs"),
    moved(f"{_ROLLOUT}.n", 1, "rollout.group_size"),
    moved("trainer.total_training_steps", None, "training.num_steps", _steps),
    handled_by("trainer.total_epochs", 30, ["training.num_steps"], "x (rows // train_batch_size)"),
    converted_with("data.train_files", "~/data/rlhf/gsm8k/train.parquet", ["data"], _data, "parquet or JSONL"),
    handled_by("data.val_files", "~/data/rlhf/gsm8k/test.parquet", ["data"], "data.0.held_out_path"),
    handled_by("data.prompt_key", "prompt", ["data"], "data.0.prompt_key"),
    handled_by("data.train_max_samples", -1, ["data"], "data.0.limit"),
    converted_with("data.reward_fn_key", "data_source", ["data"], _answers, "data.0.reward"),
    handled_by("custom_reward_function.path", None, ["data"], "data.0.reward of type python, bound by name"),
    handled_by("custom_reward_function.name", "compute_score", ["data"], "with custom_reward_function.path"),
    handled_by("reward_model.enable", False, ["data"], "data.0.reward of type reward_model"),
    handled_by("reward_model.model.path", None, ["data"], "with reward_model.enable"),
    moved("data.max_response_length", 512, "rollout.max_new_tokens"),
    moved("data.seed", None, "seed", lambda value, _: int(value or 0)),
    moved(f"{_MODEL}.path", "~/models/deepseek-llm-7b-chat", "model.path", lambda value, _: _place(value)),
    moved(f"{_MODEL}.trust_remote_code", False, "model.trust_remote_code"),
    moved(f"{_MODEL}.enable_gradient_checkpointing", True, "training.activation_checkpointing"),
    converted_with(f"{_MODEL}.lora_rank", 0, _LORA, _lora, "0 trains all weights"),
    handled_by(f"{_MODEL}.lora_alpha", 16, _LORA, "with lora_rank"),
    handled_by(f"{_MODEL}.target_modules", "all-linear", _LORA, "with lora_rank"),
    moved(f"{_ACTOR}.optim.lr", 1e-6, "training.learning_rate"),
    moved(f"{_ACTOR}.optim.lr_warmup_steps", -1, "training.warmup_steps", _warmup),
    handled_by(f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0.0, ["training.warmup_steps"], "x all steps"),
    moved(f"{_ACTOR}.optim.lr_scheduler_type", "constant", "training.schedule", _schedule),
    handled_by(f"{_ACTOR}.optim.warmup_style", None, ["training.schedule"], "an older name"),
    moved(f"{_ACTOR}.optim.weight_decay", 0.01, "training.weight_decay"),
    moved(f"{_ACTOR}.optim.betas", [0.9, 0.999], "training.beta1", lambda value, _: value[0]),
    moved(f"{_ACTOR}.optim.clip_grad", 1.0, "training.max_grad_norm"),
    ignored(f"{_ACTOR}.grad_clip", 1.0, "optim.clip_grad is what becomes training.max_grad_norm"),
    unsupported(
        f"{_ACTOR}.optim.optimizer", "AdamW", "optimisers are AdamW, in float32 or 8 bits (training.optimizer)"
    ),
    unsupported(f"{_ACTOR}.optim.min_lr_ratio", 0.0, "schedules end at 0"),
    unsupported(f"{_ACTOR}.optim.num_cycles", 0.5, "the cosine is half a cycle"),
    unsupported(f"{_ACTOR}.optim.override_optimizer_config", None, "see training.beta1, beta2, epsilon"),
    moved(f"{_ACTOR}.ulysses_sequence_parallel_size", 1, "training.parallel.cp"),
    converted_with(
        f"{_ACTOR}.use_dynamic_bsz",
        False,
        ["training.max_tokens_per_micro_batch"],
        _micro,
        "micro-batches are always packed by tokens",
    ),
    handled_by(
        f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384, ["training.max_tokens_per_micro_batch"], "with use_dynamic_bsz"
    ),
    moved(f"{_ROLLOUT}.temperature", 1.0, "rollout.temperature", lambda value, _: float(value)),
    moved(f"{_ROLLOUT}.top_p", 1, "rollout.top_p", lambda value, _: float(value)),
    moved(f"{_ROLLOUT}.top_k", -1, "rollout.top_k", _frequency, "-1, all, is 0"),
    moved(f"{_ROLLOUT}.tensor_model_parallel_size", 2, "inference.tensor_parallel"),
    moved(f"{_ROLLOUT}.max_model_len", None, "inference.max_context"),
    moved(f"{_ROLLOUT}.max_num_seqs", 256, "inference.max_num_seqs"),
    moved(f"{_ROLLOUT}.quantization", None, "inference.quantization", _quantization),
    unsupported(f"{_ROLLOUT}.name", "vllm", "engines are vLLM or ROLL's own (inference.engine)", harmless=(None, "hf")),
    unsupported(f"{_ROLLOUT}.ignore_eos", False, "answers end where the model ends them"),
    unsupported(f"{_ROLLOUT}.over_sample_rate", 0, "see rollout.scheduling.rollout_redundancy"),
    unsupported(f"{_ROLLOUT}.multi_turn.enable", False, "see data.0.source: environment, or rollout.agent"),
    unsupported(f"{_ROLLOUT}.multi_turn.tool_config_path", None, "see data.0.tools"),
    unsupported(f"{_ROLLOUT}.enable_rollout_routing_replay", False, "see training.router_replay: engine"),
    moved(f"{_ROLLOUT}.val_kwargs.temperature", 0, "evaluation.temperature", _greedy, "0 without do_sample"),
    handled_by(f"{_ROLLOUT}.val_kwargs.do_sample", False, ["evaluation.temperature"], "greedy where it is false"),
    moved(f"{_ROLLOUT}.val_kwargs.n", 1, "evaluation.samples_per_prompt"),
    moved("trainer.test_freq", -1, "evaluation.every_num_steps", _frequency, "-1 is 0: before and after training"),
    moved("trainer.val_before_train", True, "evaluation.before_training"),
    moved("data.val_max_samples", -1, "evaluation.num_prompts", lambda value, _: value if value > 0 else 10**6),
    moved("trainer.save_freq", -1, "checkpoint.every_num_steps", _frequency),
    moved("trainer.max_actor_ckpt_to_keep", None, "checkpoint.keep_last", lambda value, _: value or 10**6),
    converted_with("trainer.experiment_name", "gsm8k", ["name"], _name, "of the run and its directory"),
    converted_with(
        "trainer.logger", ["console", "wandb"], ["tracking.wandb"], _logger, "TensorBoard is always written"
    ),
    handled_by("trainer.project_name", "verl_examples", ["tracking.wandb", "tracking.swanlab"], "with trainer.logger"),
    converted_with(
        "trainer.n_gpus_per_node", 8, _DEVICES, _devices, "x nnodes; trainers and engines share all of them"
    ),
    handled_by("trainer.nnodes", 1, _DEVICES, "with n_gpus_per_node"),
    unsupported("trainer.val_only", False, "`roll eval FILE` measures alone"),
    unsupported("data.truncation", "error", "prompts are never cut; one that is too long ends the run"),
    unsupported("data.filter_overlong_prompts", False, "leave long prompts out of the file", harmless=()),
    unsupported("data.tokenizer", None, "the model's own"),
    unsupported("data.custom_cls.path", None, "see data.0.source: python"),
    unsupported("data.sampler.class_path", None, "rows come in random order, sources by weight"),
    unsupported("data.datagen.path", None, "see data.0.source: python"),
    unsupported("data.apply_chat_template_kwargs", {}, "chat templates get no further arguments"),
    unsupported(f"{_MODEL}.custom_chat_template", None, "put the template into the model's directory"),
    unsupported(f"{_MODEL}.tokenizer_path", None, "put the tokenizer into the model's directory"),
    unsupported(f"{_MODEL}.hf_config_path", None, "put the configuration into the model's directory"),
    unsupported(f"{_MODEL}.override_config", {}, "put the configuration into the model's directory"),
    unsupported(f"{_MODEL}.external_lib", None, "import what a model needs in a package of yours"),
    unsupported(f"{_MODEL}.lora_adapter_path", None, "merge the adapter into the model first"),
    unsupported(f"{_MODEL}.exclude_modules", None, "name those that get an adapter: model.lora.target_modules"),
    *LOSS_RULES,
    *NEEDLESS,
]
