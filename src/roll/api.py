"""What the commands do, for scripts and notebooks: `roll.train(config)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll.config.load import ConfigSource, Overrides, as_override_list, load_config, load_run_config
from roll.process_environment import prepare_environment

if TYPE_CHECKING:
    from roll.pipelines import Summary

__all__ = ["load_config", "replay", "resume", "train"]


def train(config: ConfigSource, overrides: Overrides = ()) -> Summary:
    """Run a configuration from its first step to its last.

    Args:
        config: a loaded configuration, a YAML file, or a dictionary of the same form.
        overrides: as for `load_config`.

    Returns:
        The figures that `summary.json` holds.

    Raises:
        UserError: something in the configuration, the data, or this machine must be changed first.
    """
    loaded = load_config(config, overrides)
    prepare_environment()
    from roll import pipelines

    return pipelines.train(loaded)


def resume(run: str | Path, overrides: Overrides = ()) -> Summary:
    """Continue an interrupted run from its newest checkpoint.

    Args:
        run: the run directory.
        overrides: changes to its configuration, such as `training.num_steps=80`.

    Raises:
        RunDirectoryError: there is no run in that directory.
        ConfigError: an override is wrong, or would make another run of it.
    """
    from roll.tracking.run_directory import RunDirectory

    changes = as_override_list(overrides)
    directory = RunDirectory.open(run)
    load_run_config(directory.path, changes)  # a wrong override is refused before anything heavy is imported
    prepare_environment()
    from roll import pipelines

    return pipelines.resume(directory.path, changes)


def replay(
    run: str | Path,
    overrides: Overrides = (),
    *,
    only: Literal["train", "rollout"] = "train",
    checkpoint: str | Path | None = None,
) -> Summary:
    """Run a recorded run again, without engines or without a trainer, in a new run directory.

    Args:
        run: its directory; it was trained with `tracking.record_rollouts`.
        overrides: changes to its configuration, such as `algorithm.type=gspo`.
        only: `train` trains on the recorded batches; `rollout` answers the recorded prompts.
        checkpoint: where to begin, in place of the model that the run began with.

    Raises:
        UserError: this cannot be replayed; says why.
    """
    from roll.config.load_replay import load_replay_config

    given = None if checkpoint is None else str(checkpoint)
    return train(load_replay_config(run, overrides, only=only, checkpoint=given))
