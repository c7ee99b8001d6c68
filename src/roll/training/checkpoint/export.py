"""Export of a model that transformers 4 and 5 can load: safetensors in the engine's dtype, configuration, tokenizer.

Weights are written one at a time. A directory is renamed to its final name once it is complete.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roll.config.base import expand_path
from roll.config.model import LoRAConfig
from roll.models import choose_pad_token, load_tokenizer, resolve_model, write_transformers4_settings
from roll.models.catalogue import CATALOGUE
from roll.models.directory import PROCESSOR_FILES
from roll.models.omni import complete_export, get_weight_prefix, list_speech_weights, read_speech_weights
from roll.protocols import WeightSource
from roll.tracking import atomic
from roll.training.checkpoint.shards import ShardWriter
from roll.training.network.lora import Adapter, build_peft_settings
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.network.weights import collect_adapters, gather_weight
from roll.training.spec import TrainerSpec

__all__ = [
    "collect_adapter_tensors",
    "export_model",
    "export_trained",
    "move_to_final_name",
    "write_adapter",
    "write_weights",
]

_PREFIX = "base_model.model."
"""Prefix of the module names in peft's adapter files."""
_PEFT_NAMES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""The names of an adapter's parameters in peft's files, in the order of `Adapter.parameters`."""


def export_trained(
    path: Path,
    spec: TrainerSpec,
    network: PolicyNetwork | ValueNetwork,
    weights: WeightSource,
    read: Callable[[str], torch.Tensor],
    *,
    is_first: bool,
) -> None:
    """Write a trainer's model to `path`, and the adapters of a policy or reward model to the directory `adapter`
    next to `path`. Collective.

    Args:
        path: The target directory; an existing directory is replaced once the new one is complete.
        spec: The spec of the rank.
        network: The network of the rank.
        weights: The complete model, with adapters merged.
        read: A function that returns a full parameter of the network by name, on rank 0.
        is_first: Whether this rank writes.
    """
    dtype, trust = getattr(torch, spec.model.dtype), spec.model.trust_remote_code
    adapter: dict[str, torch.Tensor] = {}
    scores = spec.role == "reward_model"
    if spec.model.lora is not None and spec.role in ("policy", "reward_model"):  # collective: before rank 0 can fail
        adapter = collect_adapter_tensors(read, collect_adapters(network), dtype, is_reward_model=scores)
    export_model(path, weights, network, spec.model_path, dtype, trust_remote_code=trust, is_first=is_first)
    if is_first and spec.model.lora is not None and adapter:
        targets = _list_targets(network.root, adapter, spec.model.lora)
        base = _find_base(spec.model.path, spec.model_path)
        write_adapter(path.with_name("adapter"), adapter, spec.model.lora, base, targets, is_reward_model=scores)


def export_model(
    path: Path,
    weights: WeightSource,
    network: Any,
    source: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
    is_first: bool,
) -> None:
    """Write an HF model directory. Collective if iterating over `weights` is collective; only the first rank writes.

    Args:
        path: The target directory; an existing directory is replaced once the new one is complete.
        weights: The complete model; a tied weight appears once.
        network: `PolicyNetwork` or `ValueNetwork`, whose configuration and generation settings are written.
        source: The model directory of the tokenizer.
        dtype: The dtype of `weights`.
        trust_remote_code: Whether the tokenizer may run code from its repository.
        is_first: Whether this rank writes.
    """
    partial = atomic.make_temporary_path(path)
    omni_model = resolve_model(source) if get_weight_prefix(network.root) else None
    write_weights(partial, weights, omni_model, is_first=is_first)
    if is_first:
        _write_config_files(partial, network, source, dtype, trust_remote_code=trust_remote_code)
        if omni_model is not None:
            complete_export(omni_model, partial)
        move_to_final_name(partial, path)


def write_weights(
    directory: Path, weights: WeightSource, omni_model: Path | None = None, *, is_first: bool, stem: str = "model"
) -> None:
    """Write all tensors on the first rank, one at a time. Collective: after a failed write, the rank iterates over the
    remaining tensors before it raises the error.

    Args:
        directory: The target directory.
        weights: The trained weights.
        omni_model: The omni model whose speech weights are copied; `None` for other models.
        is_first: Whether this rank writes.
        stem: The beginning of the files' names.
    """
    failure: Exception | None = None
    writer: ShardWriter | None = None
    try:
        if is_first:
            directory.mkdir(parents=True)
            others = [] if omni_model is None else list_speech_weights(omni_model)
            writer = ShardWriter(directory, [*weights.names(), *others], stem=stem)
    except Exception as error:
        failure = error
    # Iterating is collective: a rank that stopped early would leave the others in a collective.
    for name, tensor in weights:
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except Exception as error:
                failure = error
    if writer is not None and failure is None and omni_model is not None:
        try:
            for name, tensor in read_speech_weights(omni_model):
                writer.add(name, tensor)
        except Exception as error:
            failure = error
    if failure is not None:
        shutil.rmtree(directory, ignore_errors=True)
        raise failure
    if writer is not None:
        writer.close()


def _write_config_files(path: Path, network: Any, source: str, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
    """Write the files of a model directory other than the weights: configuration, generation settings, tokenizer."""
    model = network.root
    own = network.backbone.config if isinstance(network, ValueNetwork) else model.config
    # `roll_packed` is registered only in this process, so an exported configuration must not name it. The attention is
    # removed from a copy: setting it on the model's own configuration also sets that of the vision tower.
    exported = copy.deepcopy(own)
    exported._attn_implementation = None
    config = exported.to_dict()
    config.update(dtype=str(dtype).removeprefix("torch."), architectures=[network.architecture])
    if isinstance(network, ValueNetwork):
        label = "score" if network.is_reward_model else "value"
        config.update(id2label={0: label}, label2id={label: 0})
    elif model.can_generate():
        model.generation_config.save_pretrained(path)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    if isinstance(network, ValueNetwork) and network.is_reward_model:
        tokenizer.pad_token = choose_pad_token(tokenizer)
        config["pad_token_id"] = tokenizer.pad_token_id
    type(own).from_dict(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_transformers4_settings(path)
    for name in PROCESSOR_FILES:
        if (file := resolve_model(source) / name).is_file():
            shutil.copyfile(file, path / name)


def collect_adapter_tensors(
    read: Callable[[str], torch.Tensor], adapters: Mapping[str, Adapter], dtype: torch.dtype, *, is_reward_model: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors that `write_adapter` writes, on rank 0. Collective where parameters are sharded.

    Args:
        read: A function that returns a parameter by name, on rank 0.
        adapters: The adapters, by the checkpoint name of the adapted weight.
        dtype: The dtype of the engines.
        is_reward_model: Whether the model is a reward model, whose head is trained in full and saved with the adapters.
    """
    tensors = {
        f"{_PREFIX}{name.removesuffix('weight')}{part}": _copy_to_own_storage(
            gather_weight(read(parameter)).to(dtype).cpu()
        )
        for name, adapter in adapters.items()
        for part, parameter in zip(_PEFT_NAMES, adapter.parameters, strict=False)
    }
    if is_reward_model:
        tensors[f"{_PREFIX}score.weight"] = _copy_to_own_storage(gather_weight(read("score.weight")).to(dtype).cpu())
    return tensors


