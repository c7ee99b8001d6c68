"""Fingerprints that identify a model without reading its files completely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["model_fingerprint", "tokenizer_fingerprint"]

_END_BYTES = 1 << 20
_NUM_BLOCKS, _BLOCK_BYTES = 128, 1 << 12
"""Blocks spread over a file, because training may change only some matrices in its middle."""
_WEIGHTS = (".safetensors", ".bin")


def model_fingerprint(directory: Path) -> str:
    """Return a hash of `config.json` and of every weight file: its name, its size, both ends, and blocks in between."""
    digest = xxhash.xxh3_128((directory / "config.json").read_bytes())
    for path in sorted(p for p in directory.iterdir() if p.suffix in _WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            for place in range(_END_BYTES, size - _END_BYTES, max(size // _NUM_BLOCKS, _BLOCK_BYTES)):
                file.seek(place)
                digest.update(file.read(_BLOCK_BYTES))
            file.seek(max(0, size - _END_BYTES))
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of vocabulary, special tokens and chat template."""
    what = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(what, ensure_ascii=True).encode())
