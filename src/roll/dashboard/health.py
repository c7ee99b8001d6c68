"""Alarms and failures of a run, the outcomes of its draws, and its memory: the response of `/health`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll.dashboard.metrics import Metrics, nan_to_none
from roll.dashboard.rollouts import KINDS, Rollouts, decode_row, decode_step
from roll.errors import RunDirectoryError
from roll.records import read_record
from roll.tracking.reading.files import SafeDirectory, parse_json
from roll.tracking.reading.rollout_files import open_rollout_file

__all__ = ["Alarm", "LedgerEntry", "build_health", "count_causes", "find_alarms", "read_log", "read_newest_ledger"]

_ALARM_PATTERN = re.compile(r"(\S+ \S+) WARNING \S+: (?=.*alarms\.(\w+)\))(.*)")
_MAX_LOG_BYTES = 4 * 2**20
_MAX_LEDGER_BYTES = 64 * 2**20
_TAIL_LINES = 200
_MAX_ROWS = 100
_MAX_STEPS = 200
_MAX_CAUSE_LENGTH = 500
_OUTCOMES = ("trained", "filtered", "failed", "expired", "in_flight")
_ALARM_LABELS = {
    "timeouts_above": ("verdict", "timeout"),
    "unfinished_above": ("finish_reason", "length"),
    "infra_errors_above": ("status", "infra_error"),
}
"""Column and label of the rollouts that an alarm concerns; other alarms concern all rollouts of the step."""


@dataclass(slots=True)
class Alarm:
    """An alarm that was raised."""

    step: int | None
    """`None` for alarms that concern several steps."""
    alarm: str
    """The alarm's key below `alarms`."""
    message: str
    rows: list[int] = field(default_factory=list)
    """Index rows of the rollouts that raised the alarm, newest first."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The outcome of a draw, according to the ledger of the newest checkpoint."""

    outcome: str
    why: Any = ""
    draw_id: Any = None
    uid: Any = None
    """UID of the prompt; untrusted, so it may be any JSON value."""

    @property
    def reason(self) -> str:
        """Reason for the draw's outcome."""
        return str(self.why) if self.why else "no reason recorded"


def build_health(run_dir: SafeDirectory, metrics: Metrics, rollouts: Rollouts, patience: int) -> dict[str, Any]:
    """Return the response of `/health`: alarms, ledger, weight syncs, memory, failures and the end of the log.

    Parts that the run does not have are empty.

    Args:
        run_dir: the run's directory.
        metrics: metrics of the run.
        rollouts: index of the run's rollouts.
        patience: `alarms.patience` of the run.
    """
    log = read_log(run_dir)
    return {
        "alarms": find_alarms(metrics, rollouts, log, patience),
        "ledger": _build_ledger(run_dir, metrics),
        "syncs": _build_syncs(metrics),
        "memory": _build_memory(metrics),
        "failures": count_causes(run_dir, rollouts),
        "log_tail": log[-_TAIL_LINES:],
    }


def read_log(run_dir: SafeDirectory) -> list[str]:
    """Return the last non-empty lines of the controller's log; empty if it cannot be read."""
    try:
        with run_dir.open("logs", "controller-0.log") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _MAX_LOG_BYTES))
            return [line[:2000] for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except (RunDirectoryError, OSError):
        return []


def find_alarms(metrics: Metrics, rollouts: Rollouts, log: list[str], patience: int) -> list[Alarm]:
    """Return the alarms that were raised, with their messages from the log.

    An alarm is raised when its metric `alarm/…`, which counts consecutive steps, reaches `patience`. Alarms that
    concern several steps are only in the log, and have no step.
    """
    said: dict[str, list[str]] = {}
    for line in log:
        match = _ALARM_PATTERN.match(line)
        if match is not None:
            said.setdefault(match[2], []).append(match[3])
    table = metrics.tables["train"]
    found: list[Alarm] = []
    for name, column in table.columns.items():
        if not name.startswith("alarm/"):
            continue
        alarm = name.removeprefix("alarm/")
        counts = np.nan_to_num(np.array(column))
        for place in np.flatnonzero(counts == patience)[:_MAX_STEPS].tolist():
            step = table.steps[place]
            message = said[alarm][-1] if alarm in said else f"{alarm} at step {step} (alarms.{alarm})"
            found.append(Alarm(step, alarm, message))
    of_steps = {each.alarm for each in found}
    found += [Alarm(None, alarm, text) for alarm, texts in said.items() if alarm not in of_steps for text in texts]
    for each in found:
        each.rows = _find_alarm_rows(rollouts, each.step, each.alarm, patience)
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.alarm))


def _find_alarm_rows(rollouts: Rollouts, step: int | None, alarm: str, patience: int) -> list[int]:
    """Return the rows of the rollouts that an alarm concerns, newest first.

    The rollouts are from the last `patience` steps up to `step`, or from all training steps if `step` is `None`.
    """
    mask = rollouts.get_column("kind") == KINDS.index("train")
    if step is not None:
        mask &= (rollouts.get_column("step") > step - patience) & (rollouts.get_column("step") <= step)
    elif alarm not in _ALARM_LABELS:
        return []
    if alarm in _ALARM_LABELS:
        label, text = _ALARM_LABELS[alarm]
        texts = rollouts.get_label_values(label)
        mask &= rollouts.get_column(label) == (texts.index(text) if text in texts else -1)
    return np.sort(rollouts.get_column("row")[mask])[::-1][:_MAX_ROWS].tolist()


