"""Problems of a run, the fates of its draws, and its machine's load: for `/health`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.metrics import Metrics, nulls
from roll.dashboard.rollouts import KINDS, Rollouts, file_of, step_of
from roll.errors import RunDirectoryError
from roll.records import read_record
from roll.tracking.reading.files import SafeDirectory, from_json
from roll.tracking.reading.rollout_files import open_rollout_table

__all__ = ["Alarm", "LedgerEntry", "alarms", "failures", "health", "log_of", "newest_ledger"]

_ALARM = re.compile(r"(\S+ \S+) WARNING \S+: (?=.*alarms\.(\w+)\))(.*)")
_LARGEST_LOG = 4 * 2**20
_LARGEST_LEDGER = 64 * 2**20
_TAIL_LINES = 200
_MOST_ROWS = 100
_MOST_STEPS = 200
_LONGEST_CAUSE = 500
_FATES = ("trained", "filtered", "failed", "expired", "in_flight")
_CULPRITS = {
    "timeouts_above": ("verdict", "timeout"),
    "unfinished_above": ("finish_reason", "length"),
    "infra_errors_above": ("status", "infra_error"),
}
"""Rollouts of its step that an alarm concerns; other alarms concern all rollouts."""


@dataclass(slots=True)
class Alarm:
    """An alarm that was raised."""

    step: int | None
    """`None` for alarms that consider several steps together."""
    alarm: str
    """The alarm's key below `alarms`."""
    message: str
    rows: list[int] = field(default_factory=list)
    """Index rows of the rollouts that raised it, newest first."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A draw of the newest checkpoint's ledger."""

    fate: str
    why: Any = ""
    draw_id: Any = None
    uid: Any = None
    """Untrusted: any JSON value."""

    @property
    def reason(self) -> str:
        """Reason for the draw's fate."""
        return str(self.why) if self.why else "no reason given"


def health(inside: SafeDirectory, metrics: Metrics, rollouts: Rollouts, patience: int) -> dict[str, Any]:
    """Return alarms, ledger, weight syncs, memory, failures and the end of the log; missing parts are empty.

    Args:
        inside: the run's directory.
        metrics: metrics of the run.
        rollouts: index of the run's rollouts.
        patience: `alarms.patience` of the run.
    """
    log = log_of(inside)
    return {
        "alarms": alarms(metrics, rollouts, log, patience),
        "ledger": _ledger(inside, metrics),
        "syncs": _syncs(metrics),
        "memory": _memory(metrics),
        "failures": failures(inside, rollouts),
        "log_tail": log[-_TAIL_LINES:],
    }


def log_of(inside: SafeDirectory) -> list[str]:
    """Return the end of the controller's log."""
    try:
        with inside.open("logs", "controller-0.log") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LARGEST_LOG))
            return [line[:2000] for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except (RunDirectoryError, OSError):
        return []


def alarms(metrics: Metrics, rollouts: Rollouts, log: list[str], patience: int) -> list[Alarm]:
    """Return the alarms that were raised, with their messages in the log.

    The metrics `alarm/…` count consecutive steps, and at `patience` the alarm is raised; alarms that consider several
    steps together are only in the log, without a step.
    """
    said: dict[str, list[str]] = {}
    for line in log:
        match = _ALARM.match(line)
        if match is not None:
            said.setdefault(match[2], []).append(match[3])
    table = metrics.tables["train"]
    found: list[Alarm] = []
    for name, column in table.columns.items():
        if not name.startswith("alarm/"):
            continue
        alarm = name.removeprefix("alarm/")
        counts = np.nan_to_num(np.array(column))
        for place in np.flatnonzero(counts == patience)[:_MOST_STEPS].tolist():
            step = table.steps[place]
            message = said[alarm][-1] if alarm in said else f"{alarm} at step {step} (alarms.{alarm})"
            found.append(Alarm(step, alarm, message))
    of_steps = {each.alarm for each in found}
    found += [Alarm(None, alarm, text) for alarm, texts in said.items() if alarm not in of_steps for text in texts]
    for each in found:
        each.rows = _rows(rollouts, each.step, each.alarm, patience)
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.alarm))


