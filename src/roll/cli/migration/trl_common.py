"""Keys that all trainers of TRL 1.16 have: those of `TrainingArguments`, `ModelConfig` and the script."""

from __future__ import annotations

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
    ignored_key_rules,
    renamed_key_rule,
    unsupported_key_rule,
)
from roll.errors import ConfigError

__all__ = ["COMMON_RULES", "compute_generation_sizes", "count_epoch_rows", "count_update_rows", "is_fraction"]

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def count_update_rows(values: LibraryValues) -> int:
    """Return the number of rows (for GRPO, of completions) that TRL trains on in one optimizer step."""
    batch = int(values.per_device_train_batch_size) * int(values.processes)
    return batch * int(values.gradient_accumulation_steps)


def compute_generation_sizes(values: LibraryValues) -> tuple[int, int]:
    """Return the number of completions that TRL generates at once, and the number of optimizer steps of one pass over
    them.

    Raises:
        ConfigError: `generation_batch_size` and `steps_per_generation` are both set.
        UnsupportedValueError: an optimizer step would mix completions of two generations.
    """
    batch = int(values.per_device_train_batch_size) * int(values.processes)
    size, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    if size is not None and steps is not None:
        raise ConfigError(
            "generation_batch_size and steps_per_generation are both set, and TRL accepts only one of them."
        )
    steps = int(size) // batch if size is not None else int(steps or values.gradient_accumulation_steps)
    accumulated = int(values.gradient_accumulation_steps)
    if steps % accumulated:
        raise UnsupportedValueError(
            f"steps_per_generation ({steps}) is not divisible by gradient_accumulation_steps ({accumulated}), so an "
            "update would mix two generation batches; ROLL performs one update per generation batch"
        )
    return batch * steps, steps // accumulated


def count_epoch_rows(values: LibraryValues) -> float:
    """Return the total number of rows that all epochs train on: epochs times the rows of the data set.

    Raises:
        ConfigError: the number of rows is not known.
    """
    if values.rows is None:
        raise ConfigError(
            "the length is given in epochs (max_steps is not set), but ROLL counts the steps of a run with rollouts: "
            "set --rows to the number of rows of the dataset."
        )
    return float(values.num_train_epochs) * int(values.rows)


def is_fraction(steps: float) -> bool:
    """Return whether `steps` is a fraction of all steps, not a number of steps; `TrainingArguments` allows both."""
    return 0 < steps < 1


def _convert_name(values: LibraryValues) -> Mapping[str, Any]:
    text = str(values.run_name or PurePath(str(values.output_dir or "from-trl")).name)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")
    return {"name": name or "from-trl"}


def _convert_directory(values: LibraryValues) -> Mapping[str, Any]:
    parent = str(PurePath(str(values.output_dir)).parent) if values.output_dir else "."
    return {} if parent == "." else {"output_dir": parent}


def _convert_dtype(_: Any, values: LibraryValues) -> str:
    if values.fp16:
        raise UnsupportedValueError(
            "float16 training is not supported; use bfloat16, which does not require loss scaling"
        )
    return "float32" if values.bf16 is False else "bfloat16"


def _convert_schedule(value: str, _: LibraryValues) -> str:
    if value not in _SCHEDULES:
        known = ", ".join(sorted(set(_SCHEDULES.values())))
        raise UnsupportedValueError(
            f"{value} is not supported (supported: {known}); the converted file has ROLL's default, constant"
        )
    return _SCHEDULES[value]


