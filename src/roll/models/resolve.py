"""From what a user calls a model to a Hugging Face directory on this machine. Never imports torch itself."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

from roll.errors import ModelError, short
from roll.models.catalogue import CATALOGUE, cached_directory, prepare
from roll.registry import looked_from, nearest

__all__ = ["find_model", "find_model_directory", "read_json", "resolve_model", "weight_files"]

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


def resolve_model(path: str | Path) -> Path:
    """Return the Hugging Face directory of a model.

    Args:
        path: a catalogue name (prepared once, then cached), a local directory (checked), a run or a checkpoint of one
            (its newest model), or a hub id (downloaded once).

    Raises:
        ModelError: there is no such model, it is incomplete, or it cannot be fetched.
    """
    name = str(path)
    if name in CATALOGUE:
        return prepare(CATALOGUE[name])
    found = find_model(path)
    return found if found is not None else _download(name)


def find_model(path: str | Path) -> Path | None:
    """Like `resolve_model`, but prepares and downloads nothing: `None` for a model that is yet to be fetched.

    Raises:
        ModelError: a local directory that is missing or incomplete, or a name that can only be a misspelling.
    """
    name = str(path)
    if name in CATALOGUE:
        directory = cached_directory(CATALOGUE[name])
        return directory if (directory / "config.json").is_file() else None
    local = Path(name).expanduser()
    if local.is_dir():
        local = find_model_directory(local) or local
        _validate(local)
        return local.resolve()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or local.exists() or bool(_runs_beside(name))
    if looks_local or "/" not in name:
        kind = "is a file, not a model directory" if local.is_file() else "is not a directory on this machine"
        _refuse(
            name,
            kind if looks_local else "is neither in the catalogue nor a directory, nor a hub id (owner/name)",
        )
    return _in_hub_cache(name)


def find_model_directory(source: Path) -> Path | None:
    """The model inside a run (of its newest checkpoint) or a checkpoint; `None` where `source` is neither."""
    saved = [path for path in source.glob("checkpoints/step-*") if path.is_dir()]
    newest = max(saved, key=lambda path: (len(path.name), path.name), default=source)
    model = newest / "model"
    return model if (model / "config.json").is_file() else None


def _runs_beside(name: str) -> list[str]:
    """The names of the runs in the directory that `name` would be in; none where it names no directory."""
    parent = Path(name).expanduser().parent
    return sorted(file.parent.name for file in parent.glob("*/config.yaml")) if "/" in name else []


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, as its index lists them.

    Raises:
        ModelError: there are none, or one that the index lists is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"'{index}' must say in 'weight_map' which file has each weight: copy it again.")
        outside = next((name for name in listed.values() if Path(name).is_absolute() or ".." in Path(name).parts), None)
        if outside is not None:
            raise ModelError(f"'{index}' names the weight file {short(outside)}, which is not in its directory.")
        files = [directory / name for name in sorted(set(listed.values()))]
        missing = [file.name for file in files if not os.path.isfile(file)]  # a name may be too long to ask for
        if missing:
            raise ModelError(
                f"model directory '{directory}' lacks {len(missing)} of {len(files)} weight files, first "
                f"{short(missing[0])}: copy or download it again."
            )
    else:
        files = sorted(file for file in directory.glob("*.safetensors") if file.is_file())
    if not files:
        hint = (
            " It has weights in an older format: convert them to safetensors." if any(directory.glob("*.bin")) else ""
        )
        raise ModelError(f"model directory '{directory}' has no weights: a file 'model.safetensors' is missing.{hint}")
    return files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model directory.

    Raises:
        ModelError: it cannot be read or is not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ModelError(f"'{file}' cannot be read: it nests too deeply.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"'{file}' cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"'{file}' must hold a JSON object, found {type(value).__name__}.")
    return value


def _validate(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        if (directory / "config.yaml").is_file():
            raise ModelError(f"run '{directory}' has no checkpoint yet, so it has no model: let it save one first.")
        raise ModelError(f"model directory '{directory}' has no config.json: give the directory that holds it.")
    weight_files(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model directory '{directory}' has no tokenizer: copy tokenizer.json and tokenizer_config.json."
        )


def _in_hub_cache(name: str) -> Path | None:
    """The snapshot of a hub model that was downloaded before and is complete."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(name, local_files_only=True))
        _validate(directory)
    except (OSError, ValueError):  # ModelError is a ValueError: an incomplete snapshot is downloaded again
        return None
    return directory


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("Downloading model %s from the hub; this happens once.", name)
    try:
        directory = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        _refuse(name, f"is not a valid hub id: {error}")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _refuse(name, f"is no directory on this machine, and could not be fetched from the hub ({first_line})")
    _validate(directory)
    return directory


def _refuse(name: str, why: str) -> NoReturn:
    """Raise the one error for a model that is not there."""
    local = Path(name).expanduser()
    runs = [run for run in _runs_beside(name) if find_model_directory(local.parent / run)]  # others have no model yet
    hint = nearest(local.name.lower(), [*CATALOGUE, *runs])
    if runs:
        listed = ", ".join(runs[:10]) + (f" and {len(runs) - 10} more" if len(runs) > 10 else "")
        hint += f" Runs in '{local.parent}': {listed}."
    raise ModelError(
        f"model '{name}' {why}{looked_from(name)}.{hint} Give a catalogue name ({', '.join(CATALOGUE)}), a run, a "
        "local Hugging Face directory, or, with network access, a hub id."
    )
