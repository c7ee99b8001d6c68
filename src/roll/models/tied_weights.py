"""Checks tied embeddings: if the files also contain the output projection, it must equal the embeddings.

Files often contain both, although config.json ties them. If they differed, the loaded weights would depend on the
library and, in `transformers`, on whether all weights are read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.errors import ModelError

__all__ = ["build_tied_weights_error", "check_tied_weights", "find_tied_copy"]

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embedding.weight")
OUTPUT_PROJECTION_NAMES = ("lm_head.weight", "embed_out.weight")


def check_tied_weights(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Reject a model whose config.json ties projection and embeddings, but whose files contain different values.

    Args:
        directory: The directory of the model.
        config: The content of its config.json.
        tensors: The tensors in its files, by name: each has `file`, `dtype` and `shape`.

    Raises:
        ModelError: projection and embeddings differ.
    """
    if (pair := find_tied_copy(config, tensors)) is None:
        return
    a, b = (tensors[name] for name in pair)
    if a.shape != b.shape or not _are_equal(a.file, pair[0], b.file, pair[1]):
        raise build_tied_weights_error(str(directory), *pair)


def find_tied_copy(config: Mapping[str, Any], tensors: Collection[str]) -> tuple[str, str] | None:
    """Return the names of a stored projection and of the embeddings that it is tied to; `None` if there is none.

    The result is also `None` if only some parts of the configuration tie weights, because the model's class then
    decides during loading.
    """
    projections, embeddings = (
        [n for n in tensors if n.endswith(ends)] for ends in (OUTPUT_PROJECTION_NAMES, EMBEDDING_NAMES)
    )
    embeddings = [name for name in embeddings if not name.endswith("position_embedding.weight")]  # of vision towers
    if len(projections) != 1 or len(embeddings) != 1 or not all(_iter_tie_settings(config)):
        return None
    return projections[0], embeddings[0]


def _iter_tie_settings(config: Mapping[str, Any]) -> Iterator[bool]:
    """Yield one flag per part of a configuration: whether the part ties embeddings, explicitly or by class default."""
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        setting = part.get("tie_word_embeddings")
        if setting is None:
            from transformers import CONFIG_MAPPING

            kind = str(part.get("model_type"))
            setting = kind in CONFIG_MAPPING and getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", False)
        yield bool(setting)


def _are_equal(file: Path, name: str, other_file: Path, other_name: str) -> bool:
    from safetensors import safe_open
    from torch import equal, promote_types

    with safe_open(file, framework="pt") as first, safe_open(other_file, framework="pt") as second:
        a, b = first.get_tensor(name), second.get_tensor(other_name)
        wider = promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
        return equal(a.to(wider), b.to(wider))


def build_tied_weights_error(path: str, name: str, tied_name: str) -> ModelError:
    """Return the error for two tied weights with different values."""
    return ModelError(
        f"model '{path}' ties its weights '{name}' and '{tied_name}' (tie_word_embeddings), but its files contain "
        f"different values for them. To train them separately, set tie_word_embeddings to false in its config.json; "
        f"if '{name}' is a leftover, remove it from the files."
    )
