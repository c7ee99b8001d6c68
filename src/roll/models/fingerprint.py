"""Whether two model directories hold the same model, without reading them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["model_fingerprint", "tokenizer_fingerprint"]

_SAMPLE_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin")


def model_fingerprint(directory: Path) -> str:
    """A hash of `config.json` and of every file of weights: its name, its size, its first and its last MiB."""
    digest = xxhash.xxh3_128((directory / "config.json").read_bytes())
    for path in sorted(p for p in directory.iterdir() if p.suffix in _WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of vocabulary, special tokens and chat template."""
    what = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(what, ensure_ascii=True).encode())
