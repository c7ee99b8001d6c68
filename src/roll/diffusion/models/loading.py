"""Loading of a diffusion model: a pipeline directory of diffusers, or a user-defined class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from roll.config.base import FUNCTION_PATTERN
from roll.diffusion.models.base import DiffusionModel
from roll.errors import ConfigError, ModelError, find_raise_location, one_line_error
from roll.models import find_model_directory
from roll.user_code import load_function

__all__ = ["FAMILIES", "list_denoiser_files", "load_diffusion_model", "load_weights", "read_family"]

FAMILIES = {
    "SD3Transformer2DModel": "StableDiffusion3Model",
    "FluxTransformer2DModel": "FluxModel",
    "WanTransformer3DModel": "WanModel",
}
"""Classes of `roll.diffusion.models.pipelines`, by the class of diffusers' denoiser."""


def load_diffusion_model(
    path: str,
    *,
    weights: str | None = None,
    options: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DiffusionModel:
    """Load a model, with its denoiser in `dtype`.

    Args:
        path: A directory with `model_index.json`, or the import path of a subclass of `DiffusionModel`.
        weights: A run, a checkpoint, or a directory that `TrainerGroup.export` wrote; by default the weights of `path`,
            which may be random for a custom class.
        options: Keyword arguments of a custom class.
        sizes: Keyword arguments of `PipelineModel`.
        dtype: The dtype of the denoiser.
        seed: The seed of random weights.

    Raises:
        ModelError: The directory or the weights cannot be used.
        ConfigError: The class cannot be imported or built.
    """
    if re.match(FUNCTION_PATTERN, path):
        model = _build_own_model(path, options or {}, seed)
        model.denoiser.to(dtype)
    else:
        model = _load_pipeline(Path(path), sizes or {}, dtype)
    if weights is not None:
        load_weights(model, Path(weights))
    return model


def _build_own_model(path: str, options: dict[str, Any], seed: int) -> DiffusionModel:
    factory = load_function(path, "diffusion model")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # random weights must be equal on every rank
            model = factory(**options)
    except Exception as error:
        raise ConfigError(
            f"diffusion model '{path}' cannot be created ({find_raise_location(error)}): {one_line_error(error)}"
        ) from error
    if not isinstance(model, DiffusionModel):
        raise ConfigError(f"diffusion model '{path}' must be a subclass of roll.diffusion.models.DiffusionModel.")
    return model


def read_family(directory: Path) -> str:
    """Return the class name of the denoiser in a pipeline directory.

    Raises:
        ModelError: The directory is not a pipeline directory, or its denoiser is not supported.
    """
    index = directory / "model_index.json"
    if not index.is_file():
        raise ModelError(
            f"model.path '{directory}' has no model_index.json: specify a diffusers pipeline directory, or the import "
            "path of your own class (`path/to/file.py:Class`)"
        )
    try:
        entry = json.loads(index.read_text(encoding="utf-8")).get("transformer")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"'{index}' cannot be read: {error}") from error
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else str(entry)
    if name not in FAMILIES:
        raise ModelError(
            f"the denoiser of '{directory}' is {name}, which is not supported: choose a pipeline with "
            f"{', '.join(FAMILIES)}, or specify your own class (`path/to/file.py:Class`)"
        )
    return name


def _load_pipeline(directory: Path, sizes: dict[str, Any], dtype: torch.dtype) -> DiffusionModel:
    from roll.diffusion.models import pipelines

    family = read_family(directory)
    try:
        from diffusers import DiffusionPipeline
        from diffusers.utils import logging as messages
    except ImportError as error:
        raise ModelError(f"'{directory}' requires diffusers: pip install 'roll-rl[diffusion]'") from error
    messages.disable_progress_bar()
    index = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
    absent = {name: None for name, entry in index.items() if entry == [None, None]}  # optional parts, such as T5 of SD3
    try:
        # diffusers keeps parts of some denoisers in float32.
        pipeline = DiffusionPipeline.from_pretrained(str(directory), local_files_only=True, dtype=dtype, **absent)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"the pipeline '{directory}' cannot be loaded: {one_line_error(error)}") from error
    return getattr(pipelines, FAMILIES[family])(pipeline, **sizes)


def list_denoiser_files(directory: Path) -> list[Path]:
    """Return the safetensors files of `model.weights`, which may be a run or a checkpoint, sorted by name.

    Raises:
        ModelError: The directory has no safetensors files.
    """
    files = sorted((find_model_directory(directory) or directory).glob("*.safetensors"))
    if not files:
        problem = "has no safetensors files" if directory.is_dir() else "does not exist"
        raise ModelError(
            f"model.weights '{directory}' {problem}: specify a run, a checkpoint, or the directory of an export. If "
            "the run has not been trained yet, train it first."
        )
    return files


def load_weights(model: DiffusionModel, directory: Path) -> None:
    """Load the weights of the denoiser from the safetensors files of a directory.

    Raises:
        ModelError: The directory has no safetensors files, or they belong to a different model.
    """
    from safetensors.torch import load_file

    files = list_denoiser_files(directory)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    own = model.denoiser.state_dict()
    missing, unexpected = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    wrong = [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
    if missing or unexpected or wrong:
        raise ModelError(
            f"model.weights '{directory}' belongs to another model: missing tensors {missing[:3]}, unexpected tensors "
            f"{unexpected[:3]}, tensors with other shapes {wrong[:3]}"
        )
    model.denoiser.load_state_dict(tensors)
