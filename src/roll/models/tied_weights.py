"""The rule for tied embeddings: a stored projection must equal the embeddings, otherwise the model is rejected.

Files often contain both, although config.json ties them. The loaded weights would then depend on the reader and, in
`transformers`, on whether weights are read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.errors import ModelError

__all__ = ["check_tied", "tied_copy", "tied_weights_error"]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embedding.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight")


def check_tied(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Reject a model whose config.json ties the projection to the embeddings while its files hold different ones.

    Args:
        directory: The directory of the model.
        config: The content of its config.json.
        tensors: The tensors in its files, by name: each has `file`, `dtype` and `shape`.

    Raises:
        ModelError: the two differ.
    """
    if (pair := tied_copy(config, tensors)) is None:
        return
    a, b = (tensors[name] for name in pair)
    if a.shape != b.shape or not _equal(a.file, pair[0], b.file, pair[1]):
        raise tied_weights_error(str(directory), *pair)


def tied_copy(config: Mapping[str, Any], tensors: Collection[str]) -> tuple[str, str] | None:
    """Return the names of a stored projection and of the embeddings that it is tied to; `None` if there is no such
    pair.

    If parts of a configuration disagree, the model's class decides when it is loaded: the result is `None` then too.
    """
    projections, embeddings = ([n for n in tensors if n.endswith(ends)] for ends in (PROJECTIONS, EMBEDDINGS))
    if len(projections) != 1 or len(embeddings) != 1 or not all(_ties(config)):
        return None
    return projections[0], embeddings[0]


def _ties(config: Mapping[str, Any]) -> Iterator[bool]:
    """Yield whether each part of a configuration ties, from its setting or its class's default."""
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        said = part.get("tie_word_embeddings")
        if said is None:
            from transformers import CONFIG_MAPPING

            kind = str(part.get("model_type"))
            said = kind in CONFIG_MAPPING and getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", False)
        yield bool(said)


def _equal(file: Path, name: str, other_file: Path, other: str) -> bool:
    from safetensors import safe_open
    from torch import equal, promote_types

    with safe_open(file, framework="pt") as first, safe_open(other_file, framework="pt") as second:
        a, b = first.get_tensor(name), second.get_tensor(other)
        wider = promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
        return equal(a.to(wider), b.to(wider))


def tied_weights_error(path: str, name: str, other: str) -> ModelError:
    """Return the error for two tied weights with different values."""
    return ModelError(
        f"model '{path}' ties its weights '{name}' and '{other}' (tie_word_embeddings), but its files hold different "
        f"values for them. To train them separately, set tie_word_embeddings to false in its config.json; if '{name}' "
        "is a leftover, remove it from the files."
    )
