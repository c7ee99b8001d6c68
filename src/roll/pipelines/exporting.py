"""Writing a trained model where its user wants it: the directory of a checkpoint, with a model card."""

from __future__ import annotations

import shutil
from pathlib import Path

from roll.errors import RunDirectoryError
from roll.pipelines.checkpoint_files import checkpoints, find_checkpoint, find_model_directory
from roll.pipelines.model_card import model_card
from roll.registry import looked_from

__all__ = ["export"]


def export(source: Path, target: Path, *, adapter: bool = False) -> Path:
    """Copy the model of a run's newest checkpoint, or of a checkpoint, to `target`, and write a model card.

    Args:
        source: a run, or a checkpoint of one.
        target: a directory that does not exist yet.
        adapter: copy the adapter as PEFT reads it, in place of the merged model.

    Raises:
        RunDirectoryError: `source` holds no checkpoint or no adapter, or `target` exists.
    """
    model = find_model_directory(source)
    if model is None:
        saved = ", ".join(path.name for path in checkpoints(source).values())
        raise RunDirectoryError(
            f"'{source}' is neither a run with a checkpoint nor a checkpoint{looked_from(source)}. "
            + (f"Its checkpoints: {saved}." if saved else "Give a run directory or `RUN/checkpoints/step-N`.")
        )
    if adapter:
        model = model.with_name("adapter")
        if not model.is_dir():
            raise RunDirectoryError(
                f"'{source}' has no adapter: it was trained without `model.lora`. Export the whole model instead."
            )
    if target.exists():
        raise RunDirectoryError(f"'{target}' exists already: nothing was written. Choose another directory.")
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    checkpoint = find_checkpoint(source / "checkpoints") if (source / "checkpoints").is_dir() else source
    assert checkpoint is not None, "its model was found"
    (temporary / "README.md").write_text(model_card(checkpoint, target.name, adapter=adapter), encoding="utf-8")
    temporary.rename(target)
    return target