def _build_ledger(run_dir: SafeDirectory, metrics: Metrics) -> dict[str, Any]:
    table = metrics.tables["train"]
    totals = {outcome: table.get_last(f"ledger/{outcome}") for outcome in _OUTCOMES}
    columns = {
        outcome: _compute_differences(table.columns.get(f"ledger/{outcome}"), len(table.steps))
        for outcome in _OUTCOMES[:-1]
    }
    columns |= {"in_flight": np.array(table.columns.get("ledger/in_flight", [math.nan] * len(table.steps)))}
    known = {outcome: nan_to_none(column) for outcome, column in columns.items()}
    by_step = [
        {"step": step} | {outcome: known[outcome][index] for outcome in _OUTCOMES}
        for index, step in enumerate(table.steps)
    ]
    counts = {outcome: int(count) for outcome, count in totals.items() if count is not None}
    return {
        "fates": counts,
        "by_step": by_step if counts else [],
        "reasons": _count_reasons(read_newest_ledger(run_dir)),
    }


def _compute_differences(column: Any, length: int) -> np.ndarray:
    """Compute the increase of a cumulative count in each step, shape [length]; NaN if `column` is `None`."""
    return np.diff(np.array(column), prepend=0.0) if column is not None else np.full(length, math.nan)


def _count_reasons(entries: Sequence[LedgerEntry]) -> dict[str, int]:
    """Count the draws that were not used for training, by outcome and reason, most frequent first."""
    found = Counter(
        f"{entry.outcome}: {entry.reason}"[:300] for entry in entries if entry.outcome not in ("trained", "in_flight")
    )
    return dict(found.most_common(50))


def read_newest_ledger(run_dir: SafeDirectory) -> list[LedgerEntry]:
    """Return the entries of the newest checkpoint's ledger; empty without a checkpoint or a readable ledger."""
    # By length first: step-1000000 is newer than step-999999.
    checkpoints = sorted(run_dir.list_stamps("checkpoints"), key=lambda name: (len(name), name), reverse=True)
    for name in checkpoints[:1]:
        try:
            content = run_dir.read("checkpoints", name, "ledger.jsonl", limit=_MAX_LEDGER_BYTES)
        except RunDirectoryError:
            continue
        return list(_parse_entries(content))
    return []


def _parse_entries(content: bytes) -> Iterator[LedgerEntry]:
    for line in content.splitlines():
        try:
            entry = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(outcome := entry.get("outcome", entry.get("fate")), str):
            yield read_record(LedgerEntry, entry | {"outcome": outcome})


def _build_syncs(metrics: Metrics) -> list[dict[str, Any]]:
    table = metrics.tables["train"]
    names = [name for name in table.columns if name.startswith("sync/")]
    columns = {name.removeprefix("sync/"): nan_to_none(np.array(table.columns[name])) for name in names}
    versions = nan_to_none(np.array(table.columns["policy_version"])) if "policy_version" in table.columns else None
    return [
        {"step": step, "version": None if versions is None else versions[place]}
        | {name: column[place] for name, column in columns.items()}
        for place, step in enumerate(table.steps)
        if any(column[place] is not None for column in columns.values())
    ][-1000:]


def _build_memory(metrics: Metrics) -> dict[str, Any]:
    table = metrics.tables["train"]
    names = [name for name in table.columns if name.startswith("memory/") or name.endswith("_bytes")]
    return {name: {"steps": list(table.steps), "bytes": nan_to_none(np.array(table.columns[name]))} for name in names}


def count_causes(run_dir: SafeDirectory, rollouts: Rollouts) -> list[dict[str, Any]]:
    """Count the causes of answers without a reward, with their steps, most frequent first.

    Only the newest answers without a reward are read.
    """
    texts = rollouts.get_label_values("status")
    if "infra_error" not in texts:
        return []
    rows = np.sort(rollouts.get_column("row")[rollouts.get_column("status") == texts.index("infra_error")])[::-1]
    causes: dict[str, list[int]] = {}
    files: dict[str, list[tuple[int, int]]] = {}
    for row in rows[:2000].tolist():
        name, place = decode_row(row)
        files.setdefault(name, []).append((place, decode_step(row)))
    for name, places in list(files.items())[:50]:
        try:
            with open_rollout_file(run_dir, name) as file:
                found = file.read_excerpts([place for place, _ in places], "cause", _MAX_CAUSE_LENGTH)
        except RunDirectoryError:
            continue
        for cause, (_, step) in zip(found, places, strict=True):
            causes.setdefault(cause or "no cause recorded", []).append(step)
    return [
        {"cause": cause, "count": len(steps), "first_step": min(steps), "last_step": max(steps)}
        for cause, steps in sorted(causes.items(), key=lambda item: -len(item[1]))
    ]
