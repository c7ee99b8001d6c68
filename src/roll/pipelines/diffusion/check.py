"""Checks of a diffusion run before it starts, for `roll check`."""

from __future__ import annotations

import re
from pathlib import Path

from roll.config.base import FUNCTION_PATTERN
from roll.config.diffusion import OnlineAlgorithmConfig
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.preflight.inspection import check_backend_and_placement, check_disk, run_checks
from roll.preflight.machine import inspect_machine
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: DiffusionConfig) -> Report:
    """Check a run before it starts, and return the report."""
    report = Report(config=config, method=config.algorithm.type, machine=inspect_machine())
    return run_checks(
        report, config, check_backend_and_placement, _check_model, _check_data, _check_functions, check_disk
    )


def _check_model(report: Report, config: DiffusionConfig) -> None:
    """Check that the model can be loaded: its files, or the user's class."""
    from roll.diffusion.models.loading import list_denoiser_files, read_family

    if config.model.weights is not None:
        list_denoiser_files(Path(config.model.weights))
    if re.match(FUNCTION_PATTERN, config.model.path):
        from roll.diffusion.models import load_diffusion_model

        model = load_diffusion_model(config.model.path, options=config.model.options, seed=config.seed)
        count = sum(parameter.numel() for parameter in model.denoiser.parameters())
        report.batch.append(f"denoiser of {count:,} parameters, latents of shape {tuple(model.latent_shape)}")
        return
    report.batch.append(f"denoiser {read_family(Path(config.model.path))} of '{config.model.path}'")


def _check_data(report: Report, config: DiffusionConfig) -> None:
    from roll.pipelines.diffusion.pipeline import list_image_columns
    from roll.pipelines.diffusion.rows import read_rows

    rows = read_rows(config.data, config.seed, list_image_columns(config))
    report.num_held_out = len(rows.held_out)
    training, algorithm = config.training, config.algorithm
    per_step = training.prompts_per_step * config.samples_per_prompt
    report.batch += [
        f"{rows.train.num_items:,} rows to train on, {training.prompts_per_step} per step",
        f"{len(rows.held_out):,} rows held out",
        f"{training.num_steps:,} steps"
        + (f" of {per_step:,} samples each" if isinstance(algorithm, OnlineAlgorithmConfig) else ""),
    ]


def _check_functions(report: Report, config: DiffusionConfig) -> None:
    from roll.pipelines.diffusion.losses import build_loss
    from roll.pipelines.diffusion.scoring import check_rewards

    check_rewards([*config.rewards, *config.evaluation.rewards])
    build_loss(config)