def _list_targets(model: Any, tensors: Mapping[str, torch.Tensor], config: LoRAConfig) -> list[str]:
    """Return the `target_modules` with which peft finds exactly the layers that have adapters.

    The targets are the last parts of the layers' names, or the whole names if other modules, for example in a frozen
    vision tower, have the same last part.
    """
    suffix = ".lora_A.weight"
    layers = {name.removesuffix(suffix).removeprefix(_PREFIX) for name in tensors if name.endswith(suffix)}
    endings = {layer.rpartition(".")[2] for layer in layers}
    for name, _ in model.named_modules():
        if name not in layers and name.rpartition(".")[2] in endings:
            return sorted(layers)
    return config.target_modules if isinstance(config.target_modules, list) else sorted(endings)


def write_adapter(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LoRAConfig,
    base: str,
    targets: list[str],
    *,
    is_reward_model: bool = False,
) -> None:
    """Write adapters in the format that `peft.PeftModel.from_pretrained` reads.

    Args:
        path: The target directory; an existing directory is replaced once the new one is complete.
        tensors: The result of `collect_adapter_tensors`.
        config: The configuration of the adapters.
        base: The hub ID or the directory of the base model.
        targets: Names of the layers with adapters, as peft finds them.
        is_reward_model: See `collect_adapter_tensors`.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
    """
    from peft import LoraConfig
    from safetensors.torch import save

    partial = atomic.make_temporary_path(path)
    partial.mkdir(parents=True)
    LoraConfig(
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if is_reward_model else "CAUSAL_LM",
        modules_to_save=["score"] if is_reward_model else None,
        inference_mode=True,
        target_modules=targets,
        **build_peft_settings(config),
    ).save_pretrained(str(partial))
    # Not `save_file`: its error of a full disk is no OSError.
    (partial / "adapter_model.safetensors").write_bytes(save(dict(tensors), {"format": "pt"}))
    move_to_final_name(partial, path)


def _find_base(name: str, directory: str) -> str:
    """Return a name of the base model that peft can load: a hub ID as given, otherwise the model's directory.

    A name of the catalog, the directory of a run, or a relative path means nothing to peft.
    """
    is_hub_id = name not in CATALOGUE and not Path(expand_path(name)).exists()
    return name if is_hub_id else directory


def _copy_to_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; copy it if it is a view of a larger storage, for example after gathering uneven shards."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def move_to_final_name(directory: Path, final: Path) -> None:
    """Move a complete directory to its final name, safely against power loss, with the user's usual file permissions.

    The permissions are set because some libraries write weights with mode 0600.
    """
    # The umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)
    atomic.replace_directory(directory, final)
