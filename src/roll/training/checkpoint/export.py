"""Export of a model that transformers 4 and 5 load: safetensors in the engine's dtype, configuration, tokenizer.

Weights are written one at a time. A directory gets its final name once it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roll.config.model import LoRAConfig
from roll.models import load_tokenizer, pad_token, write_transformers4_settings
from roll.protocols import WeightSource
from roll.tracking import atomic
from roll.training.checkpoint.shards import ShardWriter
from roll.training.network.lora import Adapter
from roll.training.network.policy import PolicyNetwork
from roll.training.network.value import ValueNetwork
from roll.training.network.weights import adapters_of, gather_weight
from roll.training.spec import TrainerSpec

__all__ = ["adapter_tensors", "export_model", "export_trained", "write_adapter"]


def export_trained(
    path: Path,
    spec: TrainerSpec,
    network: PolicyNetwork | ValueNetwork,
    weights: WeightSource,
    read: Callable[[str], torch.Tensor],
    *,
    is_first: bool,
) -> None:
    """Write a trainer's model, and the adapters of a policy or reward model to `adapter/` in the same directory.
    Collective.

    Args:
        path: The target directory; an existing one is replaced once the new one is complete.
        spec: The spec of the rank.
        network: The rank's network.
        weights: The complete model, adapters merged.
        read: A function that returns a whole parameter of the network by name, on rank 0.
        is_first: Whether this rank writes.
    """
    dtype, trust = getattr(torch, spec.model.dtype), spec.model.trust_remote_code
    adapter: dict[str, torch.Tensor] = {}
    scores = spec.role == "reward_model"
    if spec.model.lora is not None and spec.role in ("policy", "reward_model"):  # collective: before rank 0 can fail
        adapter = adapter_tensors(read, adapters_of(network), dtype, scores_texts=scores)
    export_model(path, weights, network, spec.model_path, dtype, trust_remote_code=trust, is_first=is_first)
    if is_first and spec.model.lora is not None and adapter:
        write_adapter(path.with_name("adapter"), adapter, spec.model.lora, spec.model.path, scores_texts=scores)


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
    """Write an HF model directory. Collective where `weights` is; only the first rank writes.

    Args:
        path: The target directory; an existing one is replaced once the new one is complete.
        weights: The complete model, tied weights once.
        network: `PolicyNetwork` or `ValueNetwork`, whose configuration and generation settings are written.
        source: The model directory of the tokenizer.
        dtype: The dtype of `weights`.
        trust_remote_code: Whether the tokenizer may run code of its repository.
        is_first: Whether this rank writes.
    """
    partial = atomic.temporary_path(path)
    _write_weights(partial, weights, is_first=is_first)
    if is_first:
        _write_config_files(partial, network, source, dtype, trust_remote_code=trust_remote_code)
        _finish(partial, path)


def _write_weights(directory: Path, weights: WeightSource, *, is_first: bool) -> None:
    """Write one tensor at a time. After a failed write, keep gathering with the other ranks, then raise the error."""
    failure: Exception | None = None
    writer: ShardWriter | None = None
    try:
        if is_first:
            directory.mkdir(parents=True)
            writer = ShardWriter(directory, weights.names())
    except Exception as error:
        failure = error
    for name, tensor in weights:
        if writer is not None and failure is None:
            try:
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
    own = network.decoder.config if isinstance(network, ValueNetwork) else model.config
    attention, own._attn_implementation = own._attn_implementation, None
    config = own.to_dict()
    own._attn_implementation = attention
    config.update(dtype=str(dtype).removeprefix("torch."), architectures=[network.architecture])
    if isinstance(network, ValueNetwork):
        label = "score" if network.scores_texts else "value"
        config.update(id2label={0: label}, label2id={label: 0})
    elif model.can_generate():
        model.generation_config.save_pretrained(path)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    if isinstance(network, ValueNetwork) and network.scores_texts:
        tokenizer.pad_token = pad_token(tokenizer)
        config["pad_token_id"] = tokenizer.pad_token_id
    type(own).from_dict(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_transformers4_settings(path)


def adapter_tensors(
    read: Callable[[str], torch.Tensor], adapters: Mapping[str, Adapter], dtype: torch.dtype, *, scores_texts: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors that `write_adapter` writes, on rank 0. Collective where parameters are sharded.

    Args:
        read: A function that returns a parameter by name, on rank 0.
        adapters: The adapters, by the checkpoint name of the weight that each one changes.
        dtype: The dtype of the engines.
        scores_texts: Whether the model is a reward model, whose head is trained in full and saved with the adapters.
    """
    tensors = {
        f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight": _with_own_storage(
            gather_weight(read(parameter)).to(dtype).cpu()
        )
        for name, adapter in adapters.items()
        for part, parameter in (("A", adapter.a), ("B", adapter.b))
    }
    if scores_texts:
        tensors["base_model.model.score.weight"] = _with_own_storage(
            gather_weight(read("score.weight")).to(dtype).cpu()
        )
    return tensors


def write_adapter(
    path: Path, tensors: Mapping[str, torch.Tensor], config: LoRAConfig, base: str, *, scores_texts: bool = False
) -> None:
    """Write adapters in the format that `peft.PeftModel.from_pretrained` reads.

    Args:
        path: The target directory; an existing one is replaced once the new one is complete.
        tensors: The result of `adapter_tensors`.
        config: The configuration of the adapters.
        base: The base model, as the user named it.
        scores_texts: See `adapter_tensors`.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    partial = atomic.temporary_path(path)
    partial.mkdir(parents=True)
    named = config.target_modules
    changed = {name.split(".")[-3] for name in tensors if ".lora_" in name}
    LoraConfig(
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if scores_texts else "CAUSAL_LM",
        modules_to_save=["score"] if scores_texts else None,
        inference_mode=True,
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  # peft only divides by the rank
        lora_dropout=config.dropout,
        target_modules=named if isinstance(named, list) else sorted(changed),
    ).save_pretrained(str(partial))
    save_file(dict(tensors), partial / "adapter_model.safetensors", metadata={"format": "pt"})
    _finish(partial, path)


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a storage of its own: a tensor gathered from uneven shards is a view of a padded one."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _finish(directory: Path, final: Path) -> None:
    """Move a complete directory to its final name, safely against power loss, with the user's usual file permissions.

    Libraries write weights with mode 0600.
    """
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)
    atomic.replace_directory(directory, final)
