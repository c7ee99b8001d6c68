"""Keys of TRL 1.16's `SFTConfig`, `DPOConfig` and `RewardConfig`."""

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
from roll.cli.migration.trl_common import COMMON_RULES, count_update_rows
from roll.cli.migration.trl_data import build_data_rules, build_step_rules

__all__ = ["DPO_RULES", "REWARD_MODEL_RULES", "SFT_RULES", "count_steps"]

_METHODS = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo_norm",
    "robust": "robust",
    "ipo": "ipo",
    "hinge": "hinge",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "sppo_hard": "sppo",
    "apo_zero": "apo_zero",
    "apo_down": "apo_down",
    "discopop": "discopop",
}


def count_steps(values: LibraryValues) -> int | None:
    """Return the number of steps of the whole run, or `None` if it depends on an unknown number of rows."""
    if values.max_steps > 0:
        return int(values.max_steps)
    if values.rows is None:
        return None
    return math.ceil(int(values.rows) / count_update_rows(values)) * math.ceil(values.num_train_epochs)


def _convert_epochs(value: float, values: LibraryValues) -> float | None:
    return None if values.max_steps > 0 else float(value)


def _convert_loss(values: LibraryValues) -> Mapping[str, Any]:
    kinds = values.loss_type
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = values.loss_weights or [1.0] * len(kinds)
    found: dict[str, Any] = {"beta": float(values.beta)}
    main, weight = kinds[0], float(weights[0])
    if len(kinds) == 2 and kinds[1] == "sft" and weight == 1:
        found["likelihood"] = float(weights[1])
    elif len(kinds) > 1 or weight != 1:
        raise UnsupportedValueError(
            "a weighted sum of losses is supported only for `sft` and one other loss; the converted file has DPO's loss"
        )
    if main not in _METHODS:
        raise UnsupportedValueError(
            f"loss_type {main} is not supported (supported: {', '.join(_METHODS)}); the converted file has DPO's loss"
        )
    if main in ("robust", "exo_pair"):
        if not values.label_smoothing and main == "exo_pair":
            raise UnsupportedValueError("exo_pair requires label_smoothing; the converted file has DPO's loss")
        found["label_smoothing"] = float(values.label_smoothing)
    if main == "discopop":
        found["tau"] = float(values.discopop_tau)
    found["type"] = _METHODS[main]
    return {f"preference.{name}": value for name, value in found.items()}


def _convert_data(values: LibraryValues) -> Mapping[str, Any]:
    return {"too_long": "cut"} if values.max_length is not None else {}


def _convert_sft_data(values: LibraryValues) -> Mapping[str, Any]:
    column = values.dataset_text_field
    return {**_convert_data(values), **({"text_key": column} if column != "text" else {})}


def _convert_sft_loss(values: LibraryValues) -> Mapping[str, Any]:
    if values.loss_type not in ("nll", "chunked_nll"):
        raise UnsupportedValueError(
            f"loss_type {values['loss_type']} is not supported: ROLL's SFT loss is the mean negative log-likelihood"
        )
    return {}


def _convert_assistant_only(values: LibraryValues) -> Mapping[str, Any]:
    if not values.assistant_only_loss:
        raise UnsupportedValueError(
            "for rows with `messages`, ROLL trains on the assistant's messages and TRL on every token; other rows are "
            "trained in the same way"
        )
    return {}


def _convert_completion_only(values: LibraryValues) -> Mapping[str, Any]:
    if values.completion_only_loss is False:
        raise UnsupportedValueError("ROLL does not train on prompts; use rows with `text` to train on every token")
    return {}


_DATASET_RULES: list[Rule] = [
    renamed_key_rule(
        "per_device_train_batch_size",
        8,
        "training.examples_per_step",
        lambda _, values: count_update_rows(values),
        "times processes x gradient_accumulation_steps",
    ),
    companion_rule(
        "gradient_accumulation_steps", 1, ["training.examples_per_step"], "with per_device_train_batch_size"
    ),
    renamed_key_rule("max_steps", -1, "training.num_steps", lambda value, _: max(0, int(value))),
    renamed_key_rule("num_train_epochs", 3.0, "training.num_epochs", _convert_epochs, "if max_steps is not set"),
    renamed_key_rule(
        "max_length", 1024, "training.max_example_tokens", note="longer examples are truncated: data.0.too_long"
    ),
    renamed_key_rule("router_aux_loss_coef", None, "training.router_aux_loss", lambda value, _: float(value or 0.0)),
    unsupported_key_rule("truncation_mode", "keep_start", "the end of a long example is truncated"),
    unsupported_key_rule("pad_token", None, "sequences are packed without padding", equivalent_values=("<pad>",)),
    *build_step_rules(),
    *ignored_key_rules(
        {"dataset_num_proc": None, "padding_free": False, "pad_to_multiple_of": "auto"},
        "rows are packed without padding, and attention does not cross their borders",
    ),
    *ignored_key_rules({"activation_offloading": False}, "affects only memory; see training.offload_activations"),
    *COMMON_RULES,
]

