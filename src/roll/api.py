"""What the commands do, for scripts and notebooks: `roll.train(config)`.

Each function also works where an event loop runs already, as in a notebook.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.callbacks import Callbacks, OnMetrics, OnSave
from roll.config.given import Reward, Rows, load_given, with_given
from roll.config.load import ConfigSource, Overrides, as_override_list, load_config, load_run_config
from roll.process_environment import prepare_environment

if TYPE_CHECKING:
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
        config: a loaded configuration, a YAML file, or a dictionary of the same form.
        overrides: as for `load_config`.
        data: rows to train on, in place of the configuration's sources: dictionaries with `prompt` and, where the
            reward needs it, `answer`; other keys become the prompt's metadata. A list, a data frame, a
            `datasets.Dataset`, or anything that can be iterated. Where one of the sources is `{source: python, …}`,
            they are its rows.
        held_out: rows for evaluation alone; by default a tenth of `data` is held out.
        reward: how answers are scored, in place of every source's own: a function `(text, answer, metadata) -> float`
            (a closure, a lambda and a coroutine function too), a reward's type such as `"math"`, its settings, or a
            list of these.
        on_step: called after every step, with its number and metrics.
        on_evaluation: called after every evaluation, with the step's number and metrics.
        on_save: called after every checkpoint, with the step's number and its directory.

    Returns:
        The figures that `summary.json` holds.

    Raises:
        UserError: something in the configuration, the data, or this machine must be changed first.
        CallbackError: a callback failed; names it and the step.
    """
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_save=on_save)
    loaded = load_given(config, overrides, data, held_out, reward)
    prepare_environment()
    from roll.pipelines import commands

    return commands.train(loaded, callbacks)


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

    Meanwhile the process works in the directory in which the run began, from which the relative paths of its
    configuration start, those of `overrides` included. A run that has ended is left as it is.

    Args:
        run: the run directory.
        overrides: changes to its configuration, such as `training.num_steps=80`; later continuations keep them.
        data: the rows that the run began with, where they were given as objects: no file keeps them. They are
            compared with the checkpoint.
        held_out: as `data`.
        reward: the functions that the run began with, where they were given as objects.
        on_step: as for `train`, and so are the others.

    Raises:
        RunDirectoryError: there is no run in that directory.
        ConfigError: an override is wrong, or would make another run of it; or objects are missing.
        CheckpointError: the rows are not those that the run began with.
    """
    from roll.tracking.run_directory import RunDirectory

    changes = as_override_list(overrides)
    callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_save=on_save)
    directory = RunDirectory.open(run)
    home = directory.working_directory()
    path = directory.path if home == Path.cwd() else directory.path.resolve()
    with contextlib.chdir(home):
        # a wrong override is refused before anything heavy is imported
        config = with_given(load_run_config(path, changes), data, held_out, reward)
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
    """Run a recorded run again, without engines or without a trainer, in a new run directory.

    Args:
        run: its directory; it was trained with `tracking.record_rollouts`.
        overrides: changes to its configuration, such as `algorithm.type=gspo`.
        only: `train` trains on the recorded batches; `rollout` answers the recorded prompts.
        checkpoint: where to begin, in place of the model that the run began with.
        data: as for `resume`, and so are `held_out` and `reward`.

    Raises:
        UserError: this cannot be replayed; says why.
    """
    from roll.pipelines.recording.configuration import load_replay_config

    given = None if checkpoint is None else str(checkpoint)
    config = load_replay_config(run, overrides, only=only, checkpoint=given)
    return train(with_given(config, data, held_out, reward))


def evaluate(
    config: ConfigSource,
    overrides: Overrides = (),
    *,
    model: str | Path | None = None,
    data: Rows | None = None,
    held_out: Rows | None = None,
    reward: Reward | None = None,
) -> dict[str, float]:
    """Measure a model on the held-out prompts, without training.

    Args:
        config: as for `train`, and so are `overrides`, `data`, `held_out` and `reward`.
        model: a model, a run, or a checkpoint, in place of the configuration's model.

    Returns:
        `eval/…` figures by name.

    Raises:
        UserError: something in the configuration, the data, or this machine must be changed first.
    """
    loaded = load_given(config, overrides, data, held_out, reward)
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
    """Find out all that can be known of a run before it starts; takes seconds and loads no weights.

    Args:
        config: as for `train`, and so are `overrides`, `data`, `held_out` and `reward`.

    Returns:
        The report: `print` shows it, and `problems` holds what keeps the run from starting, if anything does.

    Raises:
        ConfigError: this is not a configuration.
    """
    loaded = load_given(config, overrides, data, held_out, reward)
    prepare_environment()
    from roll.pipelines.registry import CHECKS

    return CHECKS.get(loaded.pipeline)(loaded)


def export(
    source: str | Path, target: str | Path, *, adapter: bool = False, to_hub: str | None = None, public: bool = False
) -> str:
    """Write a trained model as a Hugging Face directory, with a model card that holds the run's figures.

    Args:
        source: a run directory, or a checkpoint of one.
        target: a directory, which must not exist yet.
        adapter: write what was trained with `model.lora` as a PEFT adapter, in place of the merged model.
        to_hub: a repository of the Hugging Face hub, `owner/name`, that the directory is then uploaded to; it is made
            if it does not exist. By default nothing leaves this machine.
        public: whether a repository that is made can be seen by everybody.

    Returns:
        The directory; with `to_hub`, the address of what was uploaded.

    Raises:
        RunDirectoryError: `source` holds no checkpoint (or no adapter), or `target` exists.
        HubError: the upload failed; says why. The directory is complete.
    """
    prepare_environment()
    from roll.pipelines import exporting

    if to_hub is not None:
        exporting.check_hub(to_hub)
    directory = exporting.export(Path(source), Path(target), adapter=adapter)
    return str(directory) if to_hub is None else exporting.upload(directory, to_hub, public=public)
