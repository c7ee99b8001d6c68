"""Model directories as people have them, made of a tiny model: twelve kinds, of which only some can be trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["NOT_FINITE", "QUANTIZED", "REFUSED", "TRAINED", "make_directory"]

EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def make_directory(kind: str, model: Path, target: Path) -> Path:
    """Copy a tied tiny model and make it a directory of a kind.

    Args:
        kind: one of `TRAINED` or `REFUSED`.
        model: a directory of `write_tiny_model`.
        target: of the copy.

    Returns:
        The copy.
    """
    shutil.copytree(model, target)
    (TRAINED.get(kind) or REFUSED[kind][0])(target)
    return target


def _weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _save(directory: Path, weights: dict[str, Any], name: str = "model.safetensors") -> None:
    from safetensors.torch import save_file

    save_file(weights, directory / name, metadata={"format": "pt"})


def _edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _write_adapter(directory: Path) -> None:
    import torch

    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    settings["base_model_name_or_path"] = "owner/base"
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): torch.ones(2, 32), name.format("B"): torch.ones(32, 2)}
    _save(directory, weights, "adapter_model.safetensors")


def _write_adapter_alone(directory: Path) -> None:
    _write_adapter(directory)
    (directory / "model.safetensors").unlink()
    (directory / "config.json").unlink()


def _store_head(directory: Path) -> None:
    weights = _weights(directory)
    _save(directory, weights | {HEAD: weights[EMBEDDINGS].clone()})


def _store_other_head(directory: Path) -> None:
    weights = _weights(directory)
    head = weights[EMBEDDINGS].clone()
    head[7, 3] += 1e-3
    _save(directory, weights | {HEAD: head})


def _shard(directory: Path) -> None:
    weights = _weights(directory)
    names = sorted(weights)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, own in parts.items():
        _save(directory, {name: weights[name] for name in own}, file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shard_alone(directory: Path) -> None:
    _shard(directory)
    (directory / "model.safetensors").unlink()


def _lose_shard(directory: Path) -> None:
    _shard_alone(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def _store_twice(directory: Path) -> None:
    _shard_alone(directory)
    weights = directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors"
    from safetensors.torch import load_file

    other, own = (load_file(file) for file in weights)
    name = next(iter(other))
    _save(directory, own | {name: other[name] + 1}, weights[1].name)


def _lose_index(directory: Path) -> None:
    _shard_alone(directory)
    (directory / "model.safetensors.index.json").unlink()


def _point(file: str) -> Callable[[Path], None]:
    def point(directory: Path) -> None:
        oid = "0" * 64
        (directory / file).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 1000\n")

    return point


def _claim(**settings: Any) -> Callable[[Path], None]:
    return lambda directory: _edit_config(directory, quantization_config=settings)


def _pack(suffix: str, dtype: str) -> Callable[[Path], None]:
    """Store a matrix as quantized checkpoints do that say nothing of it in config.json."""

    def pack(directory: Path) -> None:
        import torch

        weights = _weights(directory)
        name = "model.layers.0.self_attn.q_proj"
        weights.pop(f"{name}.weight")
        _save(directory, weights | {f"{name}.{suffix}": torch.zeros(32, 8, dtype=getattr(torch, dtype))})

    return pack


def _break(number: float) -> Callable[[Path], None]:
    def put(directory: Path) -> None:
        weights = _weights(directory)
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = number
        _save(directory, weights)

    return put


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _convert_to_bin(directory: Path) -> None:
    import torch

    torch.save(_weights(directory), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def _add_bin(directory: Path) -> None:
    import torch

    torch.save({name: weight + 1 for name, weight in _weights(directory).items()}, directory / "pytorch_model.bin")


def _add_other_format(directory: Path) -> None:
    """Mistral's own format lies next to `transformers`' in its repositories."""
    _save(directory, {"tok_embeddings.weight": _weights(directory)[EMBEDDINGS]}, "consolidated.safetensors")


TRAINED: dict[str, Callable[[Path], None]] = {
    "plain": lambda directory: None,
    "sharded": _shard_alone,
    "tied, equal head stored": _store_head,
    ".bin next to safetensors": _add_bin,
    "another format next to it": _add_other_format,
}
"""What makes a directory that is the same model as the plain one, in every pipeline and on any number of ranks."""

REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "adapter next to weights": (_write_adapter, r"PEFT adapter \(adapter_config\.json\) next to full weights.*move"),
    "adapter alone": (_write_adapter_alone, r"is a PEFT adapter of 'owner/base', not a full model: merge it"),
    "tied, different head stored": (_store_other_head, r"ties .*'lm_head\.weight' and 'model\.embed_tokens\.weight'"),
    "single file and index": (_shard, r"has both 'model\.safetensors'.*with 2 files, which vLLM uses\. Remove"),
    "a weight in two shards": (_store_twice, r"weight '.*' is in two files"),
    "shards without an index": (
        _lose_index,
        r"It has 'model-00001-of-00002\.safetensors'.*copy 'model\.safetensors\.in",
    ),
    "LFS pointer": (_point("model.safetensors"), r"model\.safetensors' is a Git LFS pointer.*git lfs pull"),
    "LFS pointer: tokenizer": (_point("tokenizer.json"), r"tokenizer\.json' is a Git LFS pointer.*git lfs pull"),
    "LFS pointer: config": (_point("config.json"), r"config\.json' is a Git LFS pointer.*git lfs pull"),
    "AWQ": (
        _claim(quant_method="awq", bits=4),
        r"quantized weights \('awq'; see its config\.json\).*cannot be trained",
    ),
    "GPTQ": (_claim(quant_method="gptq", bits=4), r"\('gptq'; see.*Train the model that was quantized"),
    "bitsandbytes": (_claim(load_in_4bit=True, bnb_4bit_quant_type="nf4"), r"\('bitsandbytes'; see.*nf4"),
    "compressed-tensors": (
        _claim(quant_method="compressed-tensors", format="pack-quantized"),
        r"\('compressed-tensors'",
    ),
    "GPTQ, by its weights": (_pack("qweight", "int32"), r"\('GPTQ or AWQ'; see its weight '.*q_proj\.qweight'\)"),
    "compressed-tensors, by its weights": (_pack("weight_packed", "int32"), r"\('compressed-tensors'; see its weight"),
    "bitsandbytes, by its weights": (
        _pack("weight", "uint8"),
        r"\('integers \(U8\)'; see its weight '.*q_proj\.weight'",
    ),
    "NaN weight": (_break(float("nan")), r"weight 'model\.layers\.1\.mlp\.up_proj\.weight' of model .* has NaN or inf"),
    "infinite weight": (
        _break(float("inf")),
        r"weight 'model\.layers\.1\.mlp\.up_proj\.weight' of model .* has NaN or",
    ),
    "missing file": (_lose_shard, r"missing 1 of 2 weight files, for example 'model-00002-of-00002\.safetensors'"),
    "truncated": (_truncate, r"model\.safetensors' is corrupted, or is not a safetensors file.*Copy the model again"),
    ".bin": (_convert_to_bin, r"older format \(\.bin\): convert them to safetensors"),
}
"""What makes a directory that is refused, and the message."""
NOT_FINITE = ("NaN weight", "infinite weight")
"""Those that are found when weights are read."""
QUANTIZED = tuple(kind for kind in REFUSED if kind.startswith(("AWQ", "GPTQ", "bitsandbytes", "compressed-tensors")))
"""Those that an engine may serve."""
