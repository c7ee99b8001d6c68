"""What `roll train`, `resume`, `eval` and `export` do; a command line or a script calls these."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from roll.cluster.base import open_cluster
from roll.config import RLVRConfig
from roll.config.load import load_run_config, resolved
from roll.errors import DataError, InfraError, RunDirectoryError, UserError
from roll.pipelines.judge import open_scoring
from roll.pipelines.material import engine_specs, prepare_material, sampling_plans
from roll.pipelines.measures import evaluation_metrics
from roll.pipelines.replay.work import open_work
from roll.pipelines.saved import (
    SavedRun,
    checkpoints,
    find_checkpoint,
    find_model_directory,
    read_checkpoint,
    remove_unfinished,
)
from roll.pipelines.scheduling import build_scheduler
from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.protocols import InferenceEngine
from roll.rollout import LLMProxy
from roll.tracking import RunDirectory, Summary, Tracker, read_metrics
from roll.tracking.sinks import check_packages

__all__ = ["evaluate", "export", "resume", "train"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


def train(config: RLVRConfig) -> Summary:
    """Run a configuration from its first step to its last, in a new run directory."""
    check_packages(config.tracking)
    with RunDirectory.create(config.run_dir, resolved(config)) as run:
        try:
            return _run(_train(config, run, None))
        except UserError:
            if not read_metrics(run.metrics_path):  # nothing to keep: the mended configuration may use the name
                shutil.rmtree(run.path)
            raise


def resume(run_path: Path, overrides: Sequence[str] = ()) -> Summary:
    """Continue a run from its newest checkpoint, or from the beginning where it has none."""
    config = load_run_config(run_path, overrides)
    with RunDirectory.open(run_path, lock=True) as run:
        remove_unfinished(run.checkpoints_dir)
        path = find_checkpoint(run.checkpoints_dir)
        saved = read_checkpoint(path) if path else None
        return _run(_train(config, run, saved))


async def _train(config: RLVRConfig, run: RunDirectory, saved: SavedRun | None) -> Summary:
    step = saved.state.step if saved else 0
    stop = StopRequest()
    with Tracker(run, config, resumed_at=step if saved else None) as tracker, stop_on_signals(stop):
        try:
            async with open_work(config, run, tracker, stop, saved=saved) as work:
                await work()
        except InfraError as error:
            if stop:  # the signal reached a part of the run as well, before it could be asked to stop
                raise Interrupted(stop.signal_name) from error
            raise
        return tracker.finish()


def evaluate(config: RLVRConfig, model: str | None = None) -> dict[str, float]:
    """Measure a model on the held-out prompts, without training.

    Args:
        model: a model, a run, or a checkpoint, in place of the configuration's model.
    """
    if model is not None:
        saved = find_model_directory(Path(model))
        path = str(saved) if saved else model
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    return _run(_evaluate(config))


async def _evaluate(config: RLVRConfig) -> dict[str, float]:
    material = prepare_material(config)
    draws = material.data.evaluation(config.evaluation.num_prompts)
    if not draws:
        raise DataError("no source holds prompts out: set `held_out`, a held-out file, or a held-out split.")
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config)
        stack.push_async_callback(cluster.close)
        engines = await cluster.start_engines(engine_specs(config, material, None))
        stack.push_async_callback(engines.close)
        pool = await cluster.start_pool(config.rollout.reward_workers)
        stack.push_async_callback(pool.close)
        rewards = await stack.enter_async_context(open_scoring(config, cluster, pool))
        proxy = LLMProxy(engines, prepare=_nothing_to_sync)
        scheduler = build_scheduler(config, proxy, rewards, material.data.renderer)
        return evaluation_metrics(await scheduler.collect(draws, sampling_plans(config, material.stop_token_ids)[1]))


async def _nothing_to_sync(engine: InferenceEngine) -> None:
    """A fresh engine has loaded the model that is evaluated."""


def export(source: Path, target: Path) -> Path:
    """Copy the model of a run's newest checkpoint, or of a checkpoint, to `target`, as Hugging Face safetensors.

    Raises:
        RunDirectoryError: `source` holds no checkpoint, or `target` exists.
    """
    model = find_model_directory(source)
    if model is None:
        saved = ", ".join(path.name for path in checkpoints(source).values())
        raise RunDirectoryError(
            f"'{source}' is neither a run with a checkpoint nor a checkpoint. "
            + (f"Its checkpoints: {saved}." if saved else "Give a run directory or `RUN/checkpoints/step-N`.")
        )
    if target.exists():
        raise RunDirectoryError(f"'{target}' exists already: nothing was written. Choose another directory.")
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    temporary.rename(target)
    return target


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where a loop is running already (a notebook): then in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="roll") as thread:
        return thread.submit(asyncio.run, work).result()
