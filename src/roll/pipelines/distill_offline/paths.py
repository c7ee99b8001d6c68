"""Resolves and checks the teacher models of offline distillation, without importing torch."""

from __future__ import annotations

from pathlib import Path

from roll.config.pipelines.distill_offline import DistillOfflineConfig
from roll.errors import ConfigError
from roll.models import describe_model
from roll.pipelines.teachers import resolve_teachers

__all__ = ["resolve_offline_teachers"]


def resolve_offline_teachers(config: DistillOfflineConfig, model_path: Path) -> list[Path]:
    """Return the model paths of all teachers.

    Raises:
        UserError: A teacher is not compatible with the student, or its vocabulary is smaller than the k of top-k
            log-probs.
    """
    settings = config.distillation
    paths = resolve_teachers(config.teacher, config.model, model_path)
    for teacher, path in zip(config.teacher, paths, strict=True):
        rows = describe_model(path).vocab_size
        if settings.mode == "precomputed" and settings.top_k > rows:
            raise ConfigError(
                f"distillation.top_k must be <= {rows:,}, the vocabulary size of teacher.model '{teacher.model}', got "
                f"{settings.top_k:,}: lower distillation.top_k, or set distillation.mode to loss."
            )
    return paths
