"""Export of a trained model: the model directory of a checkpoint, with a model card.

It is uploaded to the Hugging Face hub only on request.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

from roll.errors import HubError, RunDirectoryError
from roll.models import write_transformers4_settings
from roll.models.directory import check_directory, read_tensor_headers
from roll.pipelines.checkpoint_files import find_checkpoint, find_model_directory, list_checkpoints
from roll.pipelines.model_card import build_model_card
from roll.registry import format_search_directory

__all__ = ["check_hub", "export", "upload"]

DENOISER_FILE_PREFIX = "diffusion_pytorch_model"
"""Beginning of the names of the files with the weights of a diffusion model."""


def export(source: Path, target: Path, *, adapter: bool = False) -> Path:
    """Copy the model of a checkpoint, or of a run's newest checkpoint, to `target`, and write a model card.

    Args:
        source: A run directory, or a checkpoint in a run directory.
        target: A directory that does not exist yet.
        adapter: Whether to copy the adapter in PEFT format instead of the merged model.

    Raises:
        RunDirectoryError: `source` has no checkpoint or no adapter, or `target` exists.
        ModelError: The model's files are corrupted or incomplete.
    """
    model = find_model_directory(source)
    if model is None:
        saved = ", ".join(path.name for path in list_checkpoints(source).values())
        raise RunDirectoryError(
            f"'{source}' is neither a run with a checkpoint nor a checkpoint{format_search_directory(source)}. "
            + (f"Its checkpoints: {saved}." if saved else "Specify a run directory or `RUN/checkpoints/step-N`.")
        )
    if adapter:
        model = model.with_name("adapter")
        if not model.is_dir():
            raise RunDirectoryError(
                f"'{source}' has no adapter: it was trained without `model.lora`. Export the whole model instead."
            )
        read_tensor_headers([model / "adapter_model.safetensors"])
    elif weights := sorted(model.glob(f"{DENOISER_FILE_PREFIX}*.safetensors")):
        read_tensor_headers(weights)
    else:
        check_directory(model)
    if target.exists():
        raise RunDirectoryError(f"'{target}' already exists: nothing was written. Choose another directory.")
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    if not adapter and (temporary / "tokenizer_config.json").is_file():
        write_transformers4_settings(temporary)  # runs of earlier versions have only those of transformers 5
    checkpoint = find_checkpoint(source / "checkpoints") if (source / "checkpoints").is_dir() else source
    assert checkpoint is not None, "its model was found"
    (temporary / "README.md").write_text(build_model_card(checkpoint, target.name, adapter=adapter), encoding="utf-8")
    temporary.rename(target)
    return target


def check_hub(repository: str) -> None:
    """Check that an upload is possible, before anything is written.

    Raises:
        HubError: The repository name is invalid, no token is available, or the hub is offline.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
        named = repository.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        raise HubError(f"'{repository}' is not a valid Hub repository name: expected owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it to upload. Nothing was written.")
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
        HubError: The hub rejects the upload or cannot be reached, or a file cannot be read; the directory is kept.
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
            403: f"the token may not write to '{repository}': use a token that may write, or another owner",
            404: f"the owner of '{repository}' does not exist, or the token has no access to it",
        }
        _raise_upload_error(directory, repository, reasons.get(status or 0, _format_error(error)), error)
    except Exception as error:  # each library raises its own network errors
        _raise_upload_error(
            directory, repository, f"the upload to {api.endpoint} failed ({_format_error(error)})", error
        )
    return str(commit.commit_url)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _raise_upload_error(directory: Path, repository: str, reason: str, error: Exception) -> NoReturn:
    raise HubError(
        f"'{directory}' was written, but not uploaded: {reason}. Once that is fixed, run "
        f"`hf upload {repository} {directory}`."
    ) from error
