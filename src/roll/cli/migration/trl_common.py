"""Keys that all trainers of TRL 1.16 have: `TrainingArguments`, `ModelConfig` and the script's own."""

from __future__ import annotations

import math
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
    ignored_all,
    moved,
    unsupported,
)
from roll.errors import ConfigError

__all__ = ["COMMON", "generation", "is_fraction", "num_epoch_rows", "per_update"]

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def per_update(values: Values) -> int:
    """Return the number of rows, or completions, of one optimizer step."""
    batch = int(values.per_device_train_batch_size) * int(values.processes)
    return batch * int(values.gradient_accumulation_steps)


def generation(values: Values) -> tuple[int, int]:
    """Return the completions of one generation, and the optimizer steps of a pass over them, as `GRPOConfig` counts."""
    batch = int(values.per_device_train_batch_size) * int(values.processes)
    size, steps = values.get("generation_batch_size"), values.get("steps_per_generation")
    if size is not None and steps is not None:
        raise ConfigError("generation_batch_size and steps_per_generation are both set: TRL takes one of them.")
    steps = int(size) // batch if size is not None else int(steps or values.gradient_accumulation_steps)
    accumulated = int(values.gradient_accumulation_steps)
    if steps % accumulated:
        raise UnsupportedValue(
            f"steps_per_generation {steps} is no multiple of gradient_accumulation_steps {accumulated}: updates would "
            "mix two generations; ROLL makes one update of each generation"
        )
    return batch * steps, steps // accumulated


def num_epoch_rows(values: Values) -> float:
    """Return the number of rows of all epochs together."""
    if values.rows is None:
        raise ConfigError(
            "the configuration counts epochs (max_steps is not set), and a run of ROLL that generates counts steps: "
            "say with --rows how many rows the data set has."
        )
    return float(values.num_train_epochs) * int(values.rows)


def is_fraction(steps: float) -> bool:
    """Return whether a number of steps is a fraction of all steps, as `TrainingArguments` allows."""
    return 0 < steps < 1


def _name(values: Values) -> Mapping[str, Any]:
    text = str(values.run_name or PurePath(str(values.output_dir or "from-trl")).name)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")
    return {"name": name or "from-trl"}


def _directory(values: Values) -> Mapping[str, Any]:
    parent = str(PurePath(str(values.output_dir)).parent) if values.output_dir else "."
    return {} if parent == "." else {"output_dir": parent}


def _dtype(_: Any, values: Values) -> str:
    if values.fp16:
        raise UnsupportedValue("float16 is not trained in; bfloat16 is, which needs no loss scaling")
    return "float32" if values.bf16 is False else "bfloat16"


def _schedule(value: str, _: Values) -> str:
    if value not in _SCHEDULES:
        raise UnsupportedValue(f"schedules are {', '.join(sorted(set(_SCHEDULES.values())))}; the default is constant")
    return _SCHEDULES[value]


