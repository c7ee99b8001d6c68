"""Checks of a model directory before it is used; the only place where directories are rejected. Never imports torch.

    files          model.safetensors, or the files that an index lists, but not both; no adapter, no Git LFS pointer
    headers        complete, each tensor once, no weight in a quantized format
    tied weights   a projection that is stored next to tied embeddings has the same values (`roll.models.tied_weights`)

`find_model` and `resolve_model` call these checks, so `roll check`, trainers, engines and teachers reject the same
directories.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from roll.errors import ModelError, shorten
from roll.models.tied_weights import check_tied_weights

__all__ = [
    "PROCESSOR_FILES",
    "MissingFileError",
    "StoredTensor",
    "check_directory",
    "list_weight_files",
    "read_json",
    "read_tensor_headers",
]

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of the processor of a vision-language model."""
SETTINGS_FILES = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
TEMPLATE_FILE, ADAPTER_FILE = "chat_template.jinja", "adapter_config.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a Git LFS pointer."""

QUANTIZATION_BY_SUFFIX = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors or FP8",
    ".weight_scale_inv": "FP8 with scales by block",
    ".weight.absmax": "bitsandbytes, 4 bits",
    ".weight.quant_map": "bitsandbytes, 4 bits",
    ".SCB": "bitsandbytes, 8 bits",
    "_proj_blocks": "MXFP4",
}
"""Name suffixes that only quantized weights have, for checkpoints whose config.json does not name a quantization."""
UNQUANTIZED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "U64", "BOOL")
"""Dtypes of unquantized weights, which `transformers` converts; packed quantized weights have other dtypes."""


class MissingFileError(ModelError):
    """A model directory lacks a file, possibly because a download was interrupted."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, as the file's header describes it."""

    file: Path
    dtype: str
    """The dtype in safetensors' notation: BF16, F32, …"""
    shape: tuple[int, ...]


