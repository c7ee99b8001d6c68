"""Checks of offline distillation before it starts, for `roll check`, including its teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from roll.config.activation_memory import get_element_bytes
from roll.config.pipelines.distill_offline import DistillOfflineConfig
from roll.errors import UserError
from roll.models import describe_model, find_model
from roll.pipelines.distill_offline.paths import resolve_offline_teachers
from roll.pipelines.supervised.check import FrozenModelCost
from roll.pipelines.supervised.check import inspect as inspect_examples
from roll.preflight import Report
from roll.preflight.inspection import inspect_model, run_checks

__all__ = ["inspect"]


def inspect(config: DistillOfflineConfig) -> Report:
    """Check an offline distillation run before it starts, and return the report.

    Teachers whose outputs are stored are excluded from the training memory, because they are unloaded before training.
    """
    problems: list[str] = []
    other_models, loss = FrozenModelCost(), "TOP_K_BENCHMARK_LOSS"
    try:
        student = find_model(config.model.path)
        if student is not None and all(find_model(teacher.model) for teacher in config.teacher):
            paths = tuple(map(str, resolve_offline_teachers(config, student)))
            if config.trainer_loads_teachers:
                other_models, loss = FrozenModelCost(paths=paths), "DISTRIBUTION_BENCHMARK_LOSS"
            else:
                other_models = FrozenModelCost(
                    kept_token_bytes=_compute_token_bytes(config, student),
                    passes_before=_compute_mean_num_parameters(paths) / _compute_mean_num_parameters([str(student)]),
                )
    except UserError as error:
        problems.append(str(error))
    path = f"roll.pipelines.distill_offline.losses:{loss}"
    report = inspect_examples(
        config, kind="supervised", method=config.distillation.method, loss=path, other_models=other_models
    )
    report.problems += [problem for problem in problems if problem not in report.problems]
    run_checks(report, config, _check_teachers)
    if not config.trainer_loads_teachers:
        held = (
            f", and needs {_compute_largest_teacher_bytes(config) / 2**30:.1f} GiB then"
            if other_models.passes_before
            else ""
        )
        report.notes.append(f"the teacher scores each example once, before the first step{held}.")
    return report


def _check_teachers(report: Report, config: DistillOfflineConfig) -> None:
    for teacher in config.teacher:
        inspect_model(report, teacher.model, "the teacher", needs_sizes=False)


def _compute_mean_num_parameters(paths: Sequence[str]) -> float:
    return fmean(describe_model(path).num_parameters for path in paths)


def _compute_largest_teacher_bytes(config: DistillOfflineConfig) -> int:
    """Return the size in bytes of the largest teacher's weights; only one teacher is loaded at a time."""
    paths = (teacher.model for teacher in config.teacher)
    return max(describe_model(path).num_parameters for path in paths) * get_element_bytes(config.model.dtype)


def _compute_token_bytes(config: DistillOfflineConfig, student: Path) -> int:
    number = np.min_scalar_type(describe_model(student).vocab_size - 1).itemsize
    return config.distillation.top_k * (number + np.dtype(np.float32).itemsize)
