"""What `roll train`, `resume` and `eval` do; a command line or a script calls these."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.callbacks import Callbacks
from roll.config.load import resolved
from roll.config.run import RunConfig
from roll.errors import CallbackError, ConfigError, InfraError, UserError
from roll.pipelines.checkpoint_files import (
    SavedRun,
    find_checkpoint,
    find_model_directory,
    read_checkpoint,
    remove_unfinished,
)
from roll.pipelines.preparation import engine_begun
from roll.pipelines.registry import PIPELINES
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.running import run_to_end
from roll.tracking import RunDirectory, Summary, Tracker, read_metrics
from roll.tracking.logs import logs_aside
from roll.tracking.sinks import check_packages

__all__ = ["evaluate", "resume", "train"]


def train(config: RunConfig, callbacks: Callbacks | None = None) -> Summary:
    """Run a configuration from its first step to its last, in a new run directory."""
    check_packages(config.tracking)
    with RunDirectory.create(config.run_dir, resolved(config)) as run:
        try:
            return run_to_end(_train(config, run, None, callbacks=callbacks))
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
        path, pipeline = find_checkpoint(run.checkpoints_dir), PIPELINES.get(config.pipeline)
        saved = read_checkpoint(path, pipeline.state) if path else None
        if saved is not None and (num_steps := pipeline.facts(config, saved.state).num_steps) < saved.state.step:
            raise ConfigError(
                f"the configuration ends the run with step {num_steps}, but '{run_path}' is at step "
                f"{saved.state.step}: raise training.num_steps, and training.num_epochs where it has "
                "epochs, or export the model as it is."
            )
        return run_to_end(_train(config, run, saved, overrides, callbacks))


async def _train(
    config: RunConfig,
    run: RunDirectory,
    saved: SavedRun[Any] | None,
    overrides: Sequence[str] = (),
    callbacks: Callbacks | None = None,
) -> Summary:
    step = saved.state.step if saved else 0
    pipeline = PIPELINES.get(config.pipeline)
    facts = asdict(pipeline.facts(config, saved.state if saved else RunState()))
    tracker = Tracker(run, config, **facts, resumed_at=step if saved else None, callbacks=callbacks)
    stop = StopRequest(tracker.note)
    with tracker, stop_on_signals(stop), engine_begun(config):
        try:
            async with AsyncExitStack() as stack:
                session = Session(directory=run, tracker=tracker, stop=stop, saved=saved)
                with stop.cancelling():
                    work = await stack.enter_async_context(pipeline.open(config, session))
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
        config = config.with_model(str(saved) if saved else model)
    with logs_aside("eval"):
        return run_to_end(PIPELINES.get(config.pipeline).evaluate(config))
