"""Python API of the commands, for scripts and notebooks: `roll.train(config)`.

Each function also works inside a running event loop, as in a notebook.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.callbacks import Callbacks, OnMetrics, OnSave
from roll.config.load import ConfigSource, Overrides, format_overrides, load_config, load_run_config
from roll.config.python_objects import Reward, Rows, load_with_python_objects, with_python_objects
from roll.process_environment import prepare_environment

if TYPE_CHECKING:
    from roll.config.run import RunConfig
    from roll.preflight import Report
    from roll.tracking import Summary

__all__ = ["check", "evaluate", "export", "load_config", "replay", "resume", "train"]


def train(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_save: OnSave | None = None,
) -> Summary:
    """Run a configuration from its first step to its last.

    Args:
        config: A loaded configuration, a YAML file, or a dictionary of the same structure.
        overrides: See `load_config`.
        data: Rows to train on, instead of the configuration's sources: dictionaries with `prompt` and, if the reward
            needs it, `answer`; other keys become the prompt's metadata. A list, a data frame, a `datasets.Dataset`, or
            any other iterable. If one of the sources is `{source: python, …}`, `data` has the rows of that source.
        held_out: Rows only for evaluation; by default a tenth of `data` is held out.
        reward: Reward of all answers, which replaces the rewards of the sources: a function `(text, answer, metadata)
            -> float` (also a closure, a lambda or a coroutine function), a type of reward such as `"math"`, a
            dictionary of settings, or a list of these.
        on_step: Called after every step, with the step's number and metrics.
        on_evaluation: Called after every evaluation, with the step's number and metrics.
        on_save: Called after every checkpoint, with the step's number and the checkpoint's directory.

    Returns:
        The content of `summary.json`.

    Raises:
        UserError: The run cannot start; the message states what to change.
        CallbackError: A callback failed; the message names the callback and the step.
    """
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_save=on_save)
    loaded = load_with_python_objects(config, overrides, data, held_out, reward)
    prepare_environment()
    from roll.pipelines import commands

    if loaded.cluster.calibration is None:
        return commands.train(loaded, callbacks)
    from roll.simulation.run_sharing import resolve_run_sharing

    resolved, note = resolve_run_sharing(loaded)
    return commands.train(resolved, callbacks, [note] if note else [])


def resume(
    run: str | Path,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
    on_save: OnSave | None = None,
) -> Summary:
    """Continue an interrupted run from its newest checkpoint.

    Relative paths in the configuration and in `overrides` are resolved against the directory in which the run was
    started, which is the working directory during the run. A finished run is not changed.

    Args:
        run: The run directory.
        overrides: Changes to the run's configuration, such as `training.num_steps=80`; they also apply when the run is
            resumed again.
        data: The rows with which the run was started, if they were passed as Python objects. Such rows are not saved,
            but are checked against the checkpoint.
        held_out: See `data`.
        reward: The functions with which the run was started, if they were passed as Python objects.
        on_step: See `train`.
        on_evaluation: See `train`.
        on_save: See `train`.

    Raises:
        RunDirectoryError: The directory is not a run directory.
        ConfigError: An override is invalid, or its key cannot be changed within a run, or Python objects are missing.
        CheckpointError: The rows differ from the rows with which the run began.
    """
    from roll.tracking.run_directory import RunDirectory

    changes = format_overrides(overrides)
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_save=on_save)
    directory = RunDirectory.open(run)
    home = directory.find_working_directory()
    path = directory.path if home == Path.cwd() else directory.path.resolve()
    with contextlib.chdir(home):
        # check overrides before the slow imports
        config = with_python_objects(load_run_config(path, changes), data, held_out, reward)
        prepare_environment()
        from roll.pipelines import commands

        return commands.resume(path, config, changes, callbacks)


def replay(
    run: str | Path,
    overrides: Overrides = (),
    *,
    only: Literal["train", "rollout"] = "train",
    checkpoint: str | Path | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
) -> Summary:
    """Replay a recorded run, without engines or without a trainer, in a new run directory.

    Args:
        run: Run directory of a run that was trained with `tracking.record_rollouts`.
        overrides: Changes to the run's configuration, such as `algorithm.type=gspo`.
        only: `train` trains on the recorded batches; `rollout` generates answers to the recorded prompts.
        checkpoint: Checkpoint to start from, instead of the run's initial model.
        data: See `resume`.
        held_out: See `resume`.
        reward: See `resume`.

    Raises:
        UserError: The run cannot be replayed; the message has the reason.
    """
    from roll.pipelines.recording.configuration import load_replay_config

    given = None if checkpoint is None else str(checkpoint)
    config = load_replay_config(run, overrides, only=only, checkpoint=given)
    return train(with_python_objects(config, data, held_out, reward))


def evaluate(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    model: str | Path | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
) -> dict[str, float]:
    """Evaluate a model on the held-out prompts, without training.

    Args:
        config: See `train`.
        overrides: See `train`.
        model: A model, a run, or a checkpoint, instead of the configuration's model.
        data: See `train`.
        held_out: See `train`.
        reward: See `train`.

    Returns:
        The `eval/…` metrics by name.

    Raises:
        UserError: The run cannot start; the message states what to change.
    """
    loaded = load_with_python_objects(config, overrides, data, held_out, reward)
    prepare_environment()
    from roll.pipelines import commands

    return commands.evaluate(loaded, None if model is None else str(model))


def check(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
) -> Report:
    """Check a run before it starts; takes seconds and does not load weights.

    Args:
        config: See `train`.
        overrides: See `train`.
        data: See `train`.
        held_out: See `train`.
        reward: See `train`.

    Returns:
        The report: `print` shows it, and `problems` lists the problems that keep the run from starting.

    Raises:
        ConfigError: The configuration is invalid.
    """
    loaded = load_with_python_objects(config, overrides, data, held_out, reward)
    prepare_environment()
    return check_loaded(loaded)


def check_loaded(config: RunConfig) -> Report:
    """Check a loaded configuration; see `check`."""
    from roll.pipelines.registry import CHECKS

    if config.cluster.calibration is None:
        return CHECKS.get(config.pipeline)(config)
    from roll.preflight.machine import inspect_machine
    from roll.simulation.run_sharing import resolve_run_sharing

    resolved, note = resolve_run_sharing(config, accelerated=inspect_machine().has_accelerators)
    report = CHECKS.get(resolved.pipeline)(resolved)
    if note:
        report.notes.append(f"{note}.")
    return report


def export(
    source: str | Path, target: str | Path, *, adapter: bool = False, to_hub: str | None = None, public: bool = False
) -> str:
    """Export a trained model as a Hugging Face directory, with a model card that lists the run's metrics.

    Args:
        source: A run directory, or a checkpoint of one.
        target: The directory to create; it must not exist yet.
        adapter: Whether to export the LoRA adapter (`model.lora`) as a PEFT adapter instead of the merged model.
        to_hub: A repository of the Hugging Face hub, `owner/name`, to upload the directory to; it is created if it does
            not exist. By default nothing is uploaded.
        public: Whether a newly created repository is public.

    Returns:
        The directory; with `to_hub`, the URL of the upload.

    Raises:
        RunDirectoryError: `source` has no checkpoint (or no adapter), or `target` exists.
        HubError: The upload failed; the message has the reason. The local directory is complete.
    """
    prepare_environment()
    from roll.pipelines import exporting

    if to_hub is not None:
        exporting.check_hub(to_hub)
    directory = exporting.export(Path(source), Path(target), adapter=adapter)
    return str(directory) if to_hub is None else exporting.upload(directory, to_hub, public=public)
