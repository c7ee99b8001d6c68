"""The run directories that the dashboard shows; paths are searched again each time the page lists the runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roll.dashboard.metrics import Metrics
from roll.dashboard.rollouts import Rollouts
from roll.dashboard.settings import Settings, to_finite_number
from roll.dashboard.trace import Trace
from roll.dashboard.vocabulary import Vocabularies, Vocabulary
from roll.errors import RunDirectoryError
from roll.models.catalogue import CATALOGUE, get_cached_directory
from roll.tracking.reading.files import SafeDirectory, parse_json

__all__ = ["Run", "Runs"]

_RUN_FILES = ("config.yaml", "metrics.jsonl", "rollouts")
_MAX_DEPTH = 3
"""Maximum depth of the search below a given directory."""
_MAX_RUNS = 1000
_MAX_LOADED_RUNS = 8
"""Maximum number of runs whose rollouts and traces are in memory."""
_MAX_INDEXING_S = 0.5
_MAX_SUMMARY_BYTES = 2**20
_IDLE_TIMEOUT_S = 120.0
"""Seconds without writes after which a run on another machine is treated as stopped, if its steps take at most a third
of this time."""


class Run:
    """One run directory, and the objects that read its files."""

    def __init__(self, path: Path, name: str, vocabularies: Vocabularies) -> None:
        self.path = path
        self.name = name
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
        self.lock = threading.RLock()  # reentrant: `load_vocabulary` is also called within `use_index`
        self.run_dir = SafeDirectory(path)
        self.settings = Settings(self.run_dir)
        self.metrics = Metrics(self.run_dir)
        self.trace = Trace(self.run_dir)
        self._rollouts: Rollouts | None = None
        self._vocabularies = vocabularies
        self.used_s = 0.0
        """Time of the last access to the run's rollouts or trace; 0 if they are not in memory."""

    @property
    def display_path(self) -> str:
        """The path as valid Unicode, even if its bytes are not UTF-8."""
        return str(self.path).encode("utf-8", "replace").decode()

    def get_newest_step(self) -> int:
        """Read new metrics, and return the newest training step; 0 if there is none."""
        with self.lock:
            self.metrics.refresh()
            steps = self.metrics.tables["train"].steps
            return steps[-1] if steps else 0

    def refresh(self) -> None:
        """Read settings and metrics that changed."""
        self.settings.refresh()
        self.metrics.is_asynchronous = bool(self.settings.get_number("rollout.scheduling.async_ratio"))
        self.metrics.refresh()

    @contextlib.contextmanager
    def use_index(self) -> Iterator[tuple[Rollouts, dict[str, Any]]]:
        """Yield the index of rollouts and entries to add to the response, while holding the lock.

        The entries contain the number of files that have not been read yet, and problems. Reading all files may take
        several calls.
        """
        with self.lock:
            self.refresh()
            self.used_s = time.monotonic()
            if self._rollouts is None:
                self._rollouts = Rollouts(self.run_dir, self.metrics.get_version_before)
            index = self._rollouts
            ended = time.monotonic() + _MAX_INDEXING_S
            pending = index.list_pending()
            while pending and time.monotonic() < ended:
                index.add(*pending[0], num_files_left=len(pending))
                del pending[0]
            progress: dict[str, Any] = {"problems": index.problems[:20]} if index.problems else {}
            if pending:
                progress["indexing"] = {"files_left": len(pending)}
            yield index, progress

    @contextlib.contextmanager
    def use_trace(self) -> Iterator[tuple[Trace, dict[str, Any]]]:
        """Yield the trace and entries to add to the response, while holding the lock.

        The entries contain the amount of data that has not been read yet, and problems.
        """
        with self.lock:
            self.used_s = time.monotonic()
            self.trace.refresh(_MAX_INDEXING_S)
            progress: dict[str, Any] = {"problem": self.trace.problem} if self.trace.problem else {}
            if self.trace.is_reading:
                progress["indexing"] = {"bytes_left": self.trace.bytes_left}
            yield self.trace, progress

    def load_vocabulary(self) -> Vocabulary | None:
        """Load the vocabulary of the run's tokenizer, or of its model in the catalog.

        The result is `None` if neither is on this machine.
        """
        with self.lock:
            found = self._vocabularies.find(self.run_dir)
            name = self.settings.get_text("model.path")
            if found is None and name in CATALOGUE:
                return self._vocabularies.find(SafeDirectory(get_cached_directory(CATALOGUE[name])))
            return found

    def release(self) -> None:
        """Free the memory of rollouts and trace; the next access reads their files again."""
        with self.lock:
            self._rollouts, self.trace, self.used_s = None, Trace(self.run_dir), 0.0

    def read_stamps(self) -> dict[str, Any]:
        """Return the stamps (such as size and time) of the files of metrics, rollouts and trace, to detect changes."""
        return {
            "metrics": self.run_dir.get_stamp("metrics.jsonl"),
            "rollouts": self.run_dir.get_stamp("rollouts"),
            "trace": self.run_dir.get_stamp("trace.json"),
        }

    def read_summary(self) -> dict[str, Any]:
        """Read `summary.json`; return an empty dictionary if it cannot be read."""
        try:
            found = parse_json(self.run_dir.read("summary.json", limit=_MAX_SUMMARY_BYTES))
        except (RunDirectoryError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def read_num_steps(self) -> float | None:
        """Return the number of steps of the whole run; `None` if it is set in epochs and no session has ended yet."""
        configured = to_finite_number(self.read_summary().get("steps_asked"))
        return configured if configured else self.settings.get_number("training.num_steps") or None

    def build_overview(self) -> dict[str, Any]:
        """Build the run's entry in the response of `/runs`."""
        with self.lock:
            self.refresh()
            train, evaluation = self.metrics.tables["train"], self.metrics.tables["eval"]
            problem = " ".join(filter(None, (self.settings.problem, self.metrics.problem)))
            stamps = [
                self.run_dir.get_stamp(name) for name in ("config.yaml", "metrics.jsonl", "trace.json", "rollouts")
            ]
            written = [stamp.modified_s for stamp in stamps if stamp is not None]
            num_steps = self.read_num_steps()
            scores = (evaluation.get_last(name) for name in ("eval/score", "eval/accuracy", "eval/loss"))
            held_out = next((score for score in scores if score is not None), None)
            return {
                "id": self.id,
                "name": self.name,
                "path": self.display_path,
                "pipeline": self.settings.get_text("pipeline"),
                "status": self._compute_status(max(written, default=0.0), num_steps),
                "problem": problem or None,
                "started_s": stamps[0].modified_s if stamps[0] else None,
                "updated_s": max(written, default=None),
                "step": train.steps[-1] if train.steps else 0,
                "num_steps": num_steps,
                "model": self.settings.get_text("model.path"),
                "reward": train.get_last("reward/mean"),
                "held_out": held_out,
            }

    def _compute_status(self, updated_s: float, num_steps: float | None) -> str:
        steps = self.metrics.tables["train"].steps
        if not steps and self.settings.problem:
            return "unreadable"
        if self._is_being_written(updated_s):
            return "running"
        ending = self.read_summary().get("ending")
        if isinstance(ending, dict):
            return "finished" if ending.get("kind") == "finished" else "stopped"
        return "finished" if num_steps is not None and steps and steps[-1] >= num_steps else "stopped"

    def _is_being_written(self, updated_s: float) -> bool:
        """Return whether a process holds the run's lock or, if locks are not visible, files changed recently."""
        stamp = self.run_dir.get_stamp(".lock")
        if stamp is None:
            return False
        # Taking the lock to test it could make a starting run fail.
        locks = _read_kernel_locks()
        if locks is not None and stamp.inode in locks:
            return True
        try:
            host = self.run_dir.read(".lock", limit=4096).decode("utf-8", "replace").rpartition(" on ")[2].strip()
        except ValueError:
            return False
        if host == socket.gethostname() and locks is not None:
            return False
        # /proc/locks does not show locks of other machines on a shared file system, so recent writes decide.
        step_s = self.metrics.tables["train"].get_last("time/step_s") or 0.0
        finished = self.run_dir.get_stamp("summary.json") is not None
        return not finished and time.time() - updated_s < max(_IDLE_TIMEOUT_S, 3 * step_s)


def _read_kernel_locks() -> frozenset[int] | None:
    """Return the inodes of the files that are locked on this machine; `None` if the system does not list them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        fields = (line.replace("-> ", "").split() for line in lines)
        return frozenset(int(field[5].rpartition(":")[2]) for field in fields if field[1] == "FLOCK")
    except (OSError, ValueError, IndexError):
        return None


class Runs:
    """The runs at and below some paths.

    Args:
        paths: run directories, or directories that contain run directories.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._runs: dict[str, Run] = {}
        self._vocabularies = Vocabularies()
        self._lock = threading.Lock()

    def get(self, run_id: str) -> Run:
        """Return a run by its ID, and release the least recently used runs if too many are in memory.

        Raises:
            KeyError: the run does not exist.
        """
        if run_id not in self._runs:
            self.list_runs()
        found = self._runs[run_id]
        loaded = sorted((run for run in self._runs.values() if run.used_s and run is not found), key=lambda r: r.used_s)
        for run in loaded[: max(0, len(loaded) - _MAX_LOADED_RUNS + 1)]:
            run.release()
        return found

    def list_runs(self) -> list[Run]:
        """Return all current runs, newest first."""
        with self._lock:
            found: dict[str, Run] = {}
            for path in self._paths:
                places = _find_run_dirs(path, _MAX_DEPTH) or [path]
                for place in places[: _MAX_RUNS - len(found)]:
                    run = Run(place, _build_name(place, path), self._vocabularies)
                    found[run.id] = self._runs.get(run.id, run)
            self._runs = found
            return list(found.values())


def _build_name(run_dir: Path, root: Path) -> str:
    inner = run_dir.relative_to(root)
    name = str(inner) if inner.parts else run_dir.resolve().name or str(run_dir)
    return name.encode("utf-8", "replace").decode()


def _find_run_dirs(path: Path, depth: int) -> list[Path]:
    """Return the run directories at `path` and up to `depth` levels below it; links are not followed."""
    entries = SafeDirectory(path).list_stamps()
    if any(mark in entries for mark in _RUN_FILES):
        return [path]
    if depth == 0:
        return []
    try:
        with os.scandir(path) as below:
            directories = sorted(entry.name for entry in below if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [
        place for name in directories if not name.startswith(".") for place in _find_run_dirs(path / name, depth - 1)
    ]