def _rows(rollouts: Rollouts, step: int | None, alarm: str, patience: int) -> list[int]:
    """Return the rollouts of the steps that raised an alarm, newest first."""
    mask = rollouts.column("kind") == KINDS.index("train")
    if step is not None:
        mask &= (rollouts.column("step") > step - patience) & (rollouts.column("step") <= step)
    elif alarm not in _CULPRITS:
        return []
    if alarm in _CULPRITS:
        label, text = _CULPRITS[alarm]
        texts = rollouts.texts(label)
        mask &= rollouts.column(label) == (texts.index(text) if text in texts else -1)
    return np.sort(rollouts.column("row")[mask])[::-1][:_MOST_ROWS].tolist()


def _ledger(inside: SafeDirectory, metrics: Metrics) -> dict[str, Any]:
    table = metrics.tables["train"]
    fates = {fate: table.last(f"ledger/{fate}") for fate in _FATES}
    columns = {fate: _differences(table.columns.get(f"ledger/{fate}"), len(table.steps)) for fate in _FATES[:-1]}
    columns |= {"in_flight": np.array(table.columns.get("ledger/in_flight", [math.nan] * len(table.steps)))}
    known = {fate: nulls(column) for fate, column in columns.items()}
    by_step = [{"step": step} | {fate: known[fate][place] for fate in _FATES} for place, step in enumerate(table.steps)]
    shown = {fate: int(count) for fate, count in fates.items() if count is not None}
    return {"fates": shown, "by_step": by_step if shown else [], "reasons": _reasons(newest_ledger(inside))}


def _differences(column: Any, length: int) -> np.ndarray:
    """Return what each step added to a count of the whole run."""
    return np.diff(np.array(column), prepend=0.0) if column is not None else np.full(length, math.nan)


def _reasons(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    """Return how many draws were not trained, by fate and reason."""
    found = Counter(
        f"{entry.fate}: {entry.reason}"[:300] for entry in entries if entry.fate not in ("trained", "in_flight")
    )
    return dict(found.most_common(50))


def newest_ledger(inside: SafeDirectory) -> list[LedgerEntry]:
    """Return the entries of the newest readable ledger of a checkpoint, each with its `fate`."""
    checkpoints = sorted(inside.stamps("checkpoints"), key=lambda name: (len(name), name), reverse=True)
    for name in checkpoints[:1]:
        try:
            content = inside.read("checkpoints", name, "ledger.jsonl", limit=_LARGEST_LEDGER)
        except RunDirectoryError:
            continue
        return list(_entries(content))
    return []


def _entries(content: bytes) -> Iterator[LedgerEntry]:
    for line in content.splitlines():
        try:
            entry = from_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("fate"), str):
            yield read_record(LedgerEntry, entry)


def _syncs(metrics: Metrics) -> list[dict[str, Any]]:
    table = metrics.tables["train"]
    names = [name for name in table.columns if name.startswith("sync/")]
    columns = {name.removeprefix("sync/"): nulls(np.array(table.columns[name])) for name in names}
    versions = nulls(np.array(table.columns["policy_version"])) if "policy_version" in table.columns else None
    return [
        {"step": step, "version": None if versions is None else versions[place]}
        | {name: column[place] for name, column in columns.items()}
        for place, step in enumerate(table.steps)
        if any(column[place] is not None for column in columns.values())
    ][-1000:]


def _memory(metrics: Metrics) -> dict[str, Any]:
    table = metrics.tables["train"]
    names = [name for name in table.columns if name.startswith("memory/") or name.endswith("_bytes")]
    return {name: {"steps": list(table.steps), "bytes": nulls(np.array(table.columns[name]))} for name in names}


def failures(inside: SafeDirectory, rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return why answers got no reward, the most frequent cause first, from the newest rows of some files."""
    texts = rollouts.texts("status")
    if "infra_error" not in texts:
        return []
    rows = np.sort(rollouts.column("row")[rollouts.column("status") == texts.index("infra_error")])[::-1]
    causes: dict[str, list[int]] = {}
    files: dict[str, list[tuple[int, int]]] = {}
    for row in rows[:2000].tolist():
        name, place = file_of(row)
        files.setdefault(name, []).append((place, step_of(row)))
    for name, places in list(files.items())[:50]:
        try:
            with open_rollout_table(inside, name) as file:
                found = file.beginnings([place for place, _ in places], "cause", _LONGEST_CAUSE)
        except RunDirectoryError:
            continue
        for cause, (_, step) in zip(found, places, strict=True):
            causes.setdefault(cause or "no cause given", []).append(step)
    return [
        {"cause": cause, "count": len(steps), "first_step": min(steps), "last_step": max(steps)}
        for cause, steps in sorted(causes.items(), key=lambda item: -len(item[1]))
    ]
