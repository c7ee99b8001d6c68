"""Checks of an on-policy distillation run before it starts, including its teachers."""

from __future__ import annotations

from roll.config.activation_memory import ModelSizes, get_element_bytes
from roll.config.estimate import RoleMemory, estimate_engine_bytes, estimate_frozen_bytes
from roll.config.pipelines.distill import DistillConfig
from roll.config.truncation import describe_distillation_truncation
from roll.models import ModelDescription, find_model
from roll.pipelines.online.check.estimate import ExtraMemory, RunSizes, estimate_frozen_memory
from roll.pipelines.online.check.inspection import inspect_run
from roll.pipelines.teachers import resolve_teachers
from roll.preflight.inspection import inspect_model
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: DistillConfig) -> Report:
    """Check a distillation run before it starts, and return the report."""
    found: list[ModelDescription] = []

    def check_teachers(report: Report, config: DistillConfig) -> None:
        for teacher in config.teacher:
            sizes = inspect_model(report, teacher.model, "the teacher")
            found.extend([sizes] if sizes else [])
        student = find_model(config.model.path)
        if student is not None and all(find_model(teacher.model) for teacher in config.teacher):
            resolve_teachers(config.teacher, config.model, student)

    def estimate_extra_memory(report: Report, config: DistillConfig, batch: RunSizes) -> ExtraMemory:
        return _estimate_memory(report, config, batch, found)

    def check_truncation(report: Report, config: DistillConfig) -> None:
        note = describe_distillation_truncation(config.distillation, config.rollout)
        report.notes += [note] if note else []

    settings = config.distillation
    method = f"{settings.divergence} divergence as a {settings.mode}"
    return inspect_run(config, method, check_teachers, check_truncation, extra_memory=estimate_extra_memory)


def _estimate_memory(
    report: Report, config: DistillConfig, batch: RunSizes, teachers: list[ModelDescription]
) -> ExtraMemory:
    element = get_element_bytes(config.model.dtype)
    if config.trainer_loads_teachers:
        held = sum(
            estimate_frozen_bytes(each, config.training.parallel, config.num_ranks, element) for each in teachers
        )
        return ExtraMemory(policy_bytes={"teachers": held})
    if config.teacher[0].backend == "trainer":
        on_accelerator = report.machine.has_accelerators
        roles = [
            estimate_frozen_memory(config, "teacher", each, batch, on_accelerator=on_accelerator) for each in teachers
        ]
        return ExtraMemory(roles=roles)
    return ExtraMemory(roles=[_estimate_engine_memory(report, config, sizes) for sizes in teachers])


def _estimate_engine_memory(report: Report, config: DistillConfig, sizes: ModelSizes) -> RoleMemory:
    parts = estimate_engine_bytes(
        config.inference,
        sizes,
        width=config.inference.width,
        num_requests=config.rollouts_per_step,
        kind=report.engine_kind or "hf",
        max_context=(report.longest_prompt or 0) + config.max_answer_tokens,
        element_bytes=get_element_bytes(config.model.dtype),
        on_accelerator=report.machine.has_accelerators,
    )
    return RoleMemory(role="teacher", count=1, parts=parts)
