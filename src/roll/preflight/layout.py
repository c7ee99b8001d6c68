"""Checks whether a trainer's ranks can divide the model, and what each holds and sends, without weights or devices.

Runs in a separate process, whose process group responds immediately without communication: see `roll.training.dry_run`.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.parallel import ParallelConfig
from roll.config.run import RunConfig
from roll.config.training import TrainingConfig
from roll.errors import ModelError
from roll.preflight.report import Report
from roll.version import install_extra

if TYPE_CHECKING:
    from roll.training import TrainerSpec

__all__ = ["check_layout", "try_a_step"]

GIB = 2**30
SAY_EVERY_S = 10.0
_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron"}
"""The optional package that each training backend needs."""


def check_layout(report: Report, config: RunConfig) -> None:
    """Divide the model over several ranks, add adapters to some linear layers, and find the 8-bit layers, as the run
    would.

    A run with none of these is not tried.

    Raises:
        ModelError: the model cannot be divided this way, has no such layers, or the backend is not installed.
    """
    training, lora = config.section("training", TrainingConfig), config.model.lora
    backend = training.backend
    package = _PACKAGES.get(backend)
    if package is not None and find_spec(package) is None:
        said = f"training.backend is '{backend}', which is not installed here: {install_extra(backend)}"
        if config.cluster.type == "local":
            raise ModelError(f"{said}, or choose the back-end torch")
        report.notes.append(f"{said} on every machine of the run.")
    is_adapted_in_part = lora is not None and lora.target_modules != "all-linear"
    can_fail = config.roles["actor_train"].count > 1 or is_adapted_in_part or training.fp8 != "none"
    is_refused = report.model is None  # or not downloaded yet
    if can_fail and not is_refused and _is_here(config) and _can_be_tried(config):
        from roll.models import check_experts, resolve_model

        check_experts(resolve_model(config.model.path), training.parallel.ep)
        _ask(_request(config, 0, with_step=False))


def try_a_step(report: Report, config: RunConfig, say: Callable[[str], None] = lambda line: None) -> None:
    """Determine what a rank of each stage holds and sends in a step of full micro-batches.

    Args:
        say: called with the progress every ten seconds.

    Raises:
        ModelError: the model is not on this machine, or cannot be divided this way.
    """
    if not _can_be_tried(config):
        raise ModelError("a dry run is one of the back-end torch, without weights in 4 bits: leave --dry-run out")
    if not (_directory(config, or_config=True) / "config.json").is_file():
        raise ModelError(f"a dry run needs the model's configuration: '{config.model.path}' is not on this machine")
    parallel = config.section("training", TrainingConfig).parallel
    count, stages = config.roles["actor_train"].count, parallel.pp
    for stage in range(stages):
        rank = stage * count // stages
        which = f"rank {rank} of {count}" + (f", stage {stage + 1} of {stages}" if stages > 1 else "")
        found = _ask(_request(config, rank, with_step=True), lambda s, of=which: say(f"dry run of {of}: {s:.0f} s"))
        report.layout += _in_words(found, stage if stages > 1 else None)
    if stages > 1:
        report.layout.append(_idle(parallel))


def _can_be_tried(config: RunConfig) -> bool:
    """Return whether the backend `torch` divides the model, without weights in 4 bits."""
    lora = config.model.lora
    return config.section("training", TrainingConfig).backend == "torch" and (lora is None or lora.base == "as_is")


def _is_here(config: RunConfig) -> bool:
    return (_directory(config) / "config.json").is_file()


def _directory(config: RunConfig, *, or_config: bool = False) -> Path:
    """Return the directory of the model; with `or_config` also one in the hub's cache with only its config.json."""
    from roll.models import CATALOGUE, find_model, find_model_directory
    from roll.preflight.config_sizes import cached_config

    if config.model.path in CATALOGUE:
        return find_model(config.model.path) or Path(config.model.path)
    local = Path(config.model.path).expanduser()
    if local.is_dir():
        return find_model_directory(local) or local
    found = find_model(config.model.path)
    return found or (cached_config(config.model.path) if or_config else None) or local


