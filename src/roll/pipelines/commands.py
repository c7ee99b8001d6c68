"""The commands `roll train`, `resume` and `eval`, as functions for a command line or a script."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.callbacks import Callbacks
from roll.config.history import find_differences, find_user_edits, format_override, get_value, read_config, read_origin
from roll.config.load import dump_config
from roll.config.run import RunConfig
from roll.errors import CallbackError, ConfigError, InfraError, UserError
from roll.pipelines.checkpoint_files import (
    SavedRun,
    find_checkpoint,
    find_model_directory,
    read_checkpoint,
    remove_unfinished,
)
from roll.pipelines.preparation import prestart_first_engine
from roll.pipelines.recording.files import truncate_recording
from roll.pipelines.registry import PIPELINES
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.running import run_to_end
from roll.tracking import RunDirectory, Summary, Tracker, read_metrics
from roll.tracking.logs import redirect_logs
from roll.tracking.run_directory import convert_write_errors
from roll.tracking.sinks import check_packages
from roll.tracking.summary import summarize

__all__ = ["evaluate", "resume", "train"]

logger = logging.getLogger(__name__)


def train(config: RunConfig, callbacks: Callbacks | None = None, notes: Sequence[str] = ()) -> Summary:
    """Run all steps of a configuration in a new run directory, and return a summary.

    Args:
        config: Configuration of the run.
        callbacks: Functions that are called during the run.
        notes: Lines that are shown before the first step.
    """
    check_packages(config.tracking)
    with RunDirectory.create(config.run_dir, dump_config(config)) as run:
        try:
            return run_to_end(_run_training(config, run, None, callbacks=callbacks, notes=notes))
        except UserError:
            if not read_metrics(run.metrics_path):  # nothing to keep: the corrected configuration may reuse the name
                shutil.rmtree(run.path)
            raise


def resume(
    run_path: Path, config: RunConfig, overrides: Sequence[str] = (), callbacks: Callbacks | None = None
) -> Summary:
    """Continue a run from its newest checkpoint, or from the beginning if it has none; return a summary.

    A finished run is not changed. If the run has no checkpoint, its earlier records are moved to a separate directory.

    Args:
        run_path: Run directory.
        config: Configuration of the run, with `overrides` applied.
        overrides: Overrides as given by the user, for the run's history.
        callbacks: Callbacks of the user.

    Raises:
        ConfigError: The run has finished, and `config` changes the run or its checkpoint is missing, or the checkpoint
            is beyond the configured number of steps.
    """
    with RunDirectory.open(run_path, lock=True) as run:
        remove_unfinished(run.checkpoints_dir)
        path, pipeline = find_checkpoint(run.checkpoints_dir), PIPELINES.get(config.pipeline)
        saved = read_checkpoint(path, pipeline.state) if path else None
        edited = [format_override(key, get_value(dump_config(config), key)) for key, _, _ in find_user_edits(run_path)]
        num_steps = pipeline.facts(config, saved.state if saved else RunState()).num_steps
        if _has_finished(run, saved, num_steps, _list_changes(run, config)):
            return summarize(run.name, run.path, run.metrics_path)
        notes = []
        if edited:
            notes.append(f"config.yaml was edited: the run continues with {', '.join(edited)}")
        if saved is None and (kept := run.move_earlier_files()) is not None:
            notes.append(f"there is no checkpoint, so the run starts again; the earlier records are kept in '{kept}'")
        return run_to_end(_run_training(config, run, saved, [*edited, *overrides], callbacks, notes))


def _list_changes(run: RunDirectory, config: RunConfig) -> list[str]:
    """Return the changes to a run's configuration as overrides; changes to the section `cluster` are ignored."""
    origin, now = read_origin(run.path), dump_config(config)
    before = read_config(run.path) if origin is None else origin.config
    changed = (key for key, _, _ in find_differences(before, now, ""))
    return [format_override(key, get_value(now, key)) for key in changed if not key.startswith("cluster.")]


