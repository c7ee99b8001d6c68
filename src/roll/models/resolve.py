"""Resolution of a user's model name to a Hugging Face directory on this machine. Does not import torch itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

from roll.config.base import expanded
from roll.errors import ModelError
from roll.models.catalogue import CATALOGUE, cached_directory, prepare
from roll.models.directory import MissingFileError, check_directory
from roll.registry import did_you_mean, search_directory_note

__all__ = ["find_model", "find_model_directory", "resolve_model"]

logger = logging.getLogger(__name__)

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


def resolve_model(path: str | Path, *, allow_quantized: bool = False) -> Path:
    """Return the Hugging Face directory of a model.

    Args:
        path: A catalogue name (prepared once, then cached), a local directory (checked), a run or a checkpoint of one
            (its newest model), or a hub id (downloaded once).
        allow_quantized: See `roll.models.directory.check_directory`.

    Raises:
        ModelError: the model does not exist, is rejected (`roll.models.directory`), or cannot be fetched.
    """
    name = str(path)
    if name in CATALOGUE:
        return prepare(CATALOGUE[name])
    found = find_model(path, allow_quantized=allow_quantized)
    return found if found is not None else _download(name, allow_quantized)


def find_model(path: str | Path, *, allow_quantized: bool = False) -> Path | None:
    """Return the directory of `resolve_model` without preparing or downloading; `None` if the model must still be
    fetched.

    Raises:
        ModelError: a directory is missing or rejected, or the name can only be a misspelling.
    """
    try:
        name = expanded(str(path))
    except ValueError as error:
        raise ModelError(f"model {error}.") from None
    if name in CATALOGUE:
        directory = cached_directory(CATALOGUE[name])
        return directory if (directory / "config.json").is_file() else None
    local = Path(name)
    if local.is_dir():
        local = find_model_directory(local) or local
        check_directory(local, allow_quantized=allow_quantized)
        return local.resolve()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or local.exists() or bool(_sibling_runs(name))
    if looks_local or "/" not in name:
        kind = "is a file, not a model directory" if local.is_file() else "is not a directory on this machine"
        _raise_not_found(
            name,
            kind if looks_local else "is neither in the catalogue nor a directory, nor a hub id (owner/name)",
        )
    return _in_hub_cache(name, allow_quantized)


def find_model_directory(source: Path) -> Path | None:
    """Return the model inside a run (of its newest checkpoint) or a checkpoint; `None` if `source` is neither."""
    saved = [path for path in source.glob("checkpoints/step-*") if path.is_dir()]
    newest = max(saved, key=lambda path: (len(path.name), path.name), default=source)
    model = newest / "model"
    return model if (model / "config.json").is_file() else None


def _sibling_runs(name: str) -> list[str]:
    """Return the names of the runs in the parent directory of `name`; empty if `name` has no directory."""
    parent = Path(name).expanduser().parent
    return sorted(file.parent.name for file in parent.glob("*/config.yaml")) if "/" in name else []


def _in_hub_cache(name: str, allow_quantized: bool) -> Path | None:
    """Return the snapshot of a hub model that was downloaded before and is complete, or `None`.

    Raises:
        ModelError: the snapshot is complete and rejected.
    """
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    try:
        check_directory(directory, allow_quantized=allow_quantized)
    except MissingFileError:  # an interrupted download is continued
        return None
    return directory


def _download(name: str, allow_quantized: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("Downloading model %s from the hub; this happens once.", name)
    try:
        directory = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        _raise_not_found(name, f"is not a valid hub id: {error}")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _raise_not_found(name, f"is no directory on this machine, and could not be fetched from the hub ({first_line})")
    check_directory(directory, allow_quantized=allow_quantized)
    return directory


def _raise_not_found(name: str, why: str) -> NoReturn:
    """Raise the error for a model that does not exist."""
    local = Path(name).expanduser()
    runs = [run for run in _sibling_runs(name) if find_model_directory(local.parent / run)]  # others have no model yet
    hint = did_you_mean(local.name.lower(), [*CATALOGUE, *runs])
    if runs:
        listed = ", ".join(runs[:10]) + (f" and {len(runs) - 10} more" if len(runs) > 10 else "")
        hint += f" Runs in '{local.parent}': {listed}."
    raise ModelError(
        f"model '{name}' {why}{search_directory_note(name)}.{hint} Give a catalogue name "
        f"({', '.join(CATALOGUE)}), a run, a "
        "local Hugging Face directory, or, with network access, a hub id."
    )
