"""Export of a trained model: the model directory of a checkpoint, with a model card.

It is uploaded to the Hugging Face hub only on request.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

from roll.errors import HubError, RunDirectoryError
from roll.models import write_transformers4_settings
from roll.models.directory import check_directory, stored_tensors
from roll.pipelines.checkpoint_files import checkpoints, find_checkpoint, find_model_directory
from roll.pipelines.model_card import model_card
from roll.registry import search_directory_note

__all__ = ["check_hub", "export", "upload"]


def export(source: Path, target: Path, *, adapter: bool = False) -> Path:
    """Copy the model of a checkpoint, or of a run's newest checkpoint, to `target`, and write a model card.

    Args:
        source: A run directory, or a checkpoint of one.
        target: A directory that does not exist yet.
        adapter: Whether to copy the adapter in PEFT format instead of the merged model.

    Raises:
        RunDirectoryError: `source` has no checkpoint or no adapter, or `target` exists.
        ModelError: The model's files are damaged or incomplete.
    """
    model = find_model_directory(source)
    if model is None:
        saved = ", ".join(path.name for path in checkpoints(source).values())
        raise RunDirectoryError(
            f"'{source}' is neither a run with a checkpoint nor a checkpoint{search_directory_note(source)}. "
            + (f"Its checkpoints: {saved}." if saved else "Give a run directory or `RUN/checkpoints/step-N`.")
        )
    if adapter:
        model = model.with_name("adapter")
        if not model.is_dir():
            raise RunDirectoryError(
                f"'{source}' has no adapter: it was trained without `model.lora`. Export the whole model instead."
            )
        stored_tensors([model / "adapter_model.safetensors"])
    else:
        check_directory(model)
    if target.exists():
        raise RunDirectoryError(f"'{target}' exists already: nothing was written. Choose another directory.")
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    if not adapter:
        write_transformers4_settings(temporary)  # runs of earlier versions have only those of transformers 5
    checkpoint = find_checkpoint(source / "checkpoints") if (source / "checkpoints").is_dir() else source
    assert checkpoint is not None, "its model was found"
    (temporary / "README.md").write_text(model_card(checkpoint, target.name, adapter=adapter), encoding="utf-8")
    temporary.rename(target)
    return target


def check_hub(repository: str) -> None:
    """Check that an upload is possible, before anything is written.

    Raises:
        HubError: The name is not that of a repository, no token is available, or the hub is offline.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
        named = repository.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        raise HubError(f"'{repository}' is not the name of a repository on the hub: write owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            "HF_HUB_OFFLINE is set, so that nothing reaches the hub: unset it to upload. Nothing was written."
        )
    if get_token() is None:
        raise HubError(
            "no user is signed in to the Hugging Face hub: run `hf auth login`, or set HF_TOKEN to a token that may "
            "write. Nothing was written."
        )


def upload(directory: Path, repository: str, *, public: bool = False) -> str:
    """Upload a directory as one commit; a repository that does not exist is created, private unless `public`.

    Returns:
        The URL of the commit.

    Raises:
        HubError: The hub refuses the upload, or cannot be reached; the directory is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Trained with ROLL")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reasons = {
            401: "the token is not valid: run `hf auth login` again, or set another HF_TOKEN",
            403: f"the token may not write to '{repository}': take one with the right to write, or another owner",
            404: f"there is no owner of '{repository}', or the token may not see it",
        }
        _fail(directory, repository, reasons.get(status or 0, _first_line(error)), error)
    except Exception as error:  # each library raises its own network errors
        _fail(directory, repository, f"{api.endpoint} does not answer ({_first_line(error)})", error)
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _fail(directory: Path, repository: str, reason: str, error: Exception) -> NoReturn:
    raise HubError(
        f"'{directory}' was written, but not uploaded: {reason}. Once that is fixed: "
        f"`hf upload {repository} {directory}`."
    ) from error