def _convert_optimizer(value: str, _: LibraryValues) -> str:
    name = str(value)
    if name.startswith(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")):
        return "adamw_8bit"
    if not name.startswith(("adamw", "paged_adamw")):
        raise UnsupportedValueError(f"{value} is not supported; ROLL supports only AdamW, with float32 or 8-bit states")
    return "adamw"


def _convert_max_grad_norm(value: float, _: LibraryValues) -> float:
    return float(value) if value else 1e9


def _convert_save_steps(values: LibraryValues) -> Mapping[str, Any]:
    if values.save_strategy != "steps":
        return {}
    if is_fraction(values.save_steps):
        raise UnsupportedValueError("a fraction of all steps is not supported; by default ROLL saves every ten minutes")
    return {"checkpoint.every_num_steps": max(1, round(values.save_steps / values.updates_per_step(values)))}


def _convert_load_best_model(value: bool, _: LibraryValues) -> bool:
    return bool(value)


def _convert_trackers(values: LibraryValues) -> Mapping[str, Any]:
    names = values.report_to
    names = [names] if isinstance(names, str) else list(names or ())
    project = str(values.project)
    known = {"wandb": {"tracking.wandb": project}, "swanlab": {"tracking.swanlab": project}, "tensorboard": {}}
    lost = [name for name in names if name not in (*known, "none", "all")]
    if lost:
        raise UnsupportedValueError(
            f"trackers that are not converted: {', '.join(lost)}; metrics.jsonl and TensorBoard are always written"
        )
    return {key: value for name in names for key, value in known.get(name, {}).items()}


def _convert_lora(values: LibraryValues) -> Mapping[str, Any]:
    if not values.use_peft:
        return {}
    rank, alpha = int(values.lora_r), float(values.lora_alpha)
    targets = values.lora_target_modules
    lora = {
        "rank": rank,
        "alpha": alpha,
        "dropout": float(values.lora_dropout),
        "target_modules": "all-linear" if targets in (["all-linear"], "all-linear") else targets,
    }
    lora |= {key: True for key in ("use_rslora", "use_dora") if values[key]}
    if targets is None:
        lora["target_modules"] = ["q_proj", "v_proj"]
    if values.load_in_4bit and values.bnb_4bit_quant_type == "nf4":
        lora["base"] = "nf4"
    return {f"model.lora.{name}": value for name, value in lora.items()}


_LORA_KEYS = ("model.lora",)
_TRAINER_RULES: list[Rule] = [
    conversion_rule(
        "output_dir",
        None,
        ["output_dir", "name"],
        _convert_directory,
        "output_dir becomes the parent directory, and its last part becomes the run's name",
    ),
    conversion_rule("run_name", None, ["name"], _convert_name, "by default the last part of output_dir"),
    renamed_key_rule("learning_rate", 5e-5, "training.learning_rate"),
    renamed_key_rule("lr_scheduler_type", "linear", "training.schedule", _convert_schedule),
    unsupported_key_rule("lr_scheduler_kwargs", None, "schedules have no further arguments"),
    renamed_key_rule("optim", "adamw_torch_fused", "training.optimizer", _convert_optimizer),
    unsupported_key_rule("optim_args", None, "AdamW has its own keys: training.beta1, beta2, epsilon"),
    unsupported_key_rule("optim_target_modules", None, "all trained weights have the same optimizer"),
    renamed_key_rule("weight_decay", 0.0, "training.weight_decay"),
    renamed_key_rule("adam_beta1", 0.9, "training.beta1"),
    renamed_key_rule("adam_beta2", 0.999, "training.beta2"),
    renamed_key_rule("adam_epsilon", 1e-8, "training.epsilon"),
    renamed_key_rule(
        "max_grad_norm", 1.0, "training.max_grad_norm", _convert_max_grad_norm, "0 (no limit) becomes 1e9"
    ),
    renamed_key_rule(
        "bf16", None, "model.dtype", _convert_dtype, "even if it is not set, as in TRL's own configurations"
    ),
    unsupported_key_rule("fp16", False, "float16 training is not supported", equivalent_values=(None,)),
    renamed_key_rule("gradient_checkpointing", True, "training.activation_checkpointing", lambda value, _: bool(value)),
    renamed_key_rule("seed", 42, "seed"),
    renamed_key_rule(
        "load_best_model_at_end",
        False,
        "checkpoint.keep_best",
        _convert_load_best_model,
        "the best checkpoint by eval/score is kept, but not loaded",
    ),
    conversion_rule("save_steps", 500, ["checkpoint.every_num_steps"], _convert_save_steps, "in steps of ROLL"),
    companion_rule("save_strategy", "steps", ["checkpoint.every_num_steps"], "other strategies save every ten minutes"),
    renamed_key_rule(
        "save_total_limit", None, "checkpoint.keep_last", lambda value, _: 10**6 if value is None else max(1, value)
    ),
    conversion_rule(
        "report_to", "none", ["tracking.wandb", "tracking.swanlab"], _convert_trackers, "TensorBoard is always written"
    ),
    companion_rule("project", "huggingface", ["tracking.wandb", "tracking.swanlab"], "with report_to"),
    unsupported_key_rule("label_smoothing_factor", 0.0, "the SFT loss has no label smoothing"),
    unsupported_key_rule("neftune_noise_alpha", None, "noise on embeddings is not supported"),
    unsupported_key_rule("data_seed", None, "a single seed is used for all random number generators"),
    unsupported_key_rule("batch_eval_metrics", False, "the pipeline determines the metrics of an evaluation"),
    unsupported_key_rule("resume_from_checkpoint", None, "`roll resume RUN` continues from ROLL's own checkpoints"),
    unsupported_key_rule("deepspeed", None, "set training.backend: deepspeed and training.deepspeed.zero_stage"),
    unsupported_key_rule(
        "fsdp", None, "weights are always sharded with FSDP2", equivalent_values=("", [], False, True)
    ),
    unsupported_key_rule("fsdp_config", None, "weights are always sharded with FSDP2"),
    unsupported_key_rule("parallelism_config", None, "set training.parallel"),
    unsupported_key_rule("push_to_hub", False, "`roll export RUN DIR --to-hub OWNER/NAME` uploads"),
    unsupported_key_rule(
        "auto_find_batch_size", False, "training.max_tokens_per_micro_batch bounds memory, not the batch"
    ),
    unsupported_key_rule("train_sampling_strategy", "random", "rows come in random order"),
    unsupported_key_rule("ignore_data_skip", False, "a resumed run continues at its position in the data"),
]

_SPEED_KEYS = {
    "average_tokens_across_devices": True,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "gradient_checkpointing_kwargs": None,
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "use_liger_kernel": False,
    "liger_kernel_config": None,
    "use_cache": False,
    "torch_empty_cache_steps": None,
    "accelerator_config": None,
    "use_cpu": False,
    "dataloader_drop_last": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "dataloader_multiprocessing_context": None,
    "dataloader_in_order": True,
    "remove_unused_columns": True,
    "label_names": None,
    "length_column_name": "length",
    "ddp_find_unused_parameters": None,
    "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None,
    "ddp_static_graph": None,
    "ddp_backend": None,
    "ddp_timeout": 1800,
    "debug": "",
    "skip_memory_metrics": True,
    "do_train": False,
    "do_eval": False,
    "do_predict": False,
    "local_rank": -1,
    "full_determinism": False,
}
_LOGGING_KEYS = {
    "logging_strategy": "steps",
    "logging_steps": 10,
    "logging_first_step": False,
    "log_on_each_node": True,
    "logging_nan_inf_filter": True,
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "log_level_replica": "warning",
    "disable_tqdm": None,
    "trackio_space_id": None,
    "trackio_bucket_id": None,
    "trackio_static_space_id": None,
}
_EVALUATION_KEYS = {
    "prediction_loss_only": False,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "eval_accumulation_steps": None,
    "include_for_metrics": [],
    "metric_for_best_model": None,
    "greater_is_better": None,
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
}
_CHECKPOINT_KEYS = {
    "save_only_model": False,
    "save_on_each_node": False,
    "enable_jit_checkpoint": False,
    "restore_callback_states_from_checkpoint": False,
}
_HUB_KEYS = {
    "hub_token": None,
    "hub_private_repo": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_always_push": False,
    "hub_revision": None,
}
_MODEL_RULES: list[Rule] = [
    renamed_key_rule("model_name_or_path", None, "model.path"),
    unsupported_key_rule(
        "model_revision",
        "main",
        "a Hub id selects the newest revision; download another revision and use the path of its directory",
    ),
    renamed_key_rule("trust_remote_code", False, "model.trust_remote_code"),
    unsupported_key_rule("model_init_kwargs", None, "models are loaded with the settings in config.json"),
    conversion_rule(
        "use_peft", False, _LORA_KEYS, _convert_lora, "default target modules are those of peft: q_proj and v_proj"
    ),
    *(
        companion_rule(key, default, _LORA_KEYS, "with use_peft")
        for key, default in (
            ("lora_r", 16),
            ("lora_alpha", 32),
            ("lora_dropout", 0.05),
            ("lora_target_modules", None),
            ("use_rslora", False),
            ("use_dora", False),
            ("load_in_4bit", False),
        )
    ),
    unsupported_key_rule("bnb_4bit_quant_type", "nf4", "weights in 4 bits are NF4"),
    unsupported_key_rule("use_bnb_nested_quant", False, "quantization scales are not quantized"),
    unsupported_key_rule("lora_target_parameters", None, "adapters belong to modules, not to parameters"),
    unsupported_key_rule("lora_modules_to_save", None, "with model.lora, only adapters are trained"),
    unsupported_key_rule("lora_task_type", "CAUSAL_LM", "the pipeline determines the task"),
    unsupported_key_rule(
        "load_in_8bit", False, "frozen weights have the model's dtype or 4 bits (model.lora.base: nf4)"
    ),
    *ignored_key_rules({"dtype": "float32"}, "master weights are always float32"),
    *ignored_key_rules({"attn_implementation": None}, "the implementation of packed attention depends on the device"),
    *ignored_key_rules({"bnb_4bit_quant_storage": None}, "4-bit weights are stored as bytes"),
]
_SCRIPT_RULES: list[Rule] = [
    *ignored_key_rules(
        {"dataset_streaming": False, "streaming": False}, "rows are read from disk when they are needed"
    ),
    *ignored_key_rules({"ignore_bias_buffers": False}, "weights are sharded with FSDP2"),
    unsupported_key_rule("test_split_size", None, "set data.0.held_out to this fraction"),
]
COMMON_RULES: list[Rule] = [
    *_TRAINER_RULES,
    *ignored_key_rules(_SPEED_KEYS, "affects only speed or memory; ROLL's own settings are in the section training"),
    *ignored_key_rules(_LOGGING_KEYS, "every step is recorded; trackers are set in the section tracking"),
    *ignored_key_rules(_EVALUATION_KEYS, "the pipeline determines the batches and metrics of an evaluation"),
    *ignored_key_rules(_CHECKPOINT_KEYS, "checkpoints always contain the whole state"),
    *ignored_key_rules(_HUB_KEYS, "to upload a model, run `roll export RUN DIR --to-hub OWNER/NAME`"),
    *_MODEL_RULES,
    *_SCRIPT_RULES,
]
