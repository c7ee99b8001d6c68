"""Adds the settings' names in transformers 4 to a model directory that transformers 5 wrote.

Version 5 moved `rope_theta` and `rope_scaling` into `rope_parameters`, and renamed the class of fast tokenizers and the
list of further special tokens. Version 4, and programs that parse the files themselves, ignore unknown keys: they would
silently use a RoPE base of 10,000 and no scaling. After the keys are added, a check verifies that version 5 still
parses the file in the same way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from roll.models.directory import read_json
from roll.records import read_record

__all__ = ["add_older_config_keys", "add_older_tokenizer_keys", "write_transformers4_settings"]

logger = logging.getLogger(__name__)

NEWER_CLASSES = ("TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")
"""Tokenizer classes of transformers 5 for no specific model; their tokenizer.json is complete."""
MACHINE_SPECIFIC_KEYS = ("is_local", "local_files_only")
"""Keys in which transformers 5 records how the tokenizer was loaded on this machine."""


def write_transformers4_settings(directory: Path) -> None:
    """Add the keys of transformers 4 to `config.json` and `tokenizer_config.json` of a model directory.

    Files that already have these keys are unchanged. If this version of transformers would parse config.json
    differently with the added keys, the file is not changed and a warning is logged.

    Raises:
        ModelError: a file cannot be read.
    """
    config = read_json(directory / "config.json")
    older = add_older_config_keys(config)
    if older != config:
        if not config.get("rope_parameters") or _has_same_rope(config, older):
            _write_json(directory / "config.json", older)
        else:
            logger.warning(
                "transformers 4 does not support the rotary embeddings of '%s' (model type %s); use transformers 5.",
                directory,
                config.get("model_type"),
            )
    file = directory / "tokenizer_config.json"
    if file.is_file():
        settings = read_json(file)
        older = add_older_tokenizer_keys(settings, is_fast=(directory / "tokenizer.json").is_file())
        if older != settings:
            _write_json(file, older)


def add_older_config_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers 4's keys, such as `rope_theta` and `torch_dtype`, next to the newer keys.

    Args:
        config: The configuration as transformers 5 writes it; existing keys are not changed.
    """
    older = dict(config)
    if isinstance(text := config.get("text_config"), Mapping):
        older["text_config"] = add_older_config_keys(text)
    if "dtype" in config:
        older.setdefault("torch_dtype", config["dtype"])
    if config.get("model_type") == "qwen3_moe" and "num_local_experts" in config:
        older.setdefault("num_experts", config["num_local_experts"])  # version 4's default is 128
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and rope:
        for key, value in _build_older_rope(rope, config.get("model_type")).items():
            older.setdefault(key, value)
    return older


def add_older_tokenizer_keys(settings: Mapping[str, Any], *, is_fast: bool) -> dict[str, Any]:
    """Return tokenizer_config.json with a tokenizer class and special tokens that transformers 4 supports.

    Args:
        settings: The settings as transformers 5 writes them.
        is_fast: Whether the directory has a tokenizer.json.
    """
    older = {key: value for key, value in settings.items() if key not in MACHINE_SPECIFIC_KEYS}
    if is_fast and settings.get("tokenizer_class") in NEWER_CLASSES:
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # version 4 expects a mapping there, and fails
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


class _Rope(NamedTuple):
    """Rotary parameters of one layer type."""

    rope_type: str = "default"
    rope_theta: Any = None
    partial_rotary_factor: Any = None


def _build_older_rope(rope: Mapping[str, Any], model_type: Any) -> dict[str, Any]:
    """Return transformers 4's config.json keys for rotary parameters; empty if version 4 cannot express them."""
    if any(isinstance(part, Mapping) for part in rope.values()):  # parameters by type of layers
        match rope:
            case {"full_attention": Mapping() as full, "sliding_attention": Mapping() as inner}:
                sliding = read_record(_Rope, inner)
            case _:
                return {}
        if sliding.rope_type != "default":
            return {}
        keys = _build_older_rope(full, model_type)
        # In transformers 4, only Gemma 3 has a separate base for layers with sliding windows.
        if str(model_type).startswith("gemma3"):
            return keys | {"rope_local_base_freq": sliding.rope_theta}
        return keys if sliding.rope_theta == read_record(_Rope, full).rope_theta else {}
    record = read_record(_Rope, rope)
    if model_type == "gpt_neox":
        keys = {"rotary_emb_base": record.rope_theta, "rotary_pct": record.partial_rotary_factor}
    else:
        keys = {"rope_theta": record.rope_theta, "partial_rotary_factor": record.partial_rotary_factor}
    if record.rope_type != "default":
        rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
        if str(model_type).startswith("phi3"):  # version 4 requires these three
            rest = {"type": record.rope_type, **{k: rope.get(k) for k in ("short_factor", "long_factor")}}
        keys |= {"rope_scaling": rest}
    return {key: value for key, value in keys.items() if value is not None}


def _has_same_rope(config: dict[str, Any], older: dict[str, Any]) -> bool:
    """Return whether this version of transformers reads the same rotary parameters from both configurations."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return False
    try:
        one, other = (CONFIG_MAPPING[kind].from_dict(_copy_config(each)).get_text_config() for each in (config, older))
    except (ValueError, TypeError, KeyError, AttributeError):  # configuration classes raise various errors
        return False
    return _drop_legacy_type(one.rope_parameters) == _drop_legacy_type(other.rope_parameters)


def _drop_legacy_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters without `type`, the older name of `rope_type`."""
    return {key: value for key, value in rope.items() if key != "type"}


def _copy_config(config: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    return copy


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
