"""Language models: sources, descriptions and loading. Imports torch only when weights are loaded."""

from roll.models.attention_form import AttentionForm, Reach, attention_form, position_scale, reach_mask
from roll.models.catalogue import CATALOGUE, CatalogueEntry
from roll.models.checkpoint_names import as_in_checkpoint, changes_names
from roll.models.config_only import cache_width, describe_config, find_config
from roll.models.describe import (
    ModelDescription,
    check_experts,
    check_linear,
    check_rotation,
    context_length,
    describe_model,
    num_parameters,
    rotation_length,
)
from roll.models.heads import check_generates
from roll.models.linear import linear_weights
from roll.models.loading import load_causal_lm, load_scorer, load_tokenizer, pad_token, stop_token_ids
from roll.models.mixers import decoder_of, find_mixers, first_tensor
from roll.models.older_spellings import write_older_spellings
from roll.models.pieces import WeightFiles
from roll.models.resolve import find_model, find_model_directory, resolve_model
from roll.models.routers import chosen_experts, find_routers
from roll.models.sizes import read_config
from roll.models.values import check_stored_finite

__all__ = [
    "CATALOGUE",
    "AttentionForm",
    "CatalogueEntry",
    "ModelDescription",
    "Reach",
    "WeightFiles",
    "as_in_checkpoint",
    "attention_form",
    "cache_width",
    "changes_names",
    "check_experts",
    "check_generates",
    "check_linear",
    "check_rotation",
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
    "linear_weights",
    "load_causal_lm",
    "load_scorer",
    "load_tokenizer",
    "num_parameters",
    "pad_token",
    "position_scale",
    "reach_mask",
    "read_config",
    "resolve_model",
    "rotation_length",
    "stop_token_ids",
    "write_older_spellings",
]
