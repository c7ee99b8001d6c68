"""`roll compare`: runs side by side, from the files in their directories.

config.yaml ──► keys that differ ─────────────────────────────┐
summary.json, metrics.jsonl ──► outcome, held-out, time ──────┼──► tables, or JSON
metrics.jsonl ──► means of the last common steps ──────────────┘
"""

from __future__ import annotations

import fnmatch
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.config.document import read
from roll.config.former_names import rename_config, rename_metric
from roll.errors import RunDirectoryError, UserError
from roll.tracking import RunDirectory, Summary, read_untrusted_metrics
from roll.tracking.escape import shorten
from roll.tracking.reading.files import SafeDirectory, parse_json
from roll.tracking.sinks.base import flatten
from roll.tracking.summary import summarize

__all__ = ["compare_runs"]

RECENT_STEPS = 5
_MAX_SUMMARY_BYTES = 2**20
DEFAULT_METRICS = ("reward/*", "eval/*", "training/loss", "entropy/*", "agreement/*", "response/*", "rollout/length*")
"""Metrics that are compared by default."""
MAX_WIDTH = 160
_MISSING_CELL = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ComparedRun:
    """Data of one run in a comparison."""

    label: str
    settings: dict[str, Any]
    """Configured values by dotted key, without the keys that always differ between runs."""
    summary: Summary
    steps: list[dict[str, float]]
    """Metrics of each training step, including the step number `step`."""
    evaluations: list[dict[str, float]]


def compare_runs(paths: Sequence[str], patterns: Sequence[str], *, as_json: bool) -> str:
    """Compare two or more runs, and return the comparison as text.

    Args:
        paths: run directories; every run is compared with the first.
        patterns: patterns of metric names; by default `DEFAULT_METRICS`.
        as_json: whether to return one JSON object instead of tables.

    Raises:
        UserError: there are fewer than two runs, a run cannot be read, or no metric matches.
    """
    if len(paths) < 2:
        raise UserError("a comparison requires at least two runs, for example `roll compare runs/a runs/b`.")
    runs = [_open_run(path) for path in paths]
    runs = [_make_label_unique(run, runs, path) for run, path in zip(runs, paths, strict=True)]
    found = {
        "configuration": _find_differences(runs),
        "outcome": _compare_outcomes(runs),
        "metrics": _compare_metrics(runs, patterns),
    }
    if as_json:
        return json.dumps({"runs": [run.label for run in runs], **found}, indent=2, ensure_ascii=True)
    return _render([run.label for run in runs], found)


