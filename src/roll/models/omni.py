"""Complete checkpoints of omni models: the thinker, which is trained, and the parts that generate speech.

thinker.…   reads text and media, writes text      loaded, trained, synced to engines
talker.…    token2wav.…    code2wav.…              neither loaded nor trained; exports contain them unchanged
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.models.directory import list_weight_files, read_json, read_tensor_headers
from roll.models.sizes import get_thinker_config, read_config

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SPEECH_PREFIXES",
    "complete_export",
    "get_weight_prefix",
    "has_speech_parts",
    "list_speech_weights",
    "mark_thinker",
    "read_speech_weights",
]

SPEECH_PREFIXES = ("talker.", "token2wav.", "code2wav.")
"""Name prefixes of the weights that generate speech."""
_THINKER_PREFIX = "thinker."
_PREFIX_ATTRIBUTE = "roll_weight_prefix"
_SPEAKERS_FILE = "spk_dict.pt"
"""The voices of Qwen2.5-Omni's talker; it is copied, never read."""


def has_speech_parts(directory: Path) -> bool:
    """Return whether a model directory contains a complete omni model, not only its thinker."""
    config = read_config(directory)
    return get_thinker_config(config) is not config


def mark_thinker(model: Any) -> None:
    """Record that a loaded thinker comes from a complete checkpoint, where its weights have the prefix `thinker.`."""
    vars(model)[_PREFIX_ATTRIBUTE] = _THINKER_PREFIX


def get_weight_prefix(model: Any) -> str:
    """Return the prefix of a model's weights in its checkpoint; empty unless `mark_thinker` marked the model."""
    return vars(model).get(_PREFIX_ATTRIBUTE, "")


def list_speech_weights(directory: Path) -> list[str]:
    """Return the names of the weights with a `SPEECH_PREFIXES` prefix, in order; empty if there is only a thinker."""
    if not has_speech_parts(directory):
        return []
    return sorted(
        name for name in read_tensor_headers(list_weight_files(directory)) if name.startswith(SPEECH_PREFIXES)
    )


def read_speech_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `list_speech_weights`, one at a time."""
    from safetensors import safe_open

    headers = read_tensor_headers(list_weight_files(directory))
    for name in list_speech_weights(directory):
        with safe_open(headers[name].file, framework="pt") as tensors:
            yield name, tensors.get_tensor(name)


def complete_export(source: Path, target: Path) -> None:
    """Convert a thinker's export to the complete model's format: wrap its config.json, and copy the talker's voices.

    Args:
        source: The directory of the complete model.
        target: The directory of the export, with the config.json of the thinker.
    """
    file = target / "config.json"
    thinker = read_json(file)
    config = {**read_json(source / "config.json"), "thinker_config": thinker}
    file.write_text(json.dumps(config, indent=2) + "\n")
    if (source / _SPEAKERS_FILE).is_file():
        shutil.copyfile(source / _SPEAKERS_FILE, target / _SPEAKERS_FILE)
