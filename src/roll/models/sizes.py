"""Checks the sizes in a model's config.json.

The file may come from an untrusted source, and its sizes determine loops and allocations: without a limit, a huge
number of layers could be built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.errors import ModelError, shorten
from roll.models.directory import read_json

__all__ = ["check_sizes", "get_text_config", "get_thinker_config", "read_config"]

_MAX_SIZE = 2**31 - 1
_SIZE_BOUNDS = {
    "num_hidden_layers": (1, 10_000),
    "n_layer": (1, 10_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), (1, 2**20)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (0, 2**20)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 2**20)),
    **dict.fromkeys(("n_shared_experts", "num_labels"), (0, 2**20)),
    **dict.fromkeys(("hidden_size", "n_embd", "vocab_size", "max_position_embeddings", "n_positions"), (1, _MAX_SIZE)),
    **dict.fromkeys(("intermediate_size", "n_inner"), (1, _MAX_SIZE)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, _MAX_SIZE)),
}
"""The allowed range by key, inclusive. Lists, which some model families use, are checked by `transformers`."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model's config.json and check its sizes.

    Raises:
        ModelError: the file cannot be read, or a size is out of range.
    """
    config = read_json(directory / "config.json")
    check_sizes(config, f"'{directory / 'config.json'}'")
    return config


def get_thinker_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of an omni model's thinker, which reads media and generates text; `config` for other
    models."""
    thinker = config.get("thinker_config")
    return thinker if isinstance(thinker, Mapping) and thinker else config


def get_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model: the `text_config` of a multimodal model, otherwise `config` itself."""
    config = get_thinker_config(config)
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def check_sizes(config: Mapping[str, Any], label: str) -> None:
    """Reject sizes that are out of range.

    Args:
        config: The content of config.json.
        label: The file, for messages.

    Raises:
        ModelError: a size is out of range; the message names the key and its value.
    """
    text = get_text_config(config)
    for key, (lower, upper) in _SIZE_BOUNDS.items():
        value = text.get(key, config.get(key))
        if value is None or isinstance(value, list | dict):
            continue
        if type(value) is not int or not lower <= value <= upper:
            raise ModelError(
                f"{key} in {label} must be an integer from {lower} to {upper:,}, got {shorten(value)}: restore the "
                "model's original config.json."
            )
    chosen = text.get("num_experts_per_tok")
    counts = [text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts = next((n for n in counts if isinstance(n, int)), None)
    if isinstance(chosen, int) and experts and experts > 1 and not 1 <= chosen <= experts:
        raise ModelError(
            f"num_experts_per_tok in {label} must be from 1 to the number of experts ({experts}), got {chosen}: "
            "restore the model's original config.json."
        )
