"""Open the configured trackers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from roll.registry import Registry
from roll.tracking.sinks.base import Sink, SinkArguments, load_client
from roll.tracking.sinks.guarded import GuardedSink

if TYPE_CHECKING:
    from roll.config.operations import TrackingConfig
    from roll.tracking.run_directory import RunDirectory

__all__ = ["SINKS", "check_packages", "open_sinks"]

SINKS: Registry[Callable[[SinkArguments], Sink]] = Registry(
    "tracker",
    {
        "tensorboard": "roll.tracking.sinks.tensorboard:TensorBoardSink",
        "wandb": "roll.tracking.sinks.wandb:WandbSink",
        "swanlab": "roll.tracking.sinks.swanlab:SwanLabSink",
        "mlflow": "roll.tracking.sinks.mlflow:MlflowSink",
        "trackio": "roll.tracking.sinks.trackio:TrackioSink",
    },
)
"""Sinks by the key of `tracking` that enables them, which is also the name of the package and of the extra."""


def check_packages(config: TrackingConfig) -> None:
    """Check that the packages of every configured tracker are installed.

    Raises:
        ConfigError: A package is not installed; the message has the install command.
    """
    for name in _list_enabled_trackers(config):
        load_client(name)


def open_sinks(
    run: RunDirectory, config: TrackingConfig, settings: Mapping[str, Any], resumed_at: int
) -> list[GuardedSink]:
    """Open every configured tracker.

    Args:
        run: Directory of the run.
        config: The configured trackers.
        settings: The resolved configuration, which trackers show.
        resumed_at: Step after which the run continues; -1 for a new run.

    Raises:
        ConfigError: A tracker cannot be opened; open trackers are closed.
    """
    sinks: list[GuardedSink] = []
    try:
        for name, project in _list_enabled_trackers(config).items():
            arguments = SinkArguments(run=run, project=project, settings=settings, resumed_at=resumed_at)
            sinks.append(GuardedSink(name, partial(_open, name, arguments)))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def _open(name: str, arguments: SinkArguments) -> Sink:
    return SINKS.get(name)(arguments)


def _list_enabled_trackers(config: TrackingConfig) -> dict[str, str]:
    """Return the project of every enabled tracker, by name; an empty string for TensorBoard, which has no projects."""
    values = {name: getattr(config, name) for name in SINKS if getattr(config, name, None) not in (None, False)}
    return {name: value if isinstance(value, str) else "" for name, value in values.items()}