def _request(config: RunConfig, rank: int, *, with_step: bool) -> tuple[TrainerSpec, bool]:
    from roll.training import TrainerSpec

    spec = TrainerSpec(
        model_path=str(_directory(config, or_config=with_step)),
        model=config.model,
        training=config.section("training", TrainingConfig),
        holds_reference=getattr(config, "trainer_holds_reference", False),
        rank=rank,
        world_size=config.roles["actor_train"].count,
        device="cpu",
    )
    return spec, with_step


def _ask(request: tuple[TrainerSpec, bool], waited: Callable[[float], None] = lambda s: None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        asked, said = Path(directory) / "asked", Path(directory) / "said"
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-P", "-m", __name__, str(asked), str(said)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trial:
            try:
                complaints = _waited(trial, waited)
            except BaseException:
                trial.kill()
                raise
        if trial.returncode != 0:
            last = complaints.strip().rpartition("\n")[2]
            raise ModelError(
                f"dividing the model could not be tried: exit code {trial.returncode}{last and ': '}{last}"
            )
        found = json.loads(said.read_text())
    if isinstance(found, str):
        raise ModelError(found)
    return found


def _waited(trial: subprocess.Popen[str], waited: Callable[[float], None]) -> str:
    """Wait for the process, and return its standard error."""
    began = time.monotonic()
    while True:
        try:
            return trial.communicate(timeout=SAY_EVERY_S)[1]
        except subprocess.TimeoutExpired:
            waited(time.monotonic() - began)


def _in_words(found: Mapping[str, Any], stage: int | None) -> Iterator[str]:
    layers = " and ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in found["layers"])
    where = "a trainer's rank" if stage is None else f"a rank of stage {stage}, with layers {layers},"
    yield (
        f"{where} holds {found['between'] / GIB:.2f} GiB between steps, {found['gradients'] / GIB:.2f} GiB of "
        f"gradients, and at most {found['peak'] / GIB:.2f} GiB"
    )
    for operation, ranks, size, count, together in found["traffic"]:
        yield f"  {count:,} x {operation} between {size} ({ranks}): {together / GIB:.2f} GiB"


def _idle(parallel: ParallelConfig) -> str:
    from roll.training.parallel.pipeline_schedule import bubble_fraction

    few, many = 2 * parallel.pp, 8 * parallel.pp
    shares = [bubble_fraction(num, parallel.pp, parallel.vpp) for num in (few, many)]
    parts = f" of {parallel.vpp} parts each" if parallel.vpp > 1 else ""
    return (
        f"stages{parts} wait for each other {shares[0]:.1%} of a step of {few} micro-batches on each data share, and "
        f"{shares[1]:.1%} of one of {many}"
    )


def _try(spec: TrainerSpec, with_step: bool) -> dict[str, Any] | str:
    """Return the result, or why the model cannot be divided."""
    import numpy as np

    from roll.errors import UserError
    from roll.training.dry_run import dry_run
    from roll.types import Needs, TrainingBatch, TrainingSample

    training = spec.training
    length = training.max_tokens_per_micro_batch
    text: dict[str, Any] = {
        "prefix_length": 1,
        "token_ids": np.zeros(length, dtype=np.int32),
        "loss_mask": np.arange(length) > 0,
        "advantages": np.zeros(length, dtype=np.float32),
    }
    parallel = training.parallel
    each = (
        parallel.pp + 1 if parallel.vpp == 1 else 2 * parallel.pp
    )  # enough to reach the in-flight maximum of full rounds
    count = each * spec.world_size // (parallel.pp * parallel.ranks_per_micro_batch)
    samples = tuple(TrainingSample(sample_id=str(i), unit=i, **text) for i in range(count))
    try:
        found = dry_run(spec, TrainingBatch(samples=samples) if with_step else None, Needs())
    except UserError as error:
        return str(error)
    traffic = [(*kind, count, found.bytes[kind]) for kind, count in found.counts.items()]
    layers = [(part[0], part[-1]) for part in found.layers]
    sizes = {"between": found.between, "gradients": found.gradients, "peak": found.peak}
    return {**sizes, "traffic": traffic, "layers": layers}


def _main(asked: str, said: str) -> None:
    Path(said).write_text(json.dumps(_try(*pickle.loads(Path(asked).read_bytes()))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