def _open_run(path: str) -> _ComparedRun:
    run = RunDirectory.open(path)
    inside = SafeDirectory(run.path)
    try:
        inside.open(run.config_path.name).close()
        settings = flatten(rename_config(read(run.config_path).tree))
        lines = read_untrusted_metrics(run.metrics_path)
        summary_there = os.path.lexists(run.summary_path)
        written = parse_json(inside.read(run.summary_path.name, limit=_MAX_SUMMARY_BYTES)) if summary_there else {}
    except RunDirectoryError as error:
        raise RunDirectoryError(f"'{path}' cannot be compared: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"'{path}' is corrupted: the metrics cannot be read ({error}).") from error
    # The files are untrusted: a metric may have any type, and `summarize` computes with them.
    try:
        rows = [_read_numbers(row) for row in lines]
        summary = summarize(
            run.name,
            run.path,
            run.metrics_path,
            setup_s=_read_number(written, "setup_s"),
            peak_rss_bytes=_read_number(written, "peak_rss_bytes"),
            rows=lines,
        )
    except (ArithmeticError, RecursionError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise RunDirectoryError(f"'{path}' is corrupted: the metrics cannot be read ({error}).") from error
    return _ComparedRun(
        label=run.name,
        settings={key: value for key, value in settings.items() if key not in ("name", "output_dir")},
        summary=summary,
        steps=[row for kind, row in rows if kind == "train"],
        evaluations=[row for kind, row in rows if kind == "evaluation"],
    )


def _read_numbers(row: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Return the type of a row of metrics, and its numeric values by name."""
    values = {name: value for name in row if (value := _read_number(row, name)) is not None}
    return row["kind"], values


def _read_number(row: dict[str, Any], name: str) -> Any:
    """Return the value of `name` if it is a number that fits a float, else `None`."""
    value = row.get(name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and not abs(value) > sys.float_info.max else None


def _make_label_unique(run: _ComparedRun, runs: Sequence[_ComparedRun], path: str) -> _ComparedRun:
    """Return `run`, with `path` as its label if another run in `runs` has the same label."""
    if sum(other.label == run.label for other in runs) < 2:
        return run
    return _ComparedRun(
        label=str(Path(path)),
        settings=run.settings,
        summary=run.summary,
        steps=run.steps,
        evaluations=run.evaluations,
    )


def _find_differences(runs: Sequence[_ComparedRun]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, each with one value per run; `None` for a run without the key."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _compare_outcomes(runs: Sequence[_ComparedRun]) -> dict[str, list[float | str | None]]:
    """Return steps, held-out scores, rewards, durations, throughput, memory and failures: one value per run, by label.

    A value that no run has is omitted.
    """
    figures: dict[str, Callable[[Summary], float | str | None]] = {
        "steps": lambda s: s.num_steps,
        "held out: measure": lambda s: s.measure,
        "held out: before": lambda s: s.score_before,
        "held out: after": lambda s: s.score_after,
        "held out: best": lambda s: s.score_best,
        "reward, first 5 steps": lambda s: s.reward_first5,
        "reward, last 5 steps": lambda s: s.reward_last5,
        "setup (s)": lambda s: s.setup_s,
        "training (s)": lambda s: s.train_s,
        "evaluation (s)": lambda s: s.evaluate_s,
        "per step (s)": lambda s: s.seconds_per_step,
        "generated (tokens/s)": lambda s: s.generated_tokens_per_s,
        "trained (tokens/s)": lambda s: s.trained_tokens_per_s,
        "peak memory (GiB)": lambda s: None if s.peak_rss_bytes is None else s.peak_rss_bytes / 2**30,
        "answers without a reward": lambda s: s.infra_errors or None,
        "answers whose verifier timed out": lambda s: s.timeouts or None,
    }
    table = {label: [figure(run.summary) for run in runs] for label, figure in figures.items()}
    return {label: values for label, values in table.items() if any(value is not None for value in values)}


def _compare_metrics(runs: Sequence[_ComparedRun], patterns: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the metrics that match a pattern, each with one value per run, or `None` for a run without the metric.

    The value of a training metric is the mean over the last `RECENT_STEPS` steps that all runs have reached; the value
    of an evaluation metric is from the last evaluation that all runs have.
    """
    names = dict.fromkeys(name for run in runs for row in (*run.steps, *run.evaluations) for name in row)
    chosen = [
        name
        for name in sorted(names)
        if name != "step"
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in map(rename_metric, patterns or DEFAULT_METRICS))
    ]
    if patterns and not chosen:
        known = ", ".join(sorted({name.partition("/")[0] + "/*" for name in names if "/" in name}))
        raise UserError(f"no metric of these runs matches {' or '.join(map(repr, patterns))}. Known: {known}.")
    # Runs of different length are compared at the same step, since metrics change during training.
    last_step = min((run.steps[-1]["step"] for run in runs if run.steps), default=0)
    last_evaluation = _find_last_common_step({row["step"] for row in run.evaluations} for run in runs)
    found = {}
    for name in chosen:
        values = []
        for run in runs:
            recent = [row[name] for row in run.steps if name in row and row["step"] <= last_step][-RECENT_STEPS:]
            recent = recent or [row[name] for row in run.evaluations if name in row and row["step"] == last_evaluation]
            values.append(math.fsum(recent) / len(recent) if recent else None)
        if any(value is not None for value in values):
            found[name] = values
    return found


def _find_last_common_step(steps: Iterable[set[float]]) -> float | None:
    return max(set.intersection(*steps), default=None)


def _render(labels: Sequence[str], sections: dict[str, dict[str, list[Any]]]) -> str:
    screen = Console(file=io.StringIO(), width=MAX_WIDTH, force_terminal=False, color_system=None)
    titles = {
        "configuration": "Configuration: keys that differ",
        "outcome": "Outcome",
        "metrics": f"Metrics: means over the last {RECENT_STEPS} common steps; evaluations: the last common one",
    }
    for part, title in titles.items():
        screen.print(Text(title))
        if sections[part]:
            screen.print(
                _format_table(labels, sections[part], with_change=part != "configuration" and len(labels) == 2)
            )
        else:
            screen.print(Text("  none"))
        screen.print()
    assert isinstance(screen.file, io.StringIO)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().rstrip().splitlines())


def _format_table(labels: Sequence[str], rows: dict[str, list[Any]], *, with_change: bool) -> Table:
    table = Table(box=None, header_style="", padding=(0, 2, 0, 0))
    table.add_column("")
    for label in (*labels, *(["change"] if with_change else [])):
        table.add_column(Text(shorten(label, 60)), justify="right", overflow="fold")
    for name, values in rows.items():
        cells = [Text(_format_cell(value)) for value in values]
        table.add_row(Text(f"  {shorten(name, 80)}"), *cells, *([Text(_format_change(*values))] if with_change else []))
    return table


def _format_cell(value: Any) -> str:
    if value is None:
        return _MISSING_CELL
    if isinstance(value, float):
        return f"{value:.4g}"
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str), 60).replace("\n", "⏎")


def _format_change(before: Any, after: Any) -> str:
    """Format the change from `before` to `after`, also in percent unless `before` is almost 0.

    Return "" if a value is not a number, or if both are equal.
    """
    if not all(isinstance(value, int | float) for value in (before, after)) or before == after:
        return ""
    share = f" ({(after - before) / abs(before):+.0%})" if abs(before) > 1e-9 else ""
    return f"{after - before:+.3g}{share}"
