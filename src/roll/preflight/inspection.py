"""Checks of any run before it starts: placement of its roles, its model, its files.

A pipeline adds its own checks (such as `roll.pipelines.rlvr.check`). Problems are collected, so that one report shows
all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from roll.config.run import RunConfig
from roll.config.training import TrainingConfig, check_back_end
from roll.errors import ModelError, RunDirectoryError, UserError
from roll.preflight.machine import free_disk
from roll.preflight.report import Report

if TYPE_CHECKING:
    from roll.models import ModelDescription

__all__ = ["check_disk", "check_roles", "compare_memory", "describe_role", "run_checks"]

C = TypeVar("C", bound=RunConfig)


def run_checks(report: Report, config: C, *checks: Callable[[Report, C], None]) -> Report:
    """Run checks in turn, and add their problems to the report."""
    for take in checks:
        try:
            take(report, config)
        except UserError as error:
            if str(error) not in report.problems:
                report.problems.append(str(error))
    return report


def check_roles(report: Report, config: RunConfig) -> None:
    """Check a train back-end of the user's own; add the placement of roles, unless all are in one process."""
    if isinstance(training := getattr(config, "training", None), TrainingConfig):
        check_back_end(training.backend)
    if config.cluster.type == "ray":
        from roll.cluster.devices import place

        per_node = config.cluster.devices_per_node or report.machine.devices
        report.placement = place(config.cluster, config.roles, per_node)


def describe_role(
    report: Report, path: str, whose: str, *, allow_quantized: bool = False, needs_sizes: bool = True
) -> ModelDescription | None:
    """Return a model's sizes; add a note if the run has to download it first.

    The sizes of a hub model that is not downloaded come from its config.json; the note says so, and why there are no
    sizes if that file is not available.

    Args:
        report: report of the check.
        path: path of the model, as the user gave it.
        whose: name of the model in messages.
        allow_quantized: whether the model is only served, not trained.
        needs_sizes: whether the report has the model's sizes; otherwise no config.json is downloaded.

    Raises:
        ModelError: the model is on this machine and cannot be used; see `roll.models.directory`.
    """
    from roll.models import CATALOGUE, check_stored_finite, describe_model, find_model

    here = find_model(path, allow_quantized=allow_quantized)
    if here is not None:
        check_stored_finite(here)
        return describe_model(path)
    note = f"{whose} '{path}' is not here yet:"
    if path in CATALOGUE:
        report.notes.append(f"{note} the run will prepare it (about 20 s) first.")
        return describe_model(path)
    from roll.preflight.config_sizes import sizes_from_config

    note += " train it if it is a run, else it is downloaded first."
    if not needs_sizes:
        report.notes.append(note)
        return None
    try:
        sizes = sizes_from_config(path)
    except ModelError as error:
        report.notes.append(f"{note} Its sizes, and the memory of roles, are not known: {error}")
        return None
    report.notes.append(
        f"{note} Its sizes are those of its config.json; without its tokenizer the lengths of prompts and examples are "
        "not known, and memory is estimated without them."
    )
    return sizes


def compare_memory(report: Report) -> None:
    """Add a note for memory that does not suffice: of each accelerator, or host memory for everything together."""
    accelerators = report.machine.accelerator_bytes
    if not accelerators:
        needed = sum(role.bytes_total for role in report.memory)
        if needed > report.machine.memory_bytes:
            report.notes.append(_too_little("this machine", needed, report.machine.memory_bytes))
        return
    for device, needed in _bytes_by_device(report).items():
        free = accelerators[device % len(accelerators)]
        if needed > free:
            report.notes.append(_too_little(f"device {device}", needed, free))


def _bytes_by_device(report: Report) -> dict[int, int]:
    """Return the bytes that each device holds at once; of roles that take turns, the larger ones."""
    training, answering, always = (Counter[int](), Counter[int](), Counter[int]())
    for role in report.memory:
        sits = report.config.roles[role.role]
        turn = training if sits.kind == "trainer" else answering if role.role == "actor_infer" else always
        for device in sits.devices:  # critics share devices, an engine's devices share its memory
            turn[device] += role.bytes_total // len(sits.devices)
    if report.hands_over:
        return always + (training | answering)
    return always + training + answering


def _too_little(where: str, needed: int, free: int) -> str:
    return (
        f"{where} has {free / 2**30:.1f} GiB free and the run needs up to {needed / 2**30:.1f} GiB: lower "
        "training.max_tokens_per_micro_batch, set training.activation_checkpointing=true, or train adapters "
        "(model.lora)."
    )


def check_disk(report: Report, config: RunConfig) -> None:
    """Check that the run directory is unused, and that the disk has enough space."""
    run_dir = config.run_dir
    if (run_dir / "config.yaml").exists():
        report.problems.append(
            f"run directory '{run_dir}' holds a run already: continue it with `roll resume {run_dir}`, or give this "
            "run another name (`name=…`)."
        )
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise RunDirectoryError(f"run directory '{run_dir}' is not empty: give this run another name (`name=…`).")
    report.free_disk_bytes = free_disk(Path(run_dir))
    if report.disk is not None and (problem := report.disk.problem(report.free_disk_bytes)):
        raise RunDirectoryError(f"run directory '{run_dir}': {problem}")
    if report.disk is not None and report.disk.peak_bytes > report.free_disk_bytes:
        report.notes.append(
            f"the run writes up to {report.disk.peak_bytes / 2**30:.1f} GiB and the disk has "
            f"{report.free_disk_bytes / 2**30:.1f} GiB free: lower checkpoint.keep_last, or choose another output_dir."
        )
