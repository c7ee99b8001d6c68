"""Sizes of models, by name or from a YAML file in the format of `models.yaml`; the devices of `roll.config.devices`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import model_validator

from roll.config.base import Section, expand_path, option
from roll.config.devices import Device, MeasuredEngine, load_device, load_entry, read_shipped_entries
from roll.errors import ModelError
from roll.models import (
    CATALOGUE,
    ModelDescription,
    count_kv_elements_per_token,
    describe_config,
    describe_model,
    find_config,
)

__all__ = ["MODELS_FILE", "Device", "MeasuredEngine", "Model", "is_known_model", "load_device", "load_model_sizes"]

MODELS_FILE = Path(__file__).parent / "models.yaml"
"""File of the known models, which is part of ROLL."""
MODEL_SOURCES = ", a config.json, a model directory or a Hub ID (owner/name)"


class Tower(Section):
    """Sizes of the vision tower of a model, and of its projector."""

    num_parameters: int = option(..., "Number of weights of the tower.", gt=0)
    projector_parameters: int = option(..., "Number of weights of the projector.", ge=0)
    num_layers: int = option(..., "Number of layers.", gt=0)
    hidden_size: int = option(..., "Width between layers.", gt=0)
    intermediate_size: int = option(..., "Width inside the MLP.", gt=0)
    patch_width: int = option(..., "Number of pixel values of a patch.", ge=0)
    patches_per_token: float = option(..., "Number of patches that become one token of the language model.", gt=0)
    output_size: int = option(..., "Width of the language model.", gt=0)
    num_projectors: int = option(1, "Number of projectors.", gt=0)
    has_gates: bool = option(False, "Whether the MLPs are gated.")
    hidden_vectors: int = option(8, "Number of vectors of the tower's width that a layer keeps for each patch.", gt=0)
    inner_vectors: int = option(2, "Number of vectors of the MLP's width that a layer keeps for each patch.", gt=0)


class Model(Section):
    """Sizes of a decoder."""

    name: str = option(..., "Name of the model.")
    parameters: float = option(..., "Number of all parameters.", gt=0)
    active_parameters: float = option(
        ..., "Number of parameters that a token uses: fewer than all for a mixture of experts; by default all.", gt=0
    )
    num_layers: int = option(..., "Number of layers.", gt=0)
    hidden_size: int = option(..., "Width of the hidden state between layers.", gt=0)
    intermediate_size: int = option(
        ..., "Width inside the MLP; for a mixture of experts, the sum over the active experts.", gt=0
    )
    vocab_size: int = option(..., "Number of tokens in the vocabulary.", gt=0)
    num_heads: int = option(..., "Number of query heads.", gt=0)
    num_kv_heads: int = option(..., "Number of key and value heads.", gt=0)
    head_dim: int = option(..., "Width of a head.", gt=0)
    element_bytes: int = option(2, "Size of a weight.", unit="bytes", gt=0)
    num_experts: int = option(0, "Number of experts in a layer; 0 for a dense model.", ge=0)
    experts_per_token: int = option(0, "Number of experts that the router chooses for each token.", ge=0)
    expert_parameters: int = option(0, "Number of parameters of all experts in all layers.", ge=0)
    cache_width: int | None = option(
        None,
        "Numbers that an engine caches for a token, over all layers; by default keys and values of every head in "
        "every layer. Fewer with multi-head latent attention or with linear attention.",
        gt=0,
    )
    has_untied_lm_head: bool = option(
        True, "Whether the vocabulary projection has separate weights (untied embeddings)."
    )
    tower: Tower | None = option(
        None, "The vision tower, whose weights `parameters` includes; `null` for a model that reads only text."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_active_parameters(cls, values: Any) -> Any:
        return {"active_parameters": values["parameters"]} | values if "parameters" in values else values

    @model_validator(mode="after")
    def _check_experts(self) -> Model:
        given = (self.num_experts > 0, self.experts_per_token > 0, self.expert_parameters > 0)
        if any(given) and not all(given):
            raise ValueError("num_experts, experts_per_token and expert_parameters must be set together")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} must be at most num_experts {self.num_experts}"
            )
        if self.expert_parameters > self.parameters:
            raise ValueError(
                f"expert_parameters {self.expert_parameters:g} must be at most parameters {self.parameters:g}"
            )
        return self

    @property
    def num_parameters(self) -> int:
        """Number of parameters; an alias of `parameters`, for code that takes `roll.config.estimate.ModelSizes`."""
        return round(self.parameters)

    @property
    def norm_width(self) -> int:
        """Total width of the two norms in a layer."""
        return 2 * self.hidden_size

    @property
    def has_fusable_norms(self) -> bool:
        """Always true: norms are assumed to be fusable, like Llama's."""
        return True

    @property
    def has_fusable_gates(self) -> bool:
        """Always true: gates are assumed to be fusable, like Llama's."""
        return True

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.element_bytes

    @property
    def linear_parameters(self) -> float:
        """Number of parameters of linear layers, including all experts."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        met = self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)
        return min(met + self.parameters - self.active_parameters, self.parameters)

    @property
    def active_bytes(self) -> float:
        """Bytes of the weights that are read to decode one token."""
        return self.active_parameters * self.element_bytes

    @property
    def active_expert_fraction(self) -> float:
        """Fraction of a layer's experts that one token passes through; 1 for a dense model."""
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache bytes of one token over all layers."""
        if self.cache_width is not None:
            return self.cache_width * self.element_bytes
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def query_size(self) -> int:
        """Total width of the queries of all heads."""
        return self.num_heads * self.head_dim


def is_known_model(name: str) -> bool:
    """Return whether `models.yaml` has the sizes of a model."""
    return name in read_shipped_entries(MODELS_FILE)


def load_model_sizes(name: str) -> Model:
    """Return the sizes of a model.

    Args:
        name: A known name, a YAML file that describes a model, a config.json, a model directory, or a hub id.

    Raises:
        ConfigError: No model or file has this name, or a size is missing or is not a positive number.
        ModelError: The config.json cannot be found or read.
    """
    try:
        path = Path(expand_path(name))
    except ValueError as error:
        raise ModelError(f"model {error}.") from None
    file = path / "config.json" if path.is_dir() else path
    return _read_model(name, file.stat().st_mtime_ns if file.is_file() else 0)


@functools.lru_cache(maxsize=64)
def _read_model(name: str, changed_at: int) -> Model:
    """Return the sizes of a model; results are cached by name and by `changed_at`, the file's modification time."""
    if is_known_model(name) or Path(name).suffix in {".yaml", ".yml"}:
        return load_entry(Model, "model", name, MODELS_FILE, MODEL_SOURCES)
    if "/" not in name and name not in CATALOGUE and not Path(name).exists():
        return load_entry(Model, "model", name, MODELS_FILE, MODEL_SOURCES)  # raises with the known names
    if name in CATALOGUE:
        return _build_model(name, describe_model(name), None)
    directory = find_config(name)
    has_weights = any(directory.glob("*.safetensors"))
    description = describe_model(directory) if has_weights else describe_config(directory, name)
    return _build_model(name, description, count_kv_elements_per_token(directory, description))


def _build_model(name: str, description: ModelDescription, width: int | None) -> Model:
    if description.expert_parameters and not 1 <= description.experts_per_token <= description.num_experts:
        raise ModelError(
            f"model '{name}' has experts, but its config.json does not contain their number, or the number per "
            "token: add these keys (num_experts or num_local_experts, num_experts_per_tok)."
        )
    chosen = description.experts_per_token / description.num_experts if description.expert_parameters else 1.0
    return Model(
        name=name,
        parameters=description.num_parameters,
        active_parameters=description.num_parameters - (1 - chosen) * description.expert_parameters,
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        intermediate_size=description.intermediate_size,
        vocab_size=description.vocab_size,
        num_heads=description.num_heads,
        num_kv_heads=description.num_kv_heads,
        head_dim=description.head_dim,
        num_experts=description.num_experts if description.expert_parameters else 0,
        experts_per_token=description.experts_per_token if description.expert_parameters else 0,
        expert_parameters=description.expert_parameters,
        cache_width=width,
        has_untied_lm_head=description.has_untied_lm_head,
        tower=None if description.tower is None else Tower(**asdict(description.tower)),
    )
