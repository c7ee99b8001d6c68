"""Resolves a model name to a Hugging Face directory on this machine. Does not import torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

from roll.config.base import expand_path
from roll.errors import ModelError
from roll.models.catalogue import CATALOGUE, get_cached_directory, prepare
from roll.models.directory import MissingFileError, check_directory
from roll.registry import did_you_mean, format_search_directory

__all__ = ["find_model", "find_model_directory", "resolve_model"]

logger = logging.getLogger(__name__)

HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")


def resolve_model(path: str | Path, *, allow_quantized: bool = False) -> Path:
    """Return the Hugging Face directory of a model.

    Args:
        path: A catalogue name (prepared once, then cached), a local directory, a run (the model of its newest
            checkpoint), a checkpoint, or a hub id (downloaded once).
        allow_quantized: See `roll.models.directory.check_directory`.

    Raises:
        ModelError: the model does not exist, is rejected by `check_directory`, or cannot be downloaded.
    """
    name = str(path)
    if name in CATALOGUE:
        return prepare(CATALOGUE[name])
    directory = find_model(path, allow_quantized=allow_quantized)
    return directory if directory is not None else _download(name, allow_quantized)


def find_model(path: str | Path, *, allow_quantized: bool = False) -> Path | None:
    """Return the directory of a model without preparing or downloading it; `None` if it must be prepared or downloaded.

    Raises:
        ModelError: a directory is missing or rejected, or the name is not a known model.
    """
    try:
        name = expand_path(str(path))
    except ValueError as error:
        raise ModelError(f"model {error}.") from None
    if name in CATALOGUE:
        directory = get_cached_directory(CATALOGUE[name])
        return directory if (directory / "config.json").is_file() else None
    local = Path(name)
    if local.is_dir():
        local = find_model_directory(local) or local
        check_directory(local, allow_quantized=allow_quantized)
        return local.resolve()
    looks_local = (
        name.startswith((".", "/", "~")) or name.count("/") > 1 or local.exists() or bool(_list_sibling_runs(name))
    )
    if looks_local or "/" not in name:
        kind = "is a file, not a model directory" if local.is_file() else "is not a directory on this machine"
        _raise_not_found(
            name,
            kind if looks_local else "was not found: it is not a catalog name, a directory or a Hub ID (owner/name)",
        )
    return _find_in_hub_cache(name, allow_quantized)


def find_model_directory(source: Path) -> Path | None:
    """Return the model directory in a checkpoint, or in the newest checkpoint of a run; `None` if there is none."""
    saved = [path for path in source.glob("checkpoints/step-*") if path.is_dir()]
    # Step numbers are padded to six digits, so the names of later steps may be longer.
    newest = max(saved, key=lambda path: (len(path.name), path.name), default=source)
    model = newest / "model"
    return model if (model / "config.json").is_file() else None


def _list_sibling_runs(name: str) -> list[str]:
    """Return the names of the runs in the parent directory of `name`; empty if `name` is not a path."""
    parent = Path(name).expanduser().parent
    return sorted(file.parent.name for file in parent.glob("*/config.yaml")) if "/" in name else []


def _find_in_hub_cache(name: str, allow_quantized: bool) -> Path | None:
    """Return the cached snapshot of a hub model; `None` if the snapshot is missing or incomplete.

    Raises:
        ModelError: the snapshot is complete but rejected by `check_directory`.
    """
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None
    try:
        check_directory(directory, allow_quantized=allow_quantized)
    except MissingFileError:  # the caller continues an interrupted download
        return None
    return directory


def _download(name: str, allow_quantized: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("Downloading model %s from the hub; this happens once.", name)
    try:
        directory = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError as error:
        _raise_not_found(name, f"is not a valid Hub ID: {error}")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        _raise_not_found(
            name, f"is not a directory on this machine and could not be fetched from the hub ({first_line})"
        )
    check_directory(directory, allow_quantized=allow_quantized)
    return directory


def _raise_not_found(name: str, reason: str) -> NoReturn:
    """Raise the error for a model that does not exist."""
    local = Path(name).expanduser()
    runs = [
        run for run in _list_sibling_runs(name) if find_model_directory(local.parent / run)
    ]  # runs without a checkpoint have no model yet
    hint = did_you_mean(local.name.lower(), [*CATALOGUE, *runs])
    if runs:
        listed = ", ".join(runs[:10]) + (f" and {len(runs) - 10} more" if len(runs) > 10 else "")
        hint += f" Runs in '{local.parent}': {listed}."
    raise ModelError(
        f"model '{name}' {reason}{format_search_directory(name)}.{hint} Use a catalog name ({', '.join(CATALOGUE)}), "
        "a run, a local Hugging Face directory, or, with network access, a Hub ID."
    )
