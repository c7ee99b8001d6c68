"""Places besides `metrics.jsonl` that metrics go to: TensorBoard, Weights & Biases, SwanLab.

A sink that fails to start is the user's to mend (a missing package, no login). One that fails later never
stops a run: its failures are counted and logged, and the run's own record is whole without it.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from roll.errors import ConfigError
from roll.tracking import atomic
from roll.version import install_extra

if TYPE_CHECKING:
    from roll.config.operations import TrackingConfig
    from roll.tracking.run_directory import RunDirectory

__all__ = ["GuardedSink", "Sink", "SwanLabSink", "WandbSink", "check_packages", "open_sinks"]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the metrics of a step or of an evaluation."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_packages(config: TrackingConfig) -> None:
    """See that the packages of every configured sink are installed.

    Raises:
        ConfigError: one is not; says how to install it.
    """
    for name in ("wandb", "swanlab"):
        if getattr(config, name) is not None:
            _load(name)


def open_sinks(
    run: RunDirectory, config: TrackingConfig, settings: Mapping[str, Any], resumed_at: int
) -> list[GuardedSink]:
    """Open every configured sink.

    Args:
        settings: the resolved configuration, shown by hosted trackers.
        resumed_at: step that the run continues after; -1 where it starts.

    Raises:
        ConfigError: a sink cannot be opened.
    """
    makers: dict[str, Callable[[], Sink]] = {}
    if config.tensorboard:
        makers["tensorboard"] = lambda: _tensorboard(run, resumed_at)
    if config.wandb is not None:
        makers["wandb"] = lambda: WandbSink(run, str(config.wandb), settings)
    if config.swanlab is not None:
        makers["swanlab"] = lambda: SwanLabSink(run, str(config.swanlab), settings)
    return [GuardedSink(name, make) for name, make in makers.items()]


def _tensorboard(run: RunDirectory, resumed_at: int) -> Sink:
    from roll.tracking.tensorboard import TensorBoardSink

    return TensorBoardSink(run.tensorboard_dir, first_step=resumed_at + 1)


class GuardedSink:
    """A sink whose failures are counted, not raised.

    Raises:
        ConfigError: it cannot be opened (at construction only).
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name = name
        self.num_failures = 0
        try:
            self._sink = make()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"tracking.{name}: it could not be started ({type(error).__name__}: {str(error).rstrip('.')}). "
                f"Mend that, or go without: `tracking.{name}={'false' if name == 'tensorboard' else 'null'}`."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics on."""
        self._guard("log", lambda: self._sink.log(step, metrics))

    def close(self) -> None:
        """Finish the sink."""
        self._guard("close", self._sink.close)

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.num_failures += 1
            level = logging.WARNING if self.num_failures == 1 else logging.INFO
            logger.log(level, "tracking.%s failed (%s), training goes on: %s", self.name, what, error, exc_info=True)


class WandbSink:
    """One run of a Weights & Biases project; a resumed run continues it."""

    def __init__(self, run: RunDirectory, project: str, settings: Mapping[str, Any]) -> None:
        wandb = _load("wandb")
        self._run = wandb.init(project=project, name=run.name, dir=str(run.path), **_continued(run, settings))
        # A metric of its own: W&B's counter of steps only grows, a resumed run goes back to its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class SwanLabSink:
    """One experiment of a SwanLab project; a resumed run continues it."""

    def __init__(self, run: RunDirectory, project: str, settings: Mapping[str, Any]) -> None:
        self._swanlab = _load("swanlab")
        self._swanlab.init(
            project=project, experiment_name=run.name, logdir=str(run.path / "swanlog"), **_continued(run, settings)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


def _load(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"tracking.{package} is set, but the package '{package}' cannot be imported ({error}). "
            f"Install it with `{install_extra(package)}`, or leave it out: `tracking.{package}=null`."
        ) from error


def _continued(run: RunDirectory, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What hosted trackers know a run by: an id of 21 lower-case letters and digits, the same after a resume."""
    path = run.path / ".tracking-id"
    if not path.is_file():
        atomic.write_text(path, secrets.token_hex(11)[:21])
    return {"id": path.read_text(encoding="utf-8").strip(), "resume": "allow", "config": dict(settings)}