def check_directory(directory: Path, *, allow_quantized: bool = False) -> None:
    """Reject a directory whose model cannot be loaded, or would be loaded incorrectly without an error.

    Args:
        directory: The directory of a Hugging Face model.
        allow_quantized: Whether to accept quantized weights, which vLLM serves and trainers do not support.

    Raises:
        MissingFileError: a file is missing.
        ModelError: the directory cannot be used; the message names the file and a remedy.
    """
    for name in (*TOKENIZER_FILES, *SETTINGS_FILES, TEMPLATE_FILE, ADAPTER_FILE):
        _reject_non_file(directory / name)
    _check_adapter(directory)
    if not (directory / "config.json").is_file():
        if (directory / "config.yaml").is_file():
            raise MissingFileError(
                f"run '{directory}' has no checkpoint yet, so it has no model: wait until it has saved one."
            )
        raise MissingFileError(
            f"model directory '{directory}' has no config.json: choose the directory that contains it."
        )
    config = read_json(directory / "config.json")
    if not allow_quantized and (method := _read_quantization(config)):
        _reject_quantized(directory, method)
    files = list_weight_files(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise MissingFileError(
            f"model directory '{directory}' has no tokenizer: copy tokenizer.json and tokenizer_config.json there."
        )
    for name in (*TOKENIZER_FILES, *SETTINGS_FILES, TEMPLATE_FILE):
        _reject_lfs_pointer(directory / name)
    chosen = config.get("transformers_weights")
    if chosen is not None and chosen != (INDEX_FILE if (directory / INDEX_FILE).is_file() else files[0].name):
        raise ModelError(
            f"'{directory / 'config.json'}' has transformers_weights: {shorten(chosen)}, but the weights of "
            f"the directory are in '{files[0].name}': remove the key, or the other files."
        )
    tensors = read_tensor_headers(files)
    if not allow_quantized:
        for name, tensor in tensors.items():
            suffix = next((suffix for suffix in QUANTIZATION_BY_SUFFIX if name.endswith(suffix)), None)
            if suffix is not None:
                _reject_quantized(directory, QUANTIZATION_BY_SUFFIX[suffix], name)
            if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype not in UNQUANTIZED_DTYPES:
                _reject_quantized(directory, f"integers ({tensor.dtype})", name)
    check_tied_weights(directory, config, tensors)


def list_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory: `model.safetensors`, or the files that its index lists.

    `transformers` reads the same files. Other weight files in the directory, such as adapters or older formats, do not
    belong to the model.

    Raises:
        MissingFileError: the directory has no weights, or a file that the index lists is missing.
        ModelError: the directory has both model.safetensors and an index, the index is corrupted, or a file is a Git
            LFS pointer.
    """
    index = directory / INDEX_FILE
    files = _read_listed_files(directory) if index.is_file() else [directory / SINGLE_FILE]
    single = (directory / SINGLE_FILE).is_file()
    if not index.is_file() and not single:
        raise MissingFileError(
            f"model directory '{directory}' has no weights: the file '{SINGLE_FILE}' is missing."
            f"{_build_format_hint(directory)}"
        )
    missing = [file.name for file in files if not os.path.isfile(file)]  # a name may be too long for the file system
    if single and files != [directory / SINGLE_FILE]:
        absent = f" ({len(missing)} of them missing)" if missing else ""
        raise ModelError(
            f"model directory '{directory}' has both '{SINGLE_FILE}', which transformers loads, and '{INDEX_FILE}' "
            f"with {len(files)} files{absent}, which vLLM uses. Remove the index and its files, or '{SINGLE_FILE}'."
        )
    if missing:
        raise MissingFileError(
            f"model directory '{directory}' is missing {len(missing)} of {len(files)} weight files, for example "
            f"{shorten(missing[0])}: copy or download the model again."
        )
    for file in files:
        _reject_lfs_pointer(file)
    return files


def read_tensor_headers(files: list[Path]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files, and return the tensors by name.

    Raises:
        ModelError: a file is corrupted or incomplete, or two files have a tensor with the same name.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (`safe_open` is not a mapping)
                    part = tensors.get_slice(name)
                    if name in found:
                        raise ModelError(
                            f"weight {shorten(name)} is in two files, '{found[name].file}' and '{file}': remove the "
                            "file that does not belong to the model from the index, or copy the model again."
                        )
                    found[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"weight file '{file}' is corrupted, or is not a safetensors file: {error}. Copy the model again."
            ) from error
    if not found:
        raise ModelError(f"'{files[0]}' does not contain any tensors.")
    return found


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory.

    Raises:
        ModelError: the file cannot be read, is a Git LFS pointer, or does not contain a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"'{file}' cannot be read: its JSON is nested too deeply.") from None
    except (OSError, ValueError) as error:
        _reject_lfs_pointer(file)
        raise ModelError(f"'{file}' cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"'{file}' must contain a JSON object, got {type(value).__name__}.")
    return value


def _read_listed_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"'{index}' must have a 'weight_map' with the file of each weight: copy it again.")
    outside = next((name for name in listed.values() if Path(name).is_absolute() or ".." in Path(name).parts), None)
    if outside is not None:
        raise ModelError(f"'{index}' references the weight file {shorten(outside)}, which is not in its directory.")
    return [directory / name for name in sorted(set(listed.values()))]


def _build_format_hint(directory: Path) -> str:
    if any(directory.glob("*.bin")):
        return (
            " It has weights in an older format (.bin): convert them to safetensors, with `save_pretrained` of "
            "transformers."
        )
    if any(directory.glob("diffusion_pytorch_model*.safetensors")):
        return " It contains the denoiser of a diffusion model, but a language model is required: choose another model."
    other = sorted(file.name for file in directory.glob("*.safetensors") if file.is_file())
    if not other:
        return ""
    return (
        f" It has '{other[0]}': rename it to '{SINGLE_FILE}' if it contains the whole model; otherwise copy "
        f"'{INDEX_FILE}' as well."
    )


def _reject_non_file(file: Path) -> None:
    """Reject a path that exists but is not a file: ignoring it would silently change how the model is used."""
    if os.path.lexists(file) and not file.is_file():
        raise MissingFileError(f"'{file}' is not a file, or is a broken link: copy the model again.")


def _reject_lfs_pointer(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # a missing file is reported by another check
        return
    if pointer:
        raise ModelError(
            f"'{file}' is a Git LFS pointer, not the file itself: run `git lfs install` and `git lfs pull` in "
            f"'{file.parent}'."
        )


def _check_adapter(directory: Path) -> None:
    """Reject a directory with a PEFT adapter: `transformers` would silently load it and freeze the model."""
    file = directory / ADAPTER_FILE
    if not file.is_file():
        return
    base = read_json(file).get("base_model_name_or_path")
    merge = "merge it into its base model (`merge_and_unload` of peft, then `save_pretrained`) and use that directory"
    if any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise ModelError(
            f"model directory '{directory}' has a PEFT adapter (adapter_config.json) next to full weights, so the "
            "model is ambiguous. For the full weights, move adapter_config.json and adapter_model.* to another "
            f"directory; for the adapter, {merge}."
        )
    named = f" of '{base}'" if isinstance(base, str) else ""
    raise ModelError(f"'{directory}' is a PEFT adapter{named}, not a full model: {merge}.")


def _read_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the quantization method that config.json names; `None` if it names none."""
    text = config.get("text_config")
    # The config.json of a multimodal model may name the quantization in the part of the language model only.
    for part in (config, text if isinstance(text, Mapping) else {}):
        settings = part.get("quantization_config") or part.get("compression_config")
        if not settings:
            continue
        if not isinstance(settings, Mapping):
            return shorten(settings)
        if method := settings.get("quant_method") or settings.get("quant_algo"):
            return str(method)
        is_bitsandbytes = bool({"load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"} & set(settings))
        return "bitsandbytes" if is_bitsandbytes else "quantization_config"
    return None


def _reject_quantized(directory: Path, method: str, tensor: str | None = None) -> None:
    location = f"weight {shorten(tensor)}" if tensor else "config.json"
    raise ModelError(
        f"model directory '{directory}' has quantized weights ({shorten(method)}; see its {location}), which cannot be "
        "trained. Train the model that was quantized, in bfloat16, float16 or float32; `model.lora.base: nf4` keeps "
        "its frozen weights in 4 bits."
    )
