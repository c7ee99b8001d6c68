"""Checks that all pipelines share: placement of roles, model, memory, and disk.

A pipeline adds its own checks (such as `roll.pipelines.rlvr.check`). Problems are collected, so that one report shows
all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from roll.cluster.decoding import decode_in_worker
from roll.config.model import ModelConfig
from roll.config.run import RunConfig
from roll.config.training import TrainingConfig, check_back_end
from roll.errors import ModelError, RunDirectoryError, UserError
from roll.extensions import has_user_code
from roll.preflight.machine import measure_free_disk
from roll.preflight.report import Report

if TYPE_CHECKING:
    from roll.models import ModelDescription

__all__ = [
    "check_backend_and_placement",
    "check_disk",
    "check_memory",
    "inspect_model",
    "inspect_policy",
    "needs_torch",
    "run_checks",
]

C = TypeVar("C", bound=RunConfig)


def run_checks(report: Report, config: C, *checks: Callable[[Report, C], None]) -> Report:
    """Run checks one after another, and return the report; a `UserError` of a check becomes a problem in the report."""
    with decode_in_worker():
        for check in checks:
            try:
                check(report, config)
            except UserError as error:
                if str(error) not in report.problems:  # several checks may need the same missing model
                    report.problems.append(str(error))
    return report


def needs_torch(config: RunConfig) -> bool:
    """Return whether a check needs torch: for the user's code, or for the model's image processor."""
    if config.model.trust_remote_code or has_user_code(config.model_dump()):
        return True
    from roll.models import find_model
    from roll.models.multimodal import has_media_config

    try:
        directory = find_model(config.model.path, allow_quantized=True)
        return directory is not None and has_media_config(directory)
    except UserError:  # the check reports it
        return False


def check_backend_and_placement(report: Report, config: RunConfig) -> None:
    """Check a custom training backend; with Ray, add the placement of roles to the report."""
    if isinstance(training := getattr(config, "training", None), TrainingConfig):
        check_back_end(training.backend)
    if config.cluster.type == "ray":
        from roll.cluster.devices import resolve_placement

        per_node = config.cluster.devices_per_node or report.machine.devices
        report.placement = resolve_placement(config.cluster, config.roles, per_node)


def inspect_model(
    report: Report, path: str, label: str, *, allow_quantized: bool = False, needs_sizes: bool = True
) -> ModelDescription | None:
    """Check a model on this machine, and return its sizes; add a note if the run has to download it first.

    The sizes of a hub model that is not downloaded are read from its config.json. Return `None` if that file cannot be
    read (the note gives the reason), or if the sizes are not needed.

    Args:
        report: report of the check.
        path: path of the model, as the user gave it.
        label: name of the model in messages.
        allow_quantized: whether to accept quantized weights; for models that are only served.
        needs_sizes: whether to download config.json if the sizes are not known without it.

    Raises:
        ModelError: the model is on this machine and cannot be used; see `roll.models.directory`.
    """
    from roll.models import CATALOGUE, check_stored_finite, describe_model, find_model

    here = find_model(path, allow_quantized=allow_quantized)
    if here is not None:
        check_stored_finite(here)
        return describe_model(path)
    note = f"{label} '{path}' is not on this machine yet:"
    if path in CATALOGUE:
        report.notes.append(f"{note} the run will first prepare the model (about 20 s).")
        return describe_model(path)
    from roll.preflight.config_sizes import read_model_sizes

    note += " the run will first download the model. If it is a run of ROLL, train that run first."
    if not needs_sizes:
        report.notes.append(note)
        return None
    try:
        sizes = read_model_sizes(path)
    except ModelError as error:
        report.notes.append(f"{note} The model's sizes and the memory of roles are unknown: {error}")
        return None
    report.notes.append(
        f"{note} The model's sizes are from config.json; without the tokenizer, the lengths of prompts and examples "
        "are unknown, and memory is estimated without them."
    )
    return sizes


def inspect_policy(report: Report, model: ModelConfig) -> ModelDescription | None:
    """Check the trained model with `inspect_model`, and check that it has the parts that `model.vision` names.

    Raises:
        ModelError: See `inspect_model`.
    """
    sizes = inspect_model(report, model.path, "the model")
    names_parts = bool(model.vision.freeze or model.vision.learning_rate_factors)
    if sizes is not None and sizes.tower is None and names_parts:
        report.problems.append(
            f"model.vision is set, but model '{model.path}' has no vision tower: remove model.vision, or choose a "
            "vision-language model."
        )
    return sizes


def check_memory(report: Report) -> None:
    """Add a note for each accelerator with too little free memory; without accelerators, check the host's memory."""
    accelerators = report.machine.accelerator_bytes
    if not accelerators:
        needed = sum(role.bytes_total for role in report.memory)
        if needed > report.machine.memory_bytes:
            report.notes.append(_describe_shortage("this machine", needed, report.machine.memory_bytes))
        return
    for device, needed in _sum_bytes_by_device(report).items():
        free = accelerators[device % len(accelerators)]
        if needed > free:
            report.notes.append(_describe_shortage(f"device {device}", needed, free))


def _sum_bytes_by_device(report: Report) -> dict[int, int]:
    """Return the peak memory of each device in bytes; if a trainer and an engine take turns, only the larger of the two
    is counted.
    """
    training, answering, always = (Counter[int](), Counter[int](), Counter[int]())
    for role in report.memory:
        sits = report.config.roles[role.role]
        turn = training if sits.kind == "trainer" else answering if role.role == "actor_infer" else always
        for device in sits.devices:  # the bytes of a role are those of all its devices together
            turn[device] += role.bytes_total // len(sits.devices)
    if report.is_colocated:
        return always + (training | answering)  # `|` of counters is the maximum of each device
    return always + training + answering


def _describe_shortage(location: str, needed: int, free: int) -> str:
    return (
        f"{location} has {free / 2**30:.1f} GiB free, but the run needs up to {needed / 2**30:.1f} GiB: lower "
        "training.max_tokens_per_micro_batch, set training.activation_checkpointing=true, or train adapters "
        "(model.lora)."
    )


def check_disk(report: Report, config: RunConfig) -> None:
    """Check that the run directory is unused, and that the disk has enough space for the run.

    An existing run is reported as a problem. Too little space is reported as a note if the run can start.

    Raises:
        RunDirectoryError: the directory has other files, or the disk has too little space for the checkpoints.
    """
    run_dir = config.run_dir
    if (run_dir / "config.yaml").exists():
        report.problems.append(
            f"run directory '{run_dir}' already has a run: continue it with `roll resume {run_dir}`, or give this "
            "run another name (`name=…`)."
        )
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise RunDirectoryError(f"run directory '{run_dir}' is not empty: give this run another name (`name=…`).")
    report.free_disk_bytes = measure_free_disk(Path(run_dir))
    if report.disk is not None and (problem := report.disk.find_problem(report.free_disk_bytes)):
        raise RunDirectoryError(f"run directory '{run_dir}': {problem}")
    if report.disk is not None and report.disk.peak_bytes > report.free_disk_bytes:
        report.notes.append(
            f"the run writes up to {report.disk.peak_bytes / 2**30:.1f} GiB, but the disk has only "
            f"{report.free_disk_bytes / 2**30:.1f} GiB free: lower checkpoint.keep_last, or choose another output_dir."
        )
