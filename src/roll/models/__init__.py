"""Language models: finding, describing and loading them. Imports torch only when weights are loaded."""

from roll.models.attention_params import (
    AttentionParams,
    AttentionSpan,
    compute_position_scale,
    read_attention_params,
    read_mask_span,
)
from roll.models.catalogue import CATALOGUE, CatalogueEntry
from roll.models.checkpoint_names import has_renamed_weights, to_checkpoint_tensors
from roll.models.config_only import count_kv_elements_per_token, describe_config, find_config
from roll.models.describe import (
    ModelDescription,
    check_experts,
    check_quantizable,
    check_rope_scaling,
    count_parameters,
    describe_model,
    read_context_length,
    read_rope_scaling_length,
)
from roll.models.finite_check import check_stored_finite
from roll.models.heads import check_can_generate
from roll.models.linear import find_adapted_layers, list_adapted_layers, list_linear_weights
from roll.models.loading import (
    choose_pad_token,
    find_stop_token_ids,
    load_causal_lm,
    load_scorer,
    load_tokenizer,
    set_attention,
)
from roll.models.mixers import find_mixers, get_decoder, get_hidden_states
from roll.models.resolve import find_model, find_model_directory, resolve_model
from roll.models.routers import find_routers, read_router_output
from roll.models.sizes import read_config
from roll.models.transformers4_compat import write_transformers4_settings
from roll.models.weight_reader import WeightReader

__all__ = [
    "CATALOGUE",
    "AttentionParams",
    "AttentionSpan",
    "CatalogueEntry",
    "ModelDescription",
    "WeightReader",
    "check_can_generate",
    "check_experts",
    "check_quantizable",
    "check_rope_scaling",
    "check_stored_finite",
    "choose_pad_token",
    "compute_position_scale",
    "count_kv_elements_per_token",
    "count_parameters",
    "describe_config",
    "describe_model",
    "find_adapted_layers",
    "find_config",
    "find_mixers",
    "find_model",
    "find_model_directory",
    "find_routers",
    "find_stop_token_ids",
    "get_decoder",
    "get_hidden_states",
    "has_renamed_weights",
    "list_adapted_layers",
    "list_linear_weights",
    "load_causal_lm",
    "load_scorer",
    "load_tokenizer",
    "read_attention_params",
    "read_config",
    "read_context_length",
    "read_mask_span",
    "read_rope_scaling_length",
    "read_router_output",
    "resolve_model",
    "set_attention",
    "to_checkpoint_tensors",
    "write_transformers4_settings",
]
