"""Descriptions of devices, by name or from a YAML file in the format of `devices.yaml`."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError, field_validator

from roll.config.base import Section, option
from roll.config.document import Document, read
from roll.config.problems import describe_errors, format_problems
from roll.errors import ConfigError
from roll.registry import did_you_mean, format_search_directory

__all__ = ["DEVICES_FILE", "Device", "MeasuredEngine", "load_device", "load_entry", "read_shipped_entries"]

DEVICES_FILE = Path(__file__).parent / "devices.yaml"
"""File of the known devices, which is part of ROLL."""


class MeasuredEngine(Section, strict=False):
    """An engine whose step times were measured on this device; written by `roll simulate --calibrate`."""

    model: str = option(..., "Name of the model that the engine served.")
    tensor_parallel: int = option(..., "Number of devices of the engine.", ge=1)
    curve: tuple[tuple[float, float], ...] = option(
        ..., "Pairs of a number of requests, ascending, and the seconds of an engine step with this number."
    )
    prefill_token_s: float = option(..., "Time for each additional prefilled token.", unit="seconds")
    context_token_s: float = option(..., "Time for each token of context.", unit="seconds")

    @field_validator("curve")
    @classmethod
    def _check_curve(cls, curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        ascending = all(before < after for (before, _), (after, _) in itertools.pairwise(curve))
        if not curve or not ascending or min(seconds for _, seconds in curve) < 0:
            raise ValueError(
                "must be pairs [number of requests, seconds], with ascending numbers and non-negative seconds"
            )
        return curve


class Device(Section):
    """One accelerator, or one CPU worker slot.

    Rates are peak rates; an efficiency is the fraction of a peak rate that is reached in practice.
    """

    name: str = option(..., "Name of the device.")
    flops: float = option(..., "Peak operations per second of dense bfloat16 matmuls.", gt=0)
    memory_bandwidth: float = option(..., "Peak memory bandwidth, bytes per second.", gt=0)
    memory_bytes: float = option(..., "Size of the memory.", unit="bytes", gt=0)
    link_bandwidth: float = option(
        ..., "Bandwidth to the other devices of the machine, in one direction; bytes per second.", gt=0
    )
    network_bandwidth: float = option(
        ..., "Bandwidth to other machines, per device, in one direction; bytes per second.", gt=0
    )
    host_bandwidth: float | None = option(
        None,
        "Bandwidth to the memory of the host, in one direction; bytes per second. Without it, `roll plan` assumes that "
        "a switch of shared devices takes no time.",
        gt=0,
    )
    compute_efficiency: float = option(..., "Fraction of `flops` that an engine reaches with large batches.", gt=0)
    bandwidth_efficiency: float = option(..., "Fraction of `memory_bandwidth` that decoding reaches.", gt=0)
    training_efficiency: float = option(
        ..., "Fraction of `flops` that training reaches (model FLOPs utilization).", gt=0
    )
    step_overhead_s: float = option(
        ..., "Overhead of every engine step: kernel launches and the engine's scheduling.", unit="seconds", ge=0
    )
    request_overhead_s: float = option(
        ..., "Host overhead of every engine step for each request that decodes in it.", unit="seconds", ge=0
    )
    collective_latency_s: float = option(..., "Latency of one small all-reduce within a machine.", unit="seconds", ge=0)
    sync_overhead_s: float = option(..., "Overhead of every weight sync, for any size.", unit="seconds", ge=0)
    measured: MeasuredEngine | None = option(
        None, "Measured times that replace the roofline model, for one model and tensor-parallel size."
    )
    sources: dict[str, str] = option({}, "Source of each number, by key; `roll plan` prints it.")


T = TypeVar("T", bound=Section)


def load_device(name: str) -> Device:
    """Return a device by name, or the device that a YAML file describes.

    Raises:
        ConfigError: No device or file has this name, or a quantity is missing or is not a positive number.
    """
    return load_entry(Device, "device", name, DEVICES_FILE)


@functools.cache
def read_shipped_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a file that is part of ROLL, by name."""
    return read(file).tree


def load_entry(kind: type[T], label: str, name: str, file: Path, other_sources: str = "") -> T:
    """Return an entry of a file that is part of ROLL, or the entry that a user's YAML file describes.

    Args:
        kind: Class of the entry.
        label: Name of this type of entry, for messages.
        name: Name of the entry, or of a YAML file with the keys of an entry.
        file: File with the known entries.
        other_sources: Other sources that a user may specify, for messages.

    Raises:
        ConfigError: No entry or file has this name, or the user's file is not valid.
    """
    shipped = read_shipped_entries(file)
    if name in shipped:
        document = Document(name=name, tree={"name": name} | shipped[name])
    elif Path(name).suffix in {".yaml", ".yml"}:
        if not Path(name).exists():
            where = format_search_directory(name)
            raise ConfigError(f"{label} file '{name}' cannot be read: it does not exist{where}.")
        written = read(name)
        document = Document(name=name, tree={"name": Path(name).stem} | written.tree, origins=written.origins)
    else:
        raise ConfigError(
            f"unknown {label} '{name}'.{did_you_mean(name, list(shipped))} Known: {', '.join(shipped)}; or specify a "
            f"YAML file with the same keys{other_sources}."
        )
    try:
        return kind.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(format_problems(describe_errors(error, document, kind))) from None
