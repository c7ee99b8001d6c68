"""Keys of TRL 1.16's `SFTConfig`, `DPOConfig` and `RewardConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from roll.cli.migration.trl_common import COMMON, per_update
from roll.cli.migration.trl_data import data_rules, length_rules

__all__ = ["DPO", "REWARD", "SFT", "steps"]

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


def steps(values: Values) -> int | None:
    """Return the number of steps of the whole run, if it is known without the data."""
    if values.max_steps > 0:
        return int(values.max_steps)
    if values.rows is None:
        return None
    return math.ceil(int(values.rows) / per_update(values)) * math.ceil(values.num_train_epochs)


def _epochs(value: float, values: Values) -> float | None:
    return None if values.max_steps > 0 else float(value)


def _loss(values: Values) -> Mapping[str, Any]:
    kinds = values.loss_type
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = values.loss_weights or [1.0] * len(kinds)
    found: dict[str, Any] = {"beta": float(values.beta)}
    main, weight = kinds[0], float(weights[0])
    if len(kinds) == 2 and kinds[1] == "sft" and weight == 1:
        found["likelihood"] = float(weights[1])
    elif len(kinds) > 1 or weight != 1:
        raise UnsupportedValue(
            "a weighted sum of losses, except for `sft` with one other loss; the file has DPO's loss"
        )
    if main not in _METHODS:
        raise UnsupportedValue(f"loss_type {main} is not among {', '.join(_METHODS)}; the file has DPO's loss")
    if main in ("robust", "exo_pair"):
        if not values.label_smoothing and main == "exo_pair":
            raise UnsupportedValue("exo_pair without label_smoothing; the file has DPO's loss")
        found["label_smoothing"] = float(values.label_smoothing)
    if main == "discopop":
        found["tau"] = float(values.discopop_tau)
    found["type"] = _METHODS[main]
    return {f"preference.{name}": value for name, value in found.items()}


def _data(values: Values) -> Mapping[str, Any]:
    return {"too_long": "cut"} if values.max_length is not None else {}


def _sft_data(values: Values) -> Mapping[str, Any]:
    column = values.dataset_text_field
    return {**_data(values), **({"text_key": column} if column != "text" else {})}


def _sft_loss(values: Values) -> Mapping[str, Any]:
    if values.loss_type not in ("nll", "chunked_nll"):
        raise UnsupportedValue(
            f"loss_type {values['loss_type']}: the loss of texts is the mean negative log-likelihood"
        )
    return {}


def _assistant(values: Values) -> Mapping[str, Any]:
    if not values.assistant_only_loss:
        raise UnsupportedValue(
            "of rows with `messages` ROLL learns what the assistant wrote, TRL every token; of other rows both "
            "learn the same"
        )
    return {}


def _all_tokens(values: Values) -> Mapping[str, Any]:
    if values.completion_only_loss is False:
        raise UnsupportedValue("prompts are not trained; give rows as `text` to learn every token")
    return {}


_EXAMPLES: list[Rule] = [
    moved(
        "per_device_train_batch_size",
        8,
        "training.examples_per_step",
        lambda _, values: per_update(values),
        "x processes x gradient_accumulation_steps",
    ),
    handled_by("gradient_accumulation_steps", 1, ["training.examples_per_step"], "with per_device_train_batch_size"),
    moved("max_steps", -1, "training.num_steps", lambda value, _: max(0, int(value))),
    moved("num_train_epochs", 3.0, "training.num_epochs", _epochs, "where max_steps is not set"),
    moved("max_length", 1024, "training.max_example_tokens", note="longer ones are cut: data.0.too_long"),
    moved("router_aux_loss_coef", None, "training.router_aux_loss", lambda value, _: float(value or 0.0)),
    unsupported("truncation_mode", "keep_start", "the end of what is too long is cut"),
    unsupported("pad_token", None, "nothing is padded", harmless=("<pad>",)),
    *length_rules(),
    *ignored_all(
        {"dataset_num_proc": None, "padding_free": False, "pad_to_multiple_of": "auto", "activation_offloading": False},
        "rows are packed without padding, and never see one another",
    ),
    *COMMON,
]

SFT: list[Rule] = [
    converted_with("loss_type", "nll", [], _sft_loss, "the same loss"),
    converted_with("assistant_only_loss", False, [], _assistant, "what ROLL does"),
    converted_with("completion_only_loss", None, [], _all_tokens, "what ROLL does with a prompt and its completion"),
    handled_by("dataset_text_field", "text", ["data"], "with dataset_name: data.0.text_key"),
    *data_rules(_sft_data),
    unsupported("packing", False, "a step has a fixed number of examples; they are packed without changing the result"),
    unsupported("chat_template_path", None, "put the template into the model's directory"),
    unsupported("dataset_kwargs", None, "rows are read as docs/examples.md says"),
    unsupported("eos_token", None, "the tokenizer's, and the chat template's end of a message"),
    *ignored_all({"packing_strategy": "bfd", "eval_packing": None}, "packing never changes the loss"),
    *ignored_all({"shuffle_dataset": False}, "rows always come in random order"),
    *_EXAMPLES,
]

_PREFERENCE = ("preference.type", "preference.beta", "preference.label_smoothing")
DPO: list[Rule] = [
    converted_with("loss_type", ["sigmoid"], _PREFERENCE, _loss, "`sft` with one other loss is preference.likelihood"),
    *(
        handled_by(key, default, _PREFERENCE, "with loss_type")
        for key, default in (
            ("beta", 0.1),
            ("loss_weights", None),
            ("label_smoothing", 0.0),
            ("discopop_tau", 0.05),
        )
    ),
    *data_rules(_data),
    unsupported("ld_alpha", None, "all tokens of an answer count alike"),
    unsupported("f_divergence_type", "reverse_kl", "log-ratios are those of the reverse divergence"),
    unsupported("use_weighting", False, "pairs count alike (WPO)"),
    unsupported("sync_ref_model", False, "the reference is the first policy throughout"),
    *ignored_all(
        {"f_alpha_divergence_coef": 0.5, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512},
        "means nothing without another key that ROLL lacks",
    ),
    *ignored_all(
        {"precompute_ref_log_probs": False, "precompute_ref_batch_size": None},
        "the reference is asked once for each example, before the first step",
    ),
    *ignored_all({"disable_dropout": True}, "models have no dropout but that of adapters (model.lora.dropout)"),
    *_EXAMPLES,
]


def _scored(values: Values) -> Mapping[str, Any]:
    return {"too_long": "skip"} if values.max_length is not None else {}


_NOT_OF_REWARD = ("max_length", "padding_free", "router_aux_loss_coef", "truncation_mode")
REWARD: list[Rule] = [
    moved("center_rewards_coefficient", None, "reward_model.centering", lambda value, _: float(value or 0.0)),
    moved(
        "max_length", 1024, "training.max_example_tokens", note="pairs with a longer text are left out: data.0.too_long"
    ),
    *data_rules(_scored),
    unsupported("chat_template_path", None, "put the template into the model's directory"),
    unsupported("eos_token", None, "the tokenizer's, and the chat template's end of a message"),
    *ignored_all({"disable_dropout": True}, "models have no dropout but that of adapters (model.lora.dropout)"),
    *(rule for rule in _EXAMPLES if rule.key not in _NOT_OF_REWARD),
]
