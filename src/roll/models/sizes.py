"""Check of the sizes that a model's config.json states.

The file may come from any source, and its sizes are multiplied, looped over and allocated: without a limit, any number
of layers would be built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.errors import ModelError, short
from roll.models.directory import read_json

__all__ = ["check_sizes", "read_config", "text_part"]

_MAX_SIZE = 2**31 - 1
_BOUNDS = {
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
"""The smallest and the largest value by key; lists, which some families use, are checked by `transformers`."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model's config.json and check that its sizes are possible.

    Raises:
        ModelError: the file cannot be read, or states an impossible size.
    """
    config = read_json(directory / "config.json")
    check_sizes(config, f"'{directory / 'config.json'}'")
    return config


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model: all of it, or its `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Reject impossible sizes.

    Args:
        config: The content of config.json.
        where: The file, for messages.

    Raises:
        ModelError: names the key and its value.
    """
    text = text_part(config)
    for key, (least, most) in _BOUNDS.items():
        value = text.get(key, config.get(key))
        if value is None or isinstance(value, list | dict):
            continue
        if type(value) is not int or not least <= value <= most:
            raise ModelError(
                f"{where} has {key}: {short(value)}, but it must be an integer from {least} to {most:,}: copy the "
                "file again."
            )
    chosen = text.get("num_experts_per_tok")
    counts = [text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    experts = next((n for n in counts if isinstance(n, int)), None)
    if isinstance(chosen, int) and experts and experts > 1 and not 1 <= chosen <= experts:
        raise ModelError(
            f"{where} has num_experts_per_tok: {chosen}, but it must be from 1 to the number of experts, {experts}: "
            "copy the file again."
        )