SFT_RULES: list[Rule] = [
    conversion_rule("loss_type", "nll", [], _convert_sft_loss, "the same loss"),
    conversion_rule("assistant_only_loss", False, [], _convert_assistant_only, "ROLL always does this"),
    conversion_rule(
        "completion_only_loss", None, [], _convert_completion_only, "ROLL always does this for prompts and completions"
    ),
    companion_rule("dataset_text_field", "text", ["data"], "with dataset_name: data.0.text_key"),
    *build_data_rules(_convert_sft_data),
    unsupported_key_rule(
        "packing", False, "a step has a fixed number of examples; they are packed without changing the result"
    ),
    unsupported_key_rule("chat_template_path", None, "put the template into the model's directory"),
    unsupported_key_rule("dataset_kwargs", None, "docs/data-formats.md describes the formats of rows"),
    unsupported_key_rule("eos_token", None, "the tokenizer and the chat template determine the end token"),
    *ignored_key_rules({"packing_strategy": "bfd", "eval_packing": None}, "packing never changes the loss"),
    *ignored_key_rules({"shuffle_dataset": False}, "rows always come in random order"),
    *_DATASET_RULES,
]

_PREFERENCE_KEYS = ("preference.type", "preference.beta", "preference.label_smoothing")
DPO_RULES: list[Rule] = [
    conversion_rule(
        "loss_type", ["sigmoid"], _PREFERENCE_KEYS, _convert_loss, "`sft` with one other loss is preference.likelihood"
    ),
    *(
        companion_rule(key, default, _PREFERENCE_KEYS, "with loss_type")
        for key, default in (
            ("beta", 0.1),
            ("loss_weights", None),
            ("label_smoothing", 0.0),
            ("discopop_tau", 0.05),
        )
    ),
    *build_data_rules(_convert_data),
    unsupported_key_rule("ld_alpha", None, "all tokens of an answer have the same weight"),
    unsupported_key_rule("f_divergence_type", "reverse_kl", "the only divergence is the reverse KL"),
    unsupported_key_rule("use_weighting", False, "all pairs have the same weight (no WPO)"),
    unsupported_key_rule("sync_ref_model", False, "the reference is always the initial policy"),
    *ignored_key_rules(
        {"f_alpha_divergence_coef": 0.5, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512},
        "has no effect without another key that ROLL does not support",
    ),
    *ignored_key_rules(
        {"precompute_ref_log_probs": False, "precompute_ref_batch_size": None},
        "the reference computes log-probs once for each example, before the first step",
    ),
    *ignored_key_rules({"disable_dropout": True}, "only adapters have dropout (model.lora.dropout)"),
    *_DATASET_RULES,
]


def _convert_max_length(values: LibraryValues) -> Mapping[str, Any]:
    return {"too_long": "skip"} if values.max_length is not None else {}


_NOT_REWARD_MODEL_KEYS = ("max_length", "padding_free", "router_aux_loss_coef", "truncation_mode")
REWARD_MODEL_RULES: list[Rule] = [
    renamed_key_rule(
        "center_rewards_coefficient", None, "reward_model.centering", lambda value, _: float(value or 0.0)
    ),
    renamed_key_rule(
        "max_length", 1024, "training.max_example_tokens", note="pairs with longer answers are skipped: data.0.too_long"
    ),
    *build_data_rules(_convert_max_length),
    unsupported_key_rule("chat_template_path", None, "put the template into the model's directory"),
    unsupported_key_rule("eos_token", None, "the tokenizer and the chat template determine the end token"),
    *ignored_key_rules({"disable_dropout": True}, "only adapters have dropout (model.lora.dropout)"),
    *(rule for rule in _DATASET_RULES if rule.key not in _NOT_REWARD_MODEL_KEYS),
]
