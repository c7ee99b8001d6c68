"""The rule for tied embeddings: a stored projection is tied where it equals the embeddings, and else refused.

Files often hold both, although config.json says that they are one. What is then loaded would depend on the reader and,
in `transformers`, on whether weights are read at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.errors import ModelError

if TYPE_CHECKING:
    from roll.models.pieces import WeightFiles

__all__ = ["check_tied", "tie", "tied_copy"]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embedding.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight")


def check_tied(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Refuse a model whose config.json ties the projection to the embeddings, and whose files hold different ones.

    Args:
        directory: of the model.
        config: what its config.json holds.
        tensors: what its files hold, by name: each has `file`, `dtype` and `shape`.

    Raises:
        ModelError: they differ.
    """
    if (pair := tied_copy(config, tensors)) is None:
        return
    a, b = (tensors[name] for name in pair)
    if a.shape != b.shape or not _equal(a.file, pair[0], b.file, pair[1]):
        raise _differ(str(directory), *pair)


def tied_copy(config: Mapping[str, Any], tensors: Collection[str]) -> tuple[str, str] | None:
    """Return the names of a stored projection and of the embeddings that it is tied to; `None` where there is none.

    Where parts of a configuration disagree, the model's class decides when it is loaded: that is `None`, too.
    """
    projections, embeddings = ([n for n in tensors if n.endswith(ends)] for ends in (PROJECTIONS, EMBEDDINGS))
    if len(projections) != 1 or len(embeddings) != 1 or not all(_ties(config)):
        return None
    return projections[0], embeddings[0]


def tie(model: Any, path: str, files: WeightFiles | None = None) -> None:
    """Tie what a loaded model's configuration ties, also where files held both.

    Args:
        model: of `transformers`.
        path: of the model, for messages.
        files: where the weights still are; by default in the model.

    Raises:
        ModelError: two weights that are tied have different numbers.
    """
    import torch

    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        own, shared = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(other)
        if own is shared:
            continue
        if files is not None and name in files and other in files:
            a, b = (files.read(n, [(0, size) for size in p.shape]) for n, p in ((name, own), (other, shared)))
        else:
            a, b = own, shared
        if a.shape != b.shape or not torch.equal(a, b):
            raise _differ(path, name, other)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, shared)


def _ties(config: Mapping[str, Any]) -> Iterator[bool]:
    """Yield whether each part of a configuration ties: what it says, or its class's default."""
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


def _differ(path: str, name: str, other: str) -> ModelError:
    return ModelError(
        f"model '{path}' ties its weights '{name}' and '{other}' (tie_word_embeddings), and its files hold different "
        f"ones. To train them apart, set tie_word_embeddings to false in its config.json; if '{name}' is a leftover, "
        "remove it from the files."
    )
