"""Language models: where they come from, what they are, how they are loaded. Imports torch only when weights load."""

from roll.models.catalogue import CATALOGUE, CatalogueEntry
from roll.models.describe import ModelDescription, context_length, describe_model, num_parameters
from roll.models.loading import load_causal_lm, load_scorer, load_tokenizer, pad_token, stop_token_ids
from roll.models.resolve import find_model, find_model_directory, resolve_model

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "ModelDescription",
    "context_length",
    "describe_model",
    "find_model",
    "find_model_directory",
    "load_causal_lm",
    "load_scorer",
    "load_tokenizer",
    "num_parameters",
    "pad_token",
    "resolve_model",
    "stop_token_ids",
]
