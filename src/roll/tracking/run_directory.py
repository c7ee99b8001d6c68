"""The directory to which a run writes, and the names of its files.

runs/<name>/  config.yaml   config_history.yaml   metrics.jsonl   trace.json   summary.json   reward.png
              tokenizer.json   rollouts/step-000001.parquet   tensorboard/
              checkpoints/step-000020/…      logs/<role>-<rank>.log      recording/
              .origin.yaml                   before-restart-1/…
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from roll.errors import RunDirectoryError
from roll.registry import did_you_mean, format_search_directory
from roll.tracking import atomic

__all__ = ["RunDirectory", "convert_write_errors", "describe_missing_run"]

logger = logging.getLogger(__name__)

_LOCK_NAME = ".lock"
_SUBDIRECTORIES = ("rollouts", "tensorboard", "checkpoints", "logs")
_STEP_FILES = (
    *("trace.json", "summary.json", "reward.png", "loss.png", "rollouts", "tensorboard", "recording"),
    "metrics.jsonl",
)
"""Files that training steps write. The last one is moved last: while it exists, the move is incomplete."""


class RunDirectory:
    """Manages the files and the lock of a run's directory; `create` it for a new run, `open` it for an existing run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        """The resolved configuration, YAML."""
        self.metrics_path = path / "metrics.jsonl"
        """One JSON object per line: a training step or an evaluation."""
        self.trace_path = path / "trace.json"
        """Spans, for Perfetto or chrome://tracing."""
        self.summary_path = path / "summary.json"
        """Figures of the finished run, JSON."""
        self.rollouts_dir = path / "rollouts"
        """Parquet files of rollouts."""
        self.media_dir = path / "media"
        """Images by digest: see `roll.media`."""
        self.samples_dir = path / "samples"
        """Pictures and tables of the samples of a diffusion model."""
        self.recording_dir = path / "recording"
        """Input of `roll replay`: see `roll.pipelines.recording`."""
        self.tokenizer_path = path / "tokenizer.json"
        """The model's tokenizer, for decoding single tokens."""
        self.tensorboard_dir = path / "tensorboard"
        """TensorBoard event files."""
        self.checkpoints_dir = path / "checkpoints"
        """One directory per checkpoint."""
        self.logs_dir = path / "logs"
        """Logs of every process."""
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, path: Path | str, resolved_config: Mapping[str, Any]) -> RunDirectory:
        """Create the directories, lock them for this process, and write `config.yaml`.

        Raises:
            RunDirectoryError: The run exists already, another process writes to it, or the disk cannot be written.
        """
        from roll.config.document import dump
        from roll.config.history import ORIGIN_FILE

        run = cls(Path(path))
        with convert_write_errors(run.path):
            run._check_unused()
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            try:
                run._check_unused()  # again: another process may have created the run before this one had the lock
                run._make_directories()
                atomic.write_text(run.config_path, dump(resolved_config))
                atomic.write_text(run.path / ORIGIN_FILE, dump({"directory": os.getcwd(), "config": resolved_config}))
            except BaseException:
                run.close()
                raise
        return run

    @classmethod
    def open(cls, path: Path | str, *, lock: bool = False) -> RunDirectory:
        """Open an existing run: for writing (resume) with `lock=True`, otherwise for reading.

        Raises:
            RunDirectoryError: The path is not a run (the message lists runs nearby), or another process writes to the
                run.
        """
        run = cls(Path(path))
        if not run.config_path.is_file():
            raise RunDirectoryError(describe_missing_run(run.path))
        if lock:
            with convert_write_errors(run.path):
                run.lock()
                run._make_directories()
                for directory in (run.path, run.rollouts_dir):
                    atomic.remove_leftovers(directory)
                for directory in run.media_dir.glob("??"):  # another run may share the media
                    atomic.remove_leftovers(directory, min_age_s=3600.0)
        return run

    def record_resume(self, config: Mapping[str, Any], step: int, overrides: Sequence[str]) -> None:
        """Record that the run continues after `step` with the resolved configuration `config`.

        The history matches the configuration on disk even after a crash between two writes.

        Args:
            config: The configuration, with the overrides applied.
            step: Step of the checkpoint from which the run continues.
            overrides: Overrides of the command, for the history.

        Raises:
            RunDirectoryError: A file cannot be read or written.
        """
        from roll.config.document import dump, read
        from roll.config.history import (
            HISTORY_FILE,
            ORIGIN_FILE,
            build_transition_history,
            dump_entries,
            extend_history,
            read_config,
            read_history,
            read_origin,
        )

        on_disk, origin, before = read(self.config_path).tree, read_origin(self.path), read_history(self.path)
        current = read_config(self.path) if origin is None else origin.config
        history = extend_history(current, before, step, config, overrides)
        with convert_write_errors(self.path):
            if config != current:
                before = build_transition_history(before, history, step)
                atomic.write_text(self.path / HISTORY_FILE, dump_entries(before))
            if config != on_disk:
                atomic.write_text(self.config_path, dump(config))
            if origin is not None and config != origin.config:
                atomic.write_text(self.path / ORIGIN_FILE, dump({"directory": origin.directory, "config": config}))
            if history != before:
                atomic.write_text(self.path / HISTORY_FILE, dump_entries(history))

    def find_working_directory(self) -> Path:
        """Return the base directory of the configuration's relative paths.

        This is the directory from which `output_dir` and `name` lead to this run; the current directory takes
        precedence. If these paths are absolute, it is the directory in which the run started.
        """
        from roll.config.document import read
        from roll.config.history import get_value, read_origin

        here, own = Path.cwd(), self.path.resolve()
        tree = read(self.config_path).tree
        below = Path(str(get_value(tree, "output_dir") or "runs")).expanduser() / str(get_value(tree, "name") or "")
        if not below.is_absolute():
            if (here / below).resolve() == own:
                return here
            if ".." not in below.parts and own.parts[-len(below.parts) :] == below.parts:
                return Path(*own.parts[: -len(below.parts)])
        origin = read_origin(self.path)
        began = None if origin is None else Path(origin.directory)
        return began if began is not None and began.is_dir() else here

    def move_earlier_files(self) -> Path | None:
        """Move the files of earlier steps into `before-restart-N`, for a run that starts from the beginning.

        If the process is killed during the move, the next call completes it.

        Returns:
            The new directory; `None` if no step was recorded.

        Raises:
            RunDirectoryError: A file cannot be moved.
        """
        if not self.metrics_path.exists():
            return None
        number = 1
        while (target := self.path / f"before-restart-{number}" / _STEP_FILES[-1]).exists():
            number += 1
        target = target.parent
        with convert_write_errors(target):
            target.mkdir(exist_ok=True)
            for name in _STEP_FILES:
                # a directory that was moved before an interruption has been replaced by an empty one
                if (self.path / name).exists() and not (target / name).exists():
                    (self.path / name).rename(target / name)
            self._make_directories()
        return target

    def lock(self) -> None:
        """Lock the run for this process until `close` is called or the process ends.

        The kernel releases the lock even if this process is killed. Forked children do not inherit the lock, so a
        worker that outlives a killed controller does not keep the run locked.

        Raises:
            RunDirectoryError: Another process holds the lock; the message names the process.
        """
        if self._lock is not None:
            return
        path = self.path / _LOCK_NAME
        # A soft lock is a file, which would remain after a killed process; a lock of one thread could not be released
        # by another.
        lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            holder = path.read_text(errors="replace").strip() or "unknown"
            raise RunDirectoryError(
                f"run directory '{self.path}' is in use by process {holder}: "
                "wait until the process ends, stop it, or choose another name for this run."
            ) from None
        except OSError as error:
            if error.filename is not None:  # the file could not be opened
                raise
            logger.warning(
                "run directory '%s' cannot be locked on this file system (%s): do not run a second process on it",
                self.path,
                error,
            )
        path.write_text(f"{os.getpid()} on {socket.gethostname()}\n")
        self._lock = lock

    def close(self) -> None:
        """Release the lock of the run directory. Calling it twice is safe."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.resolve().name

    def get_rollouts_path(self, step: int) -> Path:
        """Return the path of the file with the rollouts of training step `step`."""
        return self.rollouts_dir / f"step-{step:06d}.parquet"

    def get_plot_path(self, measure: Literal["reward", "loss"]) -> Path:
        """Return the path of the reward plot, or of the loss plot for a run without rewards."""
        return self.path / f"{measure}.png"

    def get_evaluation_path(self, step: int) -> Path:
        """Return the path of the file with the rollouts of the evaluation after step `step`."""
        return self.rollouts_dir / f"eval-step-{step:06d}.parquet"

    def get_checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint after step `step`."""
        return self.checkpoints_dir / f"step-{step:06d}"

    def get_log_path(self, role: str, rank: int | str = 0) -> Path:
        """Return the path of the log of process `rank` of a role, such as `logs/engine-1.log`."""
        return self.logs_dir / f"{role}-{rank}.log"

    def _make_directories(self) -> None:
        for name in _SUBDIRECTORIES:
            (self.path / name).mkdir(exist_ok=True)

    def _check_unused(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(f"run directory '{self.path}' is a file: choose another `name` or `output_dir`.")
        other = f"`name={_find_free_name(self.path)}`"
        if self.config_path.exists():
            raise RunDirectoryError(
                f"run directory '{self.path}' already has a run. "
                f"Continue it with `roll resume {self.path}`, or choose another name for this run: {other}."
            )
        if _has_files(self.path):
            raise RunDirectoryError(
                f"run directory '{self.path}' is not empty and is not a run of ROLL. "
                f"Nothing was changed. Choose another name ({other}) or another `output_dir`."
            )


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` that occurs while writing to `path` to a `RunDirectoryError` with advice."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"cannot write '{error.filename or path}': {_get_advice(error)}") from error


def _get_advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "the disk is full. Free some space, or choose another disk with `output_dir=…`."
        case errno.EACCES | errno.EPERM:
            return "no permission. Choose a directory that you may write to with `output_dir=…`."
        case errno.EROFS:
            return "the file system is read-only. Choose another directory with `output_dir=…`."
        case errno.ENOTDIR | errno.EEXIST:
            return "a part of this path is a file, not a directory. Choose another `output_dir` or `name`."
        case errno.ENAMETOOLONG:
            return "the name is too long. Choose a shorter `name` or `output_dir`."
        case _:
            return f"{error.strerror or error}. Choose another directory with `output_dir=…`."


def _has_files(path: Path) -> bool:
    """Return whether `path` has any files other than the files left by an interrupted `create`."""
    for directory, _, files in os.walk(path):
        ours = {f for f in files if f.startswith(".") and f.endswith((".tmp", _LOCK_NAME))}
        if set(files) - (ours if Path(directory) == path else set()):
            return True
    return False


def _find_free_name(path: Path) -> str:
    number = 2
    while path.with_name(f"{path.name}-{number}").exists():
        number += 1
    return f"{path.name}-{number}"


def describe_missing_run(path: Path) -> str:
    """Build the error message for a path that is not a run; it lists the runs in `path` or, if there are none, next to
    `path`.
    """
    what = (
        f"'{path}' is not a run: it has no config.yaml."
        if path.is_dir()
        else f"there is no run '{path}'{format_search_directory(path)}."
    )
    place, runs = next(((place, found) for place in (path, path.parent) if (found := _list_runs(place))), (path, []))
    if not runs:
        return f"{what} There are no runs in '{path.parent}'; start one with `roll train`."
    listed = ", ".join(runs[:10]) + (f" and {len(runs) - 10} more" if len(runs) > 10 else "")
    meant = did_you_mean(path.name, runs) if place != path else ""
    return f"{what}{meant} Runs in '{place}': {listed}."


def _list_runs(path: Path) -> list[str]:
    try:
        return sorted(p.name for p in path.iterdir() if (p / "config.yaml").is_file())
    except OSError:
        return []
