"""The run directories that the dashboard shows, found repeatedly below the given paths."""

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
from roll.dashboard.settings import Settings, usual_number
from roll.dashboard.trace import Trace
from roll.dashboard.vocabulary import Vocabularies, Vocabulary
from roll.errors import RunDirectoryError
from roll.models.catalogue import CATALOGUE, cached_directory
from roll.tracking.reading.files import SafeDirectory, from_json

__all__ = ["Run", "Runs"]

_MARKS = ("config.yaml", "metrics.jsonl", "rollouts")
_DEPTH = 3
"""Levels of directories that are searched below a given one."""
_MOST_RUNS = 1000
_MOST_LOADED = 8
"""Maximum number of runs whose rollouts and traces are in memory."""
_INDEXING_S = 0.5
_LARGEST_SUMMARY = 2**20
_QUIET_S = 120.0
"""Time without writes after which a run on another machine counts as stopped, if its steps are shorter than a third
of it.
"""


class Run:
    """One run directory: its basic data, and its readers."""

    def __init__(self, path: Path, name: str, vocabularies: Vocabularies) -> None:
        self.path = path
        self.name = name
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
        self.lock = threading.RLock()
        self.inside = SafeDirectory(path)
        self.settings = Settings(self.inside)
        self.metrics = Metrics(self.inside)
        self.trace = Trace(self.inside)
        self._rollouts: Rollouts | None = None
        self._vocabularies = vocabularies
        self.used_s = 0.0
        """Time of the last access to its rollouts or trace; 0 if they are not in memory."""

    @property
    def shown_path(self) -> str:
        """The path as printable text, whatever bytes it consists of."""
        return str(self.path).encode("utf-8", "replace").decode()

    def step(self) -> int:
        """Return the newest step in the metrics."""
        with self.lock:
            self.metrics.refresh()
            steps = self.metrics.tables["train"].steps
            return steps[-1] if steps else 0

    def refresh(self) -> None:
        """Read changes of settings and metrics."""
        self.settings.refresh()
        self.metrics.is_asynchronous = bool(self.settings.number_of("rollout.scheduling.async_ratio"))
        self.metrics.refresh()

    @contextlib.contextmanager
    def indexed(self) -> Iterator[tuple[Rollouts, dict[str, Any]]]:
        """Hold the lock while the body uses the index of rollouts.

        Yields the index and its progress, since reading all files may take several calls.
        """
        with self.lock:
            self.refresh()
            self.used_s = time.monotonic()
            if self._rollouts is None:
                self._rollouts = Rollouts(self.inside, self.metrics.version_before)
            index = self._rollouts
            ended = time.monotonic() + _INDEXING_S
            pending = index.pending()
            while pending and time.monotonic() < ended:
                index.add(*pending[0], expected=len(pending))
                del pending[0]
            progress: dict[str, Any] = {"problems": index.problems[:20]} if index.problems else {}
            if pending:
                progress["indexing"] = {"files_left": len(pending)}
            yield index, progress

    @contextlib.contextmanager
    def traced(self) -> Iterator[tuple[Trace, dict[str, Any]]]:
        """Hold the lock while the body uses the trace; yields it and its progress."""
        with self.lock:
            self.used_s = time.monotonic()
            self.trace.refresh(_INDEXING_S)
            progress: dict[str, Any] = {"problem": self.trace.problem} if self.trace.problem else {}
            if self.trace.is_reading:
                progress["indexing"] = {"bytes_left": self.trace.bytes_left}
            yield self.trace, progress

    def vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary of the run's tokenizer, or of its model in the catalog; `None` if neither is on this
        machine.
        """
        with self.lock:
            found = self._vocabularies.of(self.inside)
            name = self.settings.text_of("model.path")
            if found is None and name in CATALOGUE:
                return self._vocabularies.of(SafeDirectory(cached_directory(CATALOGUE[name])))
            return found

    def release(self) -> None:
        """Free the memory of rollouts and trace; they are read again on the next access."""
        with self.lock:
            self._rollouts, self.trace, self.used_s = None, Trace(self.inside), 0.0

    def stamps(self) -> dict[str, Any]:
        """Return a stamp of each file that changes as the run proceeds, by the page's name for it; reads no file."""
        return {
            "metrics": self.inside.stamp("metrics.jsonl"),
            "rollouts": self.inside.stamp("rollouts"),
            "trace": self.inside.stamp("trace.json"),
        }

    def summary(self) -> dict[str, Any]:
        """Return `summary.json`; empty if it cannot be read."""
        try:
            found = from_json(self.inside.read("summary.json", limit=_LARGEST_SUMMARY))
        except (RunDirectoryError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def num_steps(self) -> float | None:
        """Return the number of steps of the whole run; `None` if epochs determine it and no session has ended yet."""
        asked = usual_number(self.summary().get("steps_asked"))
        return asked if asked else self.settings.number_of("training.num_steps") or None

    def overview(self) -> dict[str, Any]:
        """Return the run's entry in the response of `/runs`."""
        with self.lock:
            self.refresh()
            train, evaluation = self.metrics.tables["train"], self.metrics.tables["eval"]
            problem = " ".join(filter(None, (self.settings.problem, self.metrics.problem)))
            stamps = [self.inside.stamp(name) for name in ("config.yaml", "metrics.jsonl", "trace.json", "rollouts")]
            written = [stamp.modified_s for stamp in stamps if stamp is not None]
            num_steps = self.num_steps()
            scores = (evaluation.last(name) for name in ("eval/score", "eval/accuracy", "eval/loss"))
            held_out = next((score for score in scores if score is not None), None)
            return {
                "id": self.id,
                "name": self.name,
                "path": self.shown_path,
                "pipeline": self.settings.text_of("pipeline"),
                "status": self._status(max(written, default=0.0), num_steps),
                "problem": problem or None,
                "started_s": stamps[0].modified_s if stamps[0] else None,
                "updated_s": max(written, default=None),
                "step": train.steps[-1] if train.steps else 0,
                "num_steps": num_steps,
                "model": self.settings.text_of("model.path"),
                "reward": train.last("reward/mean"),
                "held_out": held_out,
            }

    def _status(self, updated_s: float, num_steps: float | None) -> str:
        steps = self.metrics.tables["train"].steps
        if not steps and self.settings.problem:
            return "unreadable"
        if self._is_written(updated_s):
            return "running"
        ending = self.summary().get("ending")
        if isinstance(ending, dict):
            return "finished" if ending.get("kind") == "finished" else "stopped"
        return "finished" if num_steps is not None and steps and steps[-1] >= num_steps else "stopped"

    def _is_written(self, updated_s: float) -> bool:
        """Return whether a process holds the run's lock or, if that is not visible, whether it wrote recently."""
        stamp = self.inside.stamp(".lock")
        if stamp is None:
            return False
        locks = _kernel_locks()
        if locks is not None and stamp.inode in locks:
            return True
        try:
            host = self.inside.read(".lock", limit=4096).decode("utf-8", "replace").rpartition(" on ")[2].strip()
        except ValueError:
            return False
        if host == socket.gethostname() and locks is not None:
            return False
        step_s = self.metrics.tables["train"].last("time/step_s") or 0.0
        finished = self.inside.stamp("summary.json") is not None
        return not finished and time.time() - updated_s < max(_QUIET_S, 3 * step_s)


def _kernel_locks() -> frozenset[int] | None:
    """Return the inodes of files that processes of this machine have locked (Linux); `None` if that is not visible."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        fields = (line.replace("-> ", "").split() for line in lines)
        return frozenset(int(field[5].rpartition(":")[2]) for field in fields if field[1] == "FLOCK")
    except (OSError, ValueError, IndexError):
        return None


class Runs:
    """The runs at and below some paths.

    Args:
        paths: run directories, or directories that contain some.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._runs: dict[str, Run] = {}
        self._vocabularies = Vocabularies()
        self._lock = threading.Lock()

    def get(self, run_id: str) -> Run:
        """Return a run by its id.

        Raises:
            KeyError: the run does not exist.
        """
        if run_id not in self._runs:
            self.all()
        found = self._runs[run_id]
        loaded = sorted((run for run in self._runs.values() if run.used_s and run is not found), key=lambda r: r.used_s)
        for run in loaded[: max(0, len(loaded) - _MOST_LOADED + 1)]:
            run.release()
        return found

    def all(self) -> list[Run]:
        """Return all current runs, newest first."""
        with self._lock:
            found: dict[str, Run] = {}
            for path in self._paths:
                places = _places(path, _DEPTH) or [path]
                for place in places[: _MOST_RUNS - len(found)]:
                    run = Run(place, _name(place, path), self._vocabularies)
                    found[run.id] = self._runs.get(run.id, run)
            self._runs = found
            return list(found.values())


def _name(place: Path, given: Path) -> str:
    inner = place.relative_to(given)
    name = str(inner) if inner.parts else place.resolve().name or str(place)
    return name.encode("utf-8", "replace").decode()


def _places(path: Path, depth: int) -> list[Path]:
    """Return the run directories at and below `path`; no link is followed."""
    entries = SafeDirectory(path).stamps()
    if any(mark in entries for mark in _MARKS):
        return [path]
    if depth == 0:
        return []
    try:
        with os.scandir(path) as below:
            directories = sorted(entry.name for entry in below if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [place for name in directories if not name.startswith(".") for place in _places(path / name, depth - 1)]