def _has_finished(run: RunDirectory, saved: SavedRun[Any] | None, num_steps: int, changes: Sequence[str]) -> bool:
    """Return whether a run has finished all its steps; if so, log a warning that says how to continue.

    Args:
        run: Run directory.
        saved: Newest checkpoint of the run.
        num_steps: Configured number of steps.
        changes: Changes to the configuration; they have no effect on a finished run.

    Raises:
        ConfigError: The checkpoint is beyond `num_steps`, or the run has finished but has no checkpoint or would be
            changed.
    """
    more = "raise training.num_steps, and training.num_epochs where it has epochs"
    recorded = sum(row["kind"] == "train" for row in read_metrics(run.metrics_path))
    step = recorded if saved is None else saved.state.step
    if saved is not None and step > num_steps:
        raise ConfigError(
            f"'{run.path}' is already at step {step}, but the configuration has only {num_steps} steps: {more}, or "
            "export the model as it is."
        )
    if step < num_steps or not _has_summary(run, saved, step):
        return False
    if saved is None:
        raise ConfigError(
            f"'{run.path}' finished at step {recorded}, but it has no checkpoint to continue from: start a new run."
        )
    what = (
        f"'{run.path}' is finished: all {num_steps} steps are trained. To continue, {more}, as in `roll resume "
        f"{run.path} training.num_steps={2 * num_steps}`; `roll export {run.path} DIR` writes its model"
    )
    if changes:
        raise ConfigError(f"{what}. These overrides have no effect: {', '.join(changes)}.")
    logger.warning("%s. Nothing was started.", what)
    return True


def _has_summary(run: RunDirectory, saved: SavedRun[Any] | None, step: int) -> bool:
    """Return whether the run directory has the summary of a run that finished at step `step`."""
    try:
        summary = json.loads(run.summary_path.read_text(encoding="utf-8"))
        ending = summary.get("ending")
        if ending is None:  # an older version wrote it
            return saved is not None and saved.state.evaluated_at == step
        return ending["kind"] == "finished" and int(summary["num_steps"]) >= step
    except (OSError, ValueError, LookupError, TypeError):
        return False


async def _run_training(
    config: RunConfig,
    run: RunDirectory,
    saved: SavedRun[Any] | None,
    overrides: Sequence[str] = (),
    callbacks: Callbacks | None = None,
    notes: Sequence[str] = (),
) -> Summary:
    step = saved.state.step if saved else 0
    pipeline = PIPELINES.get(config.pipeline)
    facts = asdict(pipeline.facts(config, saved.state if saved else RunState()))
    tracker = Tracker(run, config, **facts, resumed_at=step if saved else None, callbacks=callbacks)
    stop = StopRequest(tracker.note)
    with convert_write_errors(run.path):
        truncate_recording(run.recording_dir, step if saved else -1)
    with tracker, stop_on_signals(stop), prestart_first_engine(config):
        for note in notes:
            tracker.note(note)
        try:
            async with AsyncExitStack() as stack:
                session = Session(directory=run, tracker=tracker, stop=stop, saved=saved)
                with stop.cancel_on_stop():
                    work = await stack.enter_async_context(pipeline.open(config, session))
                run.record_resume(dump_config(config), step, overrides)
                await work()
        except (InfraError, CallbackError) as error:
            hit = isinstance(error, InfraError) or isinstance(error.__cause__, KeyboardInterrupt)
            if stop and hit:  # the signal also reached another process of the run, before a stop
                raise Interrupted(stop.signal_name) from error
            raise
        return tracker.finish()


def evaluate(config: RunConfig, model: str | None = None) -> dict[str, float]:
    """Evaluate a model on held-out data without training, and return the metrics. Prints nothing.

    Args:
        config: Configuration of the run.
        model: A model, a run, or a checkpoint that replaces the configuration's model.
    """
    if model is not None:
        saved = find_model_directory(Path(model))
        config = config.with_model(str(saved) if saved else model)
    with redirect_logs("eval"):
        return run_to_end(PIPELINES.get(config.pipeline).evaluate(config))
