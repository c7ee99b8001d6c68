"""Checks whether the model can be sharded over the trainer's ranks, and estimates each rank's memory and communication.

The check uses meta tensors, in a separate process whose process group does not communicate: see
`roll.training.dry_run`.
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
from roll.version import build_install_command

if TYPE_CHECKING:
    from roll.training import TrainerSpec

__all__ = ["check_layout", "dry_run_step"]

GIB = 2**30
PROGRESS_INTERVAL_S = 10.0
_BACKEND_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron"}
"""The optional package that each training backend needs."""


def check_layout(report: Report, config: RunConfig) -> None:
    """Check that the model can be sharded over the ranks, and has the linear layers that adapters and FP8 need.

    The check is skipped if it cannot fail: on one rank, without FP8, and if the settings of adapters name no layers.
    For the back-end `megatron`, the model's config.json is checked instead.

    Raises:
        ModelError: the model cannot be sharded this way, lacks these layers, or the backend is not installed or does
            not support the model.
    """
    training, lora = config.get_section("training", TrainingConfig), config.model.lora
    backend = training.backend
    package = _BACKEND_PACKAGES.get(backend)
    if package is not None and find_spec(package) is None:
        problem = f"training.backend is '{backend}', which is not installed here: {build_install_command(backend)}"
        if config.cluster.type == "local":
            raise ModelError(f"{problem}, or set training.backend to 'torch'")
        report.notes.append(f"{problem} on every machine of the run.")
    if backend == "megatron" and report.model is not None and _is_downloaded(config):
        _check_megatron(config, training)
    names_layers = lora is not None and bool(
        lora.target_modules != "all-linear" or lora.rank_pattern or lora.alpha_pattern
    )
    can_fail = config.roles["actor_train"].count > 1 or names_layers or training.fp8 != "none"
    is_rejected = report.model is None  # or the model is not downloaded yet
    if can_fail and not is_rejected and _is_downloaded(config) and _is_dry_run_supported(config):
        from roll.models import check_experts, resolve_model

        check_experts(resolve_model(config.model.path), training.parallel.ep)
        _run_check(_build_request(config, 0, with_step=False))


def _check_megatron(config: RunConfig, training: TrainingConfig) -> None:
    from roll.models import resolve_model
    from roll.models.sizes import get_text_config, read_config
    from roll.training.megatron.supported import check_model

    check_model(get_text_config(read_config(resolve_model(config.model.path))), training.parallel)


def dry_run_step(report: Report, config: RunConfig, report_progress: Callable[[str], None] = lambda line: None) -> None:
    """Dry-run a training step, and add memory and traffic of one rank of each pipeline stage to the report.

    Args:
        report: report of the check.
        config: the run.
        report_progress: called with a progress message every ten seconds.

    Raises:
        ModelError: the model's config.json is not on this machine, or the model cannot be sharded this way.
    """
    if not _is_dry_run_supported(config):
        raise ModelError("--dry-run supports only training.backend=torch without 4-bit weights (model.lora.base)")
    if not (_find_directory(config, allow_config_only=True) / "config.json").is_file():
        raise ModelError(
            f"--dry-run requires the model's config.json, but '{config.model.path}' is not on this machine: download "
            "the model first"
        )
    parallel = config.get_section("training", TrainingConfig).parallel
    count, stages = config.roles["actor_train"].count, parallel.pp
    for stage in range(stages):
        rank = stage * count // stages  # the first rank of the stage; the others of the stage hold as much
        which = f"rank {rank} of {count}" + (f", stage {stage + 1} of {stages}" if stages > 1 else "")
        found = _run_check(
            _build_request(config, rank, with_step=True),
            lambda s, of=which: report_progress(f"dry run of {of}: {s:.0f} s"),
        )
        report.layout += _format_layout(found, stage if stages > 1 else None)
    if stages > 1:
        report.layout.append(_format_bubble(parallel))


def _is_dry_run_supported(config: RunConfig) -> bool:
    """Return whether a dry run supports the configuration: the backend `torch`, without 4-bit weights."""
    lora = config.model.lora
    return config.get_section("training", TrainingConfig).backend == "torch" and (lora is None or lora.base == "as_is")


def _is_downloaded(config: RunConfig) -> bool:
    return (_find_directory(config) / "config.json").is_file()


def _find_directory(config: RunConfig, *, allow_config_only: bool = False) -> Path:
    """Return the model's directory; with `allow_config_only`, it may be a directory of the hub's cache with only
    config.json."""
    from roll.models import CATALOGUE, find_model, find_model_directory
    from roll.preflight.config_sizes import find_cached_config

    if config.model.path in CATALOGUE:
        return find_model(config.model.path) or Path(config.model.path)
    local = Path(config.model.path).expanduser()
    if local.is_dir():
        return find_model_directory(local) or local
    found = find_model(config.model.path)
    return found or (find_cached_config(config.model.path) if allow_config_only else None) or local


def _build_request(config: RunConfig, rank: int, *, with_step: bool) -> tuple[TrainerSpec, bool]:
    from roll.training import TrainerSpec

    spec = TrainerSpec(
        model_path=str(_find_directory(config, allow_config_only=with_step)),
        model=config.model,
        training=config.get_section("training", TrainingConfig),
        holds_reference=getattr(config, "trainer_loads_reference", False),
        rank=rank,
        world_size=config.roles["actor_train"].count,
        device="cpu",
    )
    return spec, with_step


def _run_check(request: tuple[TrainerSpec, bool], on_wait: Callable[[float], None] = lambda s: None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        request_file, result_file = Path(directory) / "request", Path(directory) / "result"
        request_file.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-P", "-m", __name__, str(request_file), str(result_file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trial:
            try:
                complaints = _wait_for(trial, on_wait)
            except BaseException:
                trial.kill()
                raise
        if trial.returncode != 0:
            last = complaints.strip().rpartition("\n")[2]
            raise ModelError(f"the layout check failed with exit code {trial.returncode}{last and ': '}{last}")
        found = json.loads(result_file.read_text())
    if isinstance(found, str):
        raise ModelError(found)
    return found


def _wait_for(process: subprocess.Popen[str], on_wait: Callable[[float], None]) -> str:
    """Wait until the process ends, and return its standard error; call `on_wait` regularly with the elapsed seconds."""
    began = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=PROGRESS_INTERVAL_S)[1]
        except subprocess.TimeoutExpired:
            on_wait(time.monotonic() - began)


def _format_layout(sizes: Mapping[str, Any], stage: int | None) -> Iterator[str]:
    layers = " and ".join(f"{first} to {last}" if last > first else f"{first}" for first, last in sizes["layers"])
    where = "a trainer rank" if stage is None else f"a rank of stage {stage} (layers {layers})"
    yield (
        f"{where} uses {sizes['between'] / GIB:.2f} GiB between steps, plus {sizes['gradients'] / GIB:.2f} GiB of "
        f"gradients; the peak is {sizes['peak'] / GIB:.2f} GiB"
    )
    for operation, ranks, size, count, together in sizes["traffic"]:
        yield f"  {count:,} x {operation} between {size} ({ranks}): {together / GIB:.2f} GiB"


def _format_bubble(parallel: ParallelConfig) -> str:
    from roll.training.parallel.pipeline_schedule import compute_bubble_fraction

    few, many = 2 * parallel.pp, 8 * parallel.pp
    shares = [compute_bubble_fraction(num, parallel.pp, parallel.vpp) for num in (few, many)]
    parts = f" with {parallel.vpp} model chunks each" if parallel.vpp > 1 else ""
    return (
        f"the pipeline bubble of the stages{parts} is {shares[0]:.1%} of a step with {few} micro-batches per data "
        f"rank, and {shares[1]:.1%} with {many}"
    )


def _dry_run_rank(spec: TrainerSpec, with_step: bool) -> dict[str, Any] | str:
    """Dry-run one rank, with a training step if `with_step`; return sizes and traffic, or a message if it fails."""
    import numpy as np

    from roll.errors import UserError
    from roll.training.dry_run import dry_run
    from roll.types import LossRequirements, TrainingBatch, TrainingSample

    training = spec.training
    length = training.max_tokens_per_micro_batch
    text: dict[str, Any] = {
        "prefix_length": 1,
        "token_ids": np.zeros(length, dtype=np.int32),
        "loss_mask": np.arange(length) > 0,
        "advantages": np.zeros(length, dtype=np.float32),
    }
    parallel = training.parallel
    # Enough micro-batches to reach the largest number in flight; interleaved schedules need full rounds of pp.
    each = parallel.pp + 1 if parallel.vpp == 1 else 2 * parallel.pp
    count = each * spec.world_size // (parallel.pp * parallel.ranks_per_micro_batch)
    samples = tuple(TrainingSample(sample_id=str(i), unit=i, **text) for i in range(count))
    try:
        found = dry_run(spec, TrainingBatch(samples=samples) if with_step else None, LossRequirements())
    except UserError as error:
        return str(error)
    traffic = [(*kind, count, found.bytes[kind]) for kind, count in found.counts.items()]
    layers = [(part[0], part[-1]) for part in found.layers]
    sizes = {"between": found.between_steps, "gradients": found.gradients, "peak": found.peak}
    return {**sizes, "traffic": traffic, "layers": layers}


def _main(request_file: str, result_file: str) -> None:
    Path(result_file).write_text(json.dumps(_dry_run_rank(*pickle.loads(Path(request_file).read_bytes()))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
