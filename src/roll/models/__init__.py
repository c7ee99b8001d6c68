"""Language models: sources, descriptions and loading. Imports torch only when weights are loaded."""

from roll.models.attention_form import AttentionForm, AttentionSpan, attention_form, position_scale, read_mask_span
from roll.models.catalogue import CATALOGUE, CatalogueEntry
from roll.models.checkpoint_names import changes_names, to_checkpoint_tensors
from roll.models.config_only import describe_config, find_config, kv_numbers_per_token
from roll.models.describe import (
    ModelDescription,
    check_experts,
    check_linear,
    check_rope_scaling,
    context_length,
    describe_model,
    num_parameters,
    rope_scaling_length,
)
from roll.models.finite_check import check_stored_finite
from roll.models.heads import check_generates
from roll.models.linear import linear_weights
from roll.models.loading import load_causal_lm, load_scorer, load_tokenizer, pad_token, stop_token_ids
from roll.models.mixers import decoder_of, find_mixers, first_tensor
from roll.models.resolve import find_model, find_model_directory, resolve_model
from roll.models.routers import chosen_experts, find_routers
from roll.models.sizes import read_config
from roll.models.transformers4_compat import write_transformers4_settings
from roll.models.weight_reader import WeightReader

__all__ = [
    "CATALOGUE",
    "AttentionForm",
    "AttentionSpan",
    "CatalogueEntry",
    "ModelDescription",
    "WeightReader",
    "attention_form",
    "changes_names",
    "check_experts",
    "check_generates",
    "check_linear",
    "check_rope_scaling",
    "check_stored_finite",
    "chosen_experts",
    "context_length",
    "decoder_of",
    "describe_config",
    "describe_model",
    "find_config",
    "find_mixers",
    "find_model",
    "find_model_directory",
    "find_routers",
    "first_tensor",
    "kv_numbers_per_token",
    "linear_weights",
    "load_causal_lm",
    "load_scorer",
    "load_tokenizer",
    "num_parameters",
    "pad_token",
    "position_scale",
    "read_config",
    "read_mask_span",
    "resolve_model",
    "rope_scaling_length",
    "stop_token_ids",
    "to_checkpoint_tensors",
    "write_transformers4_settings",
]
