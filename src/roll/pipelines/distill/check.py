"""Checks of an on-policy distillation run before it starts, including its teachers."""

from __future__ import annotations

from roll.config.activation_memory import ModelSizes, element_bytes
from roll.config.estimate import RoleMemory, engine_bytes, frozen_bytes
from roll.config.pipelines.distill import DistillConfig
from roll.config.truncation import distillation_truncation_note
from roll.models import ModelDescription, find_model
from roll.pipelines.online.check.estimate import BatchArithmetic, ExtraMemory, frozen_memory
from roll.pipelines.online.check.inspection import inspect_run
from roll.pipelines.teachers import teacher_paths
from roll.preflight.inspection import describe_role
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: DistillConfig) -> Report:
    """Check a run before it starts."""
    found: list[ModelDescription] = []

    def look_at_teachers(report: Report, config: DistillConfig) -> None:
        for teacher in config.teacher:
            sizes = describe_role(report, teacher.model, "the teacher")
            found.extend([sizes] if sizes else [])
        student = find_model(config.model.path)
        if student is not None and all(find_model(teacher.model) for teacher in config.teacher):
            teacher_paths(config.teacher, config.model, student)

    def further(report: Report, config: DistillConfig, batch: BatchArithmetic) -> ExtraMemory:
        return _memory(report, config, batch, found)

    def look_at_truncation(report: Report, config: DistillConfig) -> None:
        note = distillation_truncation_note(config.distillation, config.rollout)
        report.notes += [note] if note else []

    settings = config.distillation
    method = f"{settings.divergence} divergence as a {settings.place}"
    return inspect_run(config, method, look_at_teachers, look_at_truncation, further=further)


def _memory(
    report: Report, config: DistillConfig, batch: BatchArithmetic, teachers: list[ModelDescription]
) -> ExtraMemory:
    element = element_bytes(config.model.dtype)
    if config.trainer_holds_teachers:
        held = sum(frozen_bytes(each, config.training.parallel, config.num_ranks, element) for each in teachers)
        return ExtraMemory(held={"teachers": held})
    if config.teacher[0].place == "trainer":
        on_accelerator = report.machine.has_accelerators
        roles = [frozen_memory(config, "teacher", each, batch, on_accelerator=on_accelerator) for each in teachers]
        return ExtraMemory(roles=roles)
    return ExtraMemory(roles=[_engine(report, config, sizes) for sizes in teachers])


def _engine(report: Report, config: DistillConfig, sizes: ModelSizes) -> RoleMemory:
    parts = engine_bytes(
        config.inference,
        sizes,
        num_requests=config.rollouts_per_step,
        kind=report.engine_kind or "hf",
        max_context=(report.longest_prompt or 0) + config.max_answer_tokens,
        element=element_bytes(config.model.dtype),
        on_accelerator=report.machine.has_accelerators,
    )
    return RoleMemory(role="teacher", count=1, parts=parts)
