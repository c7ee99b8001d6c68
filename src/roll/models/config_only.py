"""Sizes of a model from its config.json alone: the model is built on the meta device, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.errors import ModelError, shorten
from roll.models.catalogue import CATALOGUE
from roll.models.describe import DTYPE_NAMES, ModelDescription, WeightCounts, make_description
from roll.models.hub_fetch import FetchError, fetch_config
from roll.models.quiet import silence_transformers
from roll.models.resolve import find_model_directory
from roll.models.sizes import get_text_config, get_thinker_config, read_config
from roll.models.towers import is_tower_weight
from roll.registry import did_you_mean, format_search_directory

__all__ = ["count_kv_elements_per_token", "describe_config", "find_config"]


def find_config(name: str) -> Path:
    """Return the directory with a model's config.json; for a hub model, only this file is downloaded.

    Args:
        name: A config.json, a model directory, a run or checkpoint, or a hub id (owner/name); a hub id is first looked
            up in the hub's cache on this machine.

    Raises:
        ModelError: the model does not exist, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _link_as_config(path)
    if path.is_dir():
        directory = find_model_directory(path) or path
        if (directory / "config.json").is_file():
            return directory
        raise ModelError(f"'{name}' has no config.json: use a config.json, a model directory or a Hub ID.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model '{name}' was not found: it is not a catalog name, a directory or a Hub ID "
            f"(owner/name){format_search_directory(name)}.{did_you_mean(path.name.lower(), list(CATALOGUE))}"
        )
    return _fetch_config_directory(name)


def describe_config(directory: Path, name: str) -> ModelDescription:
    """Describe a model from its config.json; the weights need not exist.

    Args:
        directory: The directory of the config.json.
        name: The name of the model, for messages.

    Raises:
        ModelError: config.json has an invalid size, or transformers cannot build this type of model.
    """
    config = read_config(directory)
    return make_description(config, _count_parameters(directory, config, name), name)


def count_kv_elements_per_token(directory: Path, description: ModelDescription) -> int:
    """Return the number of elements per token in the KV cache of an inference engine, over all layers.

    Multi-head latent attention stores one compressed vector and the rotated part of the key (DeepSeek-V2, arXiv
    2405.04434, section 2.1); linear attention layers store nothing per token. Sliding windows are treated as full
    attention.
    """
    text = get_text_config(read_config(directory))
    kinds = text.get("layer_types")
    layers = description.num_layers
    if isinstance(kinds, list) and len(kinds) == layers:
        # Linear attention and state-space layers have a state of constant size instead of keys and values.
        layers = sum("linear" not in str(kind) and "mamba" not in str(kind) for kind in kinds) or layers
    latent, rotated = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    if isinstance(latent, int) and isinstance(rotated, int):
        return layers * (latent + rotated)
    return 2 * layers * description.num_kv_heads * description.head_dim


def _fetch_config_directory(name: str) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")  # does not use the network
        if isinstance(cached, str):
            return Path(cached).parent
        if constants.HF_HUB_OFFLINE:
            return Path(hf_hub_download(name, "config.json")).parent  # raises the error for offline mode
        return fetch_config(name, constants.HF_HUB_CACHE).parent
    except (HFValidationError, OSError, ValueError, FetchError) as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"the config.json of '{name}' is not in the hub's cache and could not be fetched ({first_line}): copy the "
            "model's config.json here and specify its path."
        ) from None


def _link_as_config(file: Path) -> Path:
    """Return a directory whose `config.json` is `file`: its parent, or a temporary directory with a link to `file`."""
    if file.name == "config.json":
        return file.parent
    import atexit
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="roll-config-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").symlink_to(file.resolve())
    return directory


def _count_parameters(directory: Path, config: dict[str, Any], name: str) -> WeightCounts:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    reads_media = get_thinker_config(config).get("vision_config") is not None
    try:
        with silence_transformers(), torch.device("meta"):
            settings = AutoConfig.from_pretrained(directory)
            settings = getattr(settings, "thinker_config", settings)
            kind = AutoModelForImageTextToText if reads_media else AutoModelForCausalLM
            model = kind.from_config(settings)
    except Exception as error:  # transformers raises various errors for configurations that it does not support
        kind = config.get("model_type", "without a model_type")
        raise ModelError(
            f"transformers cannot create a causal language model from the config.json of '{name}' ({shorten(kind)}): "
            f"{shorten(str(error))}"
        ) from None
    parameters = dict(model.named_parameters())  # lists tied weights once
    text = {name: parameter for name, parameter in parameters.items() if not (reads_media and is_tower_weight(name))}
    norms = {n.split(".")[-2]: p.numel() for n, p in text.items() if ".layers.0." in n and "norm.weight" in n}
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return WeightCounts(
        num_elements=sum(p.numel() for p in parameters.values()),
        num_tensors=len(parameters),
        num_expert_elements=sum(p.numel() for n, p in parameters.items() if ".experts." in n),
        dtype=DTYPE_NAMES.get(str(dtype), str(dtype)),
        norms=norms,
        has_gates=any("gate_proj" in n or "gate_up_proj" in n for n in text),
        has_projection=any(n.endswith("lm_head.weight") for n in parameters),
        shapes={name: tuple(p.shape) for name, p in parameters.items()} if reads_media else {},
    )