def _optimizer(value: str, _: Values) -> str:
    name = str(value)
    if name.startswith(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")):
        return "adamw_8bit"
    if not name.startswith(("adamw", "paged_adamw")):
        raise UnsupportedValue("optimisers are AdamW, with moments in float32 or in 8 bits")
    return "adamw"


def _norm(value: float, _: Values) -> float:
    return float(value) if value else 1e9


def _save(values: Values) -> Mapping[str, Any]:
    if values.save_strategy != "steps":
        return {}
    if is_fraction(values.save_steps):
        raise UnsupportedValue("a share of all steps: ROLL counts steps, and saves every ten minutes by itself")
    return {"checkpoint.every_num_steps": max(1, round(values.save_steps / values.updates_per_step(values)))}


def _best(value: bool, _: Values) -> bool:
    return bool(value)


def _report(values: Values) -> Mapping[str, Any]:
    names = values.report_to
    names = [names] if isinstance(names, str) else list(names or ())
    project = str(values.project)
    known = {"wandb": {"tracking.wandb": project}, "swanlab": {"tracking.swanlab": project}, "tensorboard": {}}
    lost = [name for name in names if name not in (*known, "none", "all")]
    if lost:
        raise UnsupportedValue(f"no such tracker: {', '.join(lost)}; metrics.jsonl and TensorBoard are always written")
    return {key: value for name in names for key, value in known.get(name, {}).items()}


def _lora(values: Values) -> Mapping[str, Any]:
    if not values.use_peft:
        return {}
    rank, alpha = int(values.lora_r), float(values.lora_alpha)
    targets = values.lora_target_modules
    lora = {
        "rank": rank,
        "alpha": alpha * math.sqrt(rank) if values.use_rslora else alpha,
        "dropout": float(values.lora_dropout),
        "target_modules": "all-linear" if targets in (["all-linear"], "all-linear") else targets,
    }
    if targets is None:
        lora["target_modules"] = ["q_proj", "v_proj"]
    if values.load_in_4bit and values.bnb_4bit_quant_type == "nf4":
        lora["base"] = "nf4"
    return {f"model.lora.{name}": value for name, value in lora.items()}


_WITH_LORA = ("model.lora",)
_TRAINER: list[Rule] = [
    converted_with(
        "output_dir", None, ["output_dir", "name"], _directory, "its parent; the last part is the name of the run"
    ),
    converted_with("run_name", None, ["name"], _name, "or the last part of output_dir"),
    moved("learning_rate", 5e-5, "training.learning_rate"),
    moved("lr_scheduler_type", "linear", "training.schedule", _schedule),
    unsupported("lr_scheduler_kwargs", None, "schedules have no further arguments"),
    moved("optim", "adamw_torch_fused", "training.optimizer", _optimizer),
    unsupported("optim_args", None, "AdamW has its own keys: training.beta1, beta2, epsilon"),
    unsupported("optim_target_modules", None, "all trained weights have one optimiser"),
    moved("weight_decay", 0.0, "training.weight_decay"),
    moved("adam_beta1", 0.9, "training.beta1"),
    moved("adam_beta2", 0.999, "training.beta2"),
    moved("adam_epsilon", 1e-8, "training.epsilon"),
    moved("max_grad_norm", 1.0, "training.max_grad_norm", _norm, "0, no limit, becomes 1e9"),
    moved("bf16", None, "model.dtype", _dtype, "also where it is not set, as in TRL's own configurations"),
    unsupported("fp16", False, "float16 is not trained in", harmless=(None,)),
    moved("gradient_checkpointing", True, "training.activation_checkpointing", lambda value, _: bool(value)),
    moved("seed", 42, "seed"),
    moved("load_best_model_at_end", False, "checkpoint.keep_best", _best, "kept, not loaded; by eval/score"),
    converted_with("save_steps", 500, ["checkpoint.every_num_steps"], _save, "in steps of ROLL"),
    handled_by("save_strategy", "steps", ["checkpoint.every_num_steps"], "otherwise every ten minutes"),
    moved("save_total_limit", None, "checkpoint.keep_last", lambda value, _: 10**6 if value is None else max(1, value)),
    converted_with(
        "report_to", "none", ["tracking.wandb", "tracking.swanlab"], _report, "TensorBoard is always written"
    ),
    handled_by("project", "huggingface", ["tracking.wandb", "tracking.swanlab"], "with report_to"),
    unsupported("label_smoothing_factor", 0.0, "no label smoothing in the loss of texts"),
    unsupported("neftune_noise_alpha", None, "no noise on embeddings"),
    unsupported("data_seed", None, "one seed decides all"),
    unsupported("batch_eval_metrics", False, "evaluation measures what the pipeline says"),
    unsupported("resume_from_checkpoint", None, "`roll resume RUN` goes on from ROLL's own checkpoints"),
    unsupported("deepspeed", None, "set training.backend: deepspeed and training.deepspeed.zero_stage"),
    unsupported("fsdp", None, "ranks share weights by FSDP2 in any case", harmless=("", [], False, True)),
    unsupported("fsdp_config", None, "ranks share weights by FSDP2 in any case"),
    unsupported("parallelism_config", None, "set training.parallel"),
    unsupported("push_to_hub", False, "`roll export RUN DIR --to-hub OWNER/NAME` uploads"),
    unsupported("auto_find_batch_size", False, "training.max_tokens_per_micro_batch bounds memory, not the batch"),
    unsupported("train_sampling_strategy", "random", "rows come in random order"),
    unsupported("ignore_data_skip", False, "a resumed run goes on where its data stood"),
]

_SPEED = {
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
_RECORDS = {
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
    "prediction_loss_only": False,
    "eval_do_concat_batches": True,
    "eval_use_gather_object": False,
    "eval_accumulation_steps": None,
    "include_for_metrics": [],
    "save_only_model": False,
    "save_on_each_node": False,
    "enable_jit_checkpoint": False,
    "hub_token": None,
    "hub_private_repo": None,
    "hub_model_id": None,
    "hub_strategy": "every_save",
    "hub_always_push": False,
    "hub_revision": None,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "restore_callback_states_from_checkpoint": False,
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
}
_MODEL: list[Rule] = [
    moved("model_name_or_path", None, "model.path"),
    unsupported(
        "model_revision", "main", "a hub id is its newest revision; download another one and name its directory"
    ),
    moved("trust_remote_code", False, "model.trust_remote_code"),
    unsupported("model_init_kwargs", None, "models are loaded as their configuration says"),
    converted_with("use_peft", False, _WITH_LORA, _lora, "without target modules peft's: q_proj and v_proj"),
    *(
        handled_by(key, default, _WITH_LORA, "with use_peft")
        for key, default in (
            ("lora_r", 16),
            ("lora_alpha", 32),
            ("lora_dropout", 0.05),
            ("lora_target_modules", None),
            ("use_rslora", False),
            ("load_in_4bit", False),
        )
    ),
    unsupported("bnb_4bit_quant_type", "nf4", "weights in 4 bits are NF4"),
    unsupported("use_bnb_nested_quant", False, "scales are not quantised again"),
    unsupported("lora_target_parameters", None, "adapters are on modules"),
    unsupported("lora_modules_to_save", None, "nothing but adapters is trained under model.lora"),
    unsupported("lora_task_type", "CAUSAL_LM", "the pipeline says the task"),
    unsupported("use_dora", False, "adapters are plain low-rank ones"),
    unsupported("load_in_8bit", False, "frozen weights are as they are, or in 4 bits (model.lora.base: nf4)"),
    *ignored_all({"dtype": "float32"}, "master weights are always float32"),
    *ignored_all({"attn_implementation": None}, "attention is packed, and chosen by device"),
    *ignored_all({"bnb_4bit_quant_storage": None}, "weights in 4 bits are stored in bytes"),
]
_SCRIPT: list[Rule] = [
    *ignored_all({"dataset_streaming": False, "streaming": False}, "data sets are read from disk as they are needed"),
    *ignored_all({"ignore_bias_buffers": False}, "ranks share weights by FSDP2"),
    unsupported("test_split_size", None, "set data.0.held_out to this share"),
]
COMMON: list[Rule] = [
    *_TRAINER,
    *ignored_all(_SPEED, "changes speed or memory alone; ROLL's own settings are below training"),
    *ignored_all(_RECORDS, "every step is recorded, and the whole state saved"),
    *_MODEL,
    *_SCRIPT,
]
