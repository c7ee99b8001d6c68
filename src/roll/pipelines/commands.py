"""What `roll train`, `resume` and `eval` do; a command line or a script calls these."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from roll.callbacks import Callbacks
from roll.cluster.base import open_cluster
from roll.config.load import resolved
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.run import RunConfig
from roll.errors import CallbackError, ConfigError, DataError, InfraError, UserError
from roll.pipelines.checkpoint_files import (
    SavedRun,
    find_checkpoint,
    find_model_directory,
    read_checkpoint,
    remove_unfinished,
)
from roll.pipelines.generation import open_generation, start_roles
from roll.pipelines.learning.failures import describe, failures_of
from roll.pipelines.measures import evaluation_metrics
from roll.pipelines.preparation import prepare, sampling_plans
from roll.pipelines.rlvr.pipeline import open_pipeline
from roll.pipelines.run import Session
from roll.pipelines.start_notes import where_it_runs
from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.running import run_to_end
from roll.tracking import RunDirectory, Summary, Tracker, read_metrics
from roll.tracking.logs import logs_aside
from roll.tracking.sinks import check_packages

__all__ = ["evaluate", "resume", "train"]

logger = logging.getLogger(__name__)


def train(config: RunConfig, callbacks: Callbacks | None = None) -> Summary:
    """Run a configuration from its first step to its last, in a new run directory."""
    check_packages(config.tracking)
    with RunDirectory.create(config.run_dir, resolved(config)) as run:
        try:
            return run_to_end(_train(config.of(RLVRConfig), run, None, callbacks=callbacks))
        except UserError:
            if not read_metrics(run.metrics_path):  # nothing to keep: the mended configuration may use the name
                shutil.rmtree(run.path)
            raise


def resume(
    run_path: Path, config: RunConfig, overrides: Sequence[str] = (), callbacks: Callbacks | None = None
) -> Summary:
    """Continue a run from its newest checkpoint, or from the beginning where it has none.

    Args:
        run_path: its directory.
        config: of the run, changed by `overrides`.
        overrides: as the user wrote them, for the run's history.
        callbacks: of the user.
    """
    with RunDirectory.open(run_path, lock=True) as run:
        remove_unfinished(run.checkpoints_dir)
        path = find_checkpoint(run.checkpoints_dir)
        saved = read_checkpoint(path) if path else None
        known = config.of(RLVRConfig)
        if saved is not None and known.training.num_steps < saved.state.step:
            raise ConfigError(
                f"training.num_steps is {known.training.num_steps}, but '{run_path}' is at step {saved.state.step}: "
                "raise it, or export the model as it is."
            )
        return run_to_end(_train(known, run, saved, overrides, callbacks))


async def _train(
    config: RLVRConfig,
    run: RunDirectory,
    saved: SavedRun | None,
    overrides: Sequence[str] = (),
    callbacks: Callbacks | None = None,
) -> Summary:
    step = saved.state.step if saved else 0
    stop = StopRequest()
    tracker = Tracker(
        run,
        config,
        method=config.algorithm.type,
        where=where_it_runs(config),
        num_steps=config.training.num_steps,
        rollouts_per_step=config.rollouts_per_step,
        resumed_at=step if saved else None,
        callbacks=callbacks,
    )
    with tracker, stop_on_signals(stop):
        try:
            async with open_pipeline(config, Session(directory=run, tracker=tracker, stop=stop, saved=saved)) as work:
                run.adopt(resolved(config), step, overrides)
                await work()
        except (InfraError, CallbackError) as error:
            hit = isinstance(error, InfraError) or isinstance(error.__cause__, KeyboardInterrupt)
            if stop and hit:  # the signal reached a part of the run as well, before it could be asked to stop
                raise Interrupted(stop.signal_name) from error
            raise
        return tracker.finish()


def evaluate(config: RunConfig, model: str | None = None) -> dict[str, float]:
    """Measure a model on the held-out prompts, without training: see `evaluation_metrics`. Prints nothing.

    Args:
        model: a model, a run, or a checkpoint, in place of the configuration's model.
    """
    if model is not None:
        saved = find_model_directory(Path(model))
        path = str(saved) if saved else model
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    with logs_aside("eval"):
        return run_to_end(_evaluate(config.of(RLVRConfig)))


async def _evaluate(config: RLVRConfig) -> dict[str, float]:
    prepared = prepare(config)
    draws = prepared.data.evaluation(config.evaluation.num_prompts)
    if not draws:
        raise DataError("no source holds prompts out: set `held_out`, a held-out file, or a held-out split.")
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles)
        stack.push_async_callback(cluster.close)
        roles, _ = await start_roles(config, cluster, prepared, stack)
        generation = await open_generation(config, roles, prepared.data.renderer, stack)
        plan = sampling_plans(config, prepared.stop_token_ids)[1]
        groups = await generation.scheduler.collect(draws, plan)
        if text := describe(failures_of(groups)):
            logger.warning("%s", text)
        return evaluation_metrics(groups)
