"""Fingerprints of models and tokenizers, computed without reading whole weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["compute_model_fingerprint", "compute_tokenizer_fingerprint"]

_HASHED_END_BYTES = 1 << 20
_NUM_BLOCKS, _BLOCK_BYTES = 128, 1 << 12
"""Number and size of the blocks of a file that are hashed in addition to its ends, because training may change only
some matrices."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings that change the inputs of a vision tower."""


def compute_model_fingerprint(directory: Path) -> str:
    """Return a hash of `config.json`, the settings of the image processor, and the weight files.

    The hash of a weight file covers the file's name, its size, its beginning and end, and blocks in between.
    """
    digest = xxhash.xxh3_128((directory / "config.json").read_bytes())
    for path in (directory / name for name in _PROCESSOR_FILES):
        if path.exists():
            digest.update(path.read_bytes())
    for path in sorted(p for p in directory.iterdir() if p.suffix in _WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_END_BYTES))
            for place in range(_HASHED_END_BYTES, size - _HASHED_END_BYTES, max(size // _NUM_BLOCKS, _BLOCK_BYTES)):
                file.seek(place)
                digest.update(file.read(_BLOCK_BYTES))
            file.seek(max(0, size - _HASHED_END_BYTES))
            digest.update(file.read(_HASHED_END_BYTES))
    return digest.hexdigest()


def compute_tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's vocabulary, special tokens and chat template."""
    what = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids), tokenizer.chat_template]
    return xxhash.xxh3_128_hexdigest(json.dumps(what, ensure_ascii=True).encode())
