"""Writing a model that `transformers` loads: safetensors in the engine's dtype, configuration, tokenizer.

Weights go to the disk one at a time. A directory has its name once it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from roll.config.model import LoRAConfig
from roll.models import load_tokenizer, pad_token
from roll.protocols import WeightSource
from roll.tracking import atomic
from roll.training.lora import Adapter
from roll.training.policy import PolicyNetwork
from roll.training.shards import ShardWriter
from roll.training.spec import TrainerSpec
from roll.training.value import ValueNetwork
from roll.training.weights import adapters_of, whole

__all__ = ["export_adapter", "export_model", "export_trained"]


def export_trained(
    path: Path,
    spec: TrainerSpec,
    network: PolicyNetwork | ValueNetwork,
    weights: WeightSource,
    read: Callable[[str], torch.Tensor],
    *,
    is_first: bool,
) -> None:
    """Write a trainer's model, and beside it, as `adapter/`, the adapters of a policy or a reward model. Collective.

    Args:
        path: a directory; what is there is replaced once the new one is whole.
        spec: of the rank.
        network: its network.
        weights: the complete model, adapters merged.
        read: a parameter of the whole network by its name, on rank 0.
        is_first: whether this rank writes.
    """
    dtype, trust = getattr(torch, spec.model.dtype), spec.model.trust_remote_code
    export_model(path, weights, network, spec.model_path, dtype, trust_remote_code=trust, is_first=is_first)
    if spec.model.lora is not None and spec.role in ("policy", "reward_model"):
        beside, base, adapters = path.with_name("adapter"), spec.model.path, adapters_of(network)
        scores = spec.role == "reward_model"
        export_adapter(beside, read, adapters, spec.model.lora, base, dtype, scores_texts=scores, is_first=is_first)


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
        path: a directory; what is there is replaced once the new one is whole.
        weights: the complete model, tied weights once.
        network: `PolicyNetwork` or `ValueNetwork`; its configuration and generation settings are written.
        source: the model directory that the tokenizer is taken from.
        dtype: of `weights`.
        trust_remote_code: let the tokenizer run its repository's own code.
        is_first: whether this rank writes.
    """
    partial = atomic.temporary_path(path)
    _write_weights(partial, weights, is_first=is_first)
    if is_first:
        _write_settings(partial, network, source, dtype, trust_remote_code=trust_remote_code)
        _finish(partial, path)


def _write_weights(directory: Path, weights: WeightSource, *, is_first: bool) -> None:
    """One tensor at a time. Other ranks help to gather what this one fails to write, and then it says so."""
    failure: OSError | None = None
    writer: ShardWriter | None = None
    try:
        if is_first:
            directory.mkdir(parents=True)
            writer = ShardWriter(directory, weights.names())
    except OSError as error:
        failure = error
    for name, tensor in weights:
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except OSError as error:
                failure = error
    if failure is not None:
        shutil.rmtree(directory, ignore_errors=True)
        raise failure
    if writer is not None:
        writer.close()


def _write_settings(path: Path, network: Any, source: str, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
    """What a model directory has beside the weights."""
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


def export_adapter(
    path: Path,
    read: Callable[[str], torch.Tensor],
    adapters: Mapping[str, Adapter],
    config: LoRAConfig,
    base: str,
    dtype: torch.dtype,
    *,
    scores_texts: bool = False,
    is_first: bool,
) -> None:
    """Write adapters as `peft.PeftModel.from_pretrained` reads them. Collective where parameters are sharded.

    Args:
        path: a directory; what is there is replaced once the new one is whole.
        read: a parameter by its name, on rank 0.
        adapters: by the checkpoint's name of the weight that they change.
        config: how they were made.
        base: the model that they change, as its user named it.
        dtype: of the engines.
        scores_texts: it is a reward model, whose head is trained whole and comes with the adapters.
        is_first: whether this rank writes.
    """
    tensors = {
        f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight": _alone(
            whole(read(parameter)).to(dtype).cpu()
        )
        for name, adapter in adapters.items()
        for part, parameter in (("A", adapter.a), ("B", adapter.b))
    }
    if scores_texts:
        tensors["base_model.model.score.weight"] = _alone(whole(read("score.weight")).to(dtype).cpu())
    if not is_first:
        return
    from peft import LoraConfig
    from safetensors.torch import save_file

    partial = atomic.temporary_path(path)
    partial.mkdir(parents=True)
    named = config.target_modules
    LoraConfig(
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if scores_texts else "CAUSAL_LM",
        modules_to_save=["score"] if scores_texts else None,
        inference_mode=True,
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  # peft only divides by the rank
        lora_dropout=config.dropout,
        target_modules=named if isinstance(named, list) else sorted({name.split(".")[-2] for name in adapters}),
    ).save_pretrained(str(partial))
    save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    _finish(partial, path)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """With a storage of its own: what was gathered from uneven shards is a view of a padded one."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _finish(directory: Path, final: Path) -> None:
    """Give it its name, whole, so that it survives power loss, and is readable as any other of the user's: libraries
    write weights as 0600."""
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)
    atomic.replace_directory(directory, final)
