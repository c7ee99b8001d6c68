"""Render the live display: a pure function from a `Screen` to a Rich renderable."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

from roll.tracking.console_views import AnswerView, EvaluationView, RunHeader, StepView, format_clock
from roll.tracking.intervals import format_accuracy

__all__ = ["Screen", "estimate_time_left", "fit_to_line", "render", "render_sparkline", "render_stacked_bar"]

_BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
_PHASE_COLORS = {
    "generate": "cyan",
    "wait": "cyan",
    "environment": "bright_cyan",
    "reward": "red",
    "train": "magenta",
    "sync": "yellow",
    "offload": "bright_yellow",
    "evaluate": "green",
    "checkpoint": "blue",
    "reference": "bright_blue",
    "record": "bright_black",
}
_DEFAULT_PHASE_COLOR = "white"
_ESCAPE_SEQUENCE_PATTERN = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_MAX_CHARACTERS = 4_000
"""Maximum number of characters of a prompt or answer to process for a line, which is drawn several times a second."""
_LABEL_WIDTH = 10
_MAX_WIDTH = 110
_MIN_ROWS = 20
_MIN_COLUMNS = 72
"""Minimum number of columns for figures side by side; in a narrower terminal, they are stacked."""
_HIGH_TRUNCATION_RATE = 0.5
"""Fraction of truncated answers above which it is shown in red; the default of `alarms.unfinished_above`."""
_MIN_SHOWN_FRACTION = 0.01
_NUM_WARNINGS = 2


@dataclass(kw_only=True, slots=True)
class Screen:
    """State of the live display."""

    header: RunHeader
    started_at: float
    """Start time of the run; all times are in seconds of one clock."""
    steps: list[StepView] = field(default_factory=list)
    finished_at: list[float] = field(default_factory=list)
    """End time of each step."""
    phase: str = ""
    phase_started_at: float = 0.0
    progress: tuple[int, int | None] | None = None
    note: str = "starting"
    answers: Sequence[AnswerView] = ()
    failures: str = ""
    """Short description of failed answers in this phase."""
    evaluations: list[EvaluationView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    has_ended: bool = False

    @property
    def num_done(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self.steps[-1].step if self.steps else self.header.resumed_at or 0


def render(screen: Screen, now: float, columns: int, rows: int) -> Group:
    """Render the whole display for a terminal of `columns` × `rows`; with few rows, samples are omitted first."""
    width = min(columns, _MAX_WIDTH)
    parts: list[Text | Table] = [_render_progress(screen, now, width), _render_phase(screen, now), Text()]
    if screen.steps:
        parts += [_render_metrics(screen, width), Text(), *_render_times(screen.steps[-1], width)]
    if screen.answers and rows >= _MIN_ROWS:
        labelled = zip(screen.answers, ("best", "worst"), strict=False)
        parts += [Text(), *(_render_answer(answer, label, width) for answer, label in labelled)]
    if screen.warnings:
        parts += [Text(), *_render_warnings(screen.warnings, width)]
    return Group(*parts)


def _render_progress(screen: Screen, now: float, width: int) -> Text:
    done, total = screen.num_done, screen.header.num_steps
    left = estimate_time_left(screen, now)
    tail = f"  {format_clock(now - screen.started_at)} elapsed"
    tail += "" if left is None else f"   {format_clock(left)} left"
    line = _format_label("step").append(f"{done:>{len(str(total))}}/{total}  ", "bold")
    length = max(8, width - cell_len(line.plain) - cell_len(tail))
    filled = round(length * min(1.0, done / total))
    line.append("━" * filled, "green").append("━" * (length - filled), "bright_black")
    return line.append(tail, "dim")


def _render_phase(screen: Screen, now: float) -> Text:
    line = _format_label("")
    if screen.has_ended:
        return line.append("done" if screen.num_done >= screen.header.num_steps else "stopped", "dim")
    if not screen.phase:
        return line.append(screen.note, "dim")
    line.append(screen.phase, _get_phase_color(screen.phase))
    if screen.progress is not None:
        done, total = screen.progress
        line.append(f"  {done} answers" if total is None else f"  {done} of {total} answers")
    line.append(f"  {screen.failures}" if screen.failures else "", "bold red")
    return line.append(f"  {now - screen.phase_started_at:.0f} s", "dim")


def _render_metrics(screen: Screen, width: int) -> Table:
    last = screen.steps[-1]
    left = [_render_reward(screen, width // 2), _render_evaluations(screen.evaluations)]
    right = [_render_rate("generated", last.generated_per_s), _render_rate("trained", last.trained_per_s)]
    if last.truncated_share is not None:
        left.append(_render_truncation_rate(last.truncated_share))
        right.append(Text())
    table = Table.grid(expand=False, padding=0)
    if width < _MIN_COLUMNS:  # stacked
        table.add_column(width=width)
        for cell in (*left, *right):
            table.add_row(cell)
        return table
    table.add_column(width=width - 28)
    table.add_column(width=28)
    for cells in zip(left, right, strict=True):
        table.add_row(*cells)
    return table


def _render_reward(screen: Screen, width: int) -> Text:
    """Render the last reward (or loss, without rewards) and a sparkline over all steps."""
    rewards = [s.reward for s in screen.steps if s.reward is not None]
    values = rewards or [math.nan if s.loss is None else s.loss for s in screen.steps]
    last = f"{values[-1]:.3f}" if math.isfinite(values[-1]) else "–"
    line = _format_label("reward" if rewards else "loss").append(last, "bold green")
    return line.append("  ").append(render_sparkline(values, max(8, min(40, width - 12))), "green")


def _render_evaluations(evaluations: Sequence[EvaluationView]) -> Text:
    measure = evaluations[-1].measure if evaluations else "accuracy"
    line = _format_label("accuracy" if measure == "accuracy" else "held-out")
    if not evaluations:
        return line.append("not measured yet", "dim")
    for index, view in enumerate([*evaluations[:1], *evaluations[1:][-1:]]):
        line.append(" → " if index else "", "dim")
        line.append("no answers" if view.value is None else f"{view.value:.3f}", "bold green" if index else "bold")
        line.append(" before" if view.step == 0 else f" after step {view.step}", "dim")
    last = evaluations[-1]
    if measure != "accuracy":
        return line.append(f" ({measure})", "dim")
    if last.value is None or not last.num_answers:
        return line
    return line.append(format_accuracy(last.value, last.num_answers).removeprefix(f"{last.value:.3f}"), "dim")


def _render_truncation_rate(truncation_rate: float) -> Text:
    """Render the fraction of truncated answers, in red if it is high."""
    style = "bold red" if truncation_rate > _HIGH_TRUNCATION_RATE else "bold"
    return (
        _format_label("truncated")
        .append(f"{truncation_rate:.0%}", style)
        .append(" of answers (rollout.max_new_tokens)", "dim")
    )


def _render_rate(name: str, per_s: float | None) -> Text:
    figure = "–" if per_s is None else f"{per_s:,.0f}"
    return Text.assemble((f"{name:<{_LABEL_WIDTH}}", "dim"), (f"{figure:>7}", "bold"), (" tok/s", "dim"))


def _render_times(view: StepView, width: int) -> list[Text]:
    bar = _format_label("time").append_text(render_stacked_bar(view.phases, view.duration_s, width - _LABEL_WIDTH - 9))
    bar.append(f" {view.duration_s:6.1f} s", "bold")
    legend = _format_label("")
    for name, seconds in view.phases.items():
        entry = f"{name} {seconds / max(view.duration_s, 1e-9):.0%}   "
        if seconds < _MIN_SHOWN_FRACTION * view.duration_s or cell_len(legend.plain) + cell_len(entry) + 2 > width:
            continue
        legend.append("■ ", _get_phase_color(name)).append(entry)
    if view.bottleneck is None:
        return [bar, legend]
    return [bar, legend, _format_label("").append(view.bottleneck[0], "bold").append(" is the bottleneck", "dim")]


def _get_phase_color(name: str) -> str:
    return _PHASE_COLORS.get(name, _DEFAULT_PHASE_COLOR)


def _render_answer(answer: AnswerView, label: str, width: int) -> Text:
    good = label == "best"
    line = _format_label(label).append(f"{answer.reward:5.2f}  ", "green" if good else "red")
    if answer.verdict:
        line.append(f"{fit_to_line(answer.verdict, 10):<10}  ", "dim")
    room = max(16, width - cell_len(line.plain) - 4)
    prompt = fit_to_line(answer.prompt, room // 2)
    line.append(prompt).append("  → ", "dim")
    return line.append(fit_to_line(answer.answer, room - cell_len(prompt)), "italic")


def _render_warnings(warnings: Sequence[str], width: int) -> list[Text]:
    recent = [fit_to_line(warning, width - _LABEL_WIDTH) for warning in warnings[-_NUM_WARNINGS:]]
    lines = [_format_label("warning", "yellow").append(text) for text in recent]
    hidden = len(warnings) - len(lines)
    return lines if not hidden else [*lines, _format_label("").append(f"and {hidden} earlier ones in the log", "dim")]


def _format_label(text: str, style: str = "dim") -> Text:
    return Text(no_wrap=True, overflow="crop").append(f"{text:<{_LABEL_WIDTH}}", style)


def render_sparkline(values: Sequence[float], width: int) -> str:
    """Render `values` as a line of block characters; more than `width` values are averaged in equal intervals.

    The scale is 0 to 1 if all values are in this range, so that noise does not look like progress; otherwise it ranges
    from the lowest to the highest value.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scale = (len(_BAR_CHARACTERS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BAR_CHARACTERS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def render_stacked_bar(phases: Mapping[str, float], total: float, width: int) -> Text:
    """Render each phase's fraction of `total` as a segment of one bar, in order; the bar is `width` cells wide."""
    bar = Text()
    scale = max(total, sum(phases.values()), 1e-9)
    begun, seconds_so_far = 0, 0.0
    # Rounds the running total instead of each share, so that the bar always has the right width.
    for name, seconds in phases.items():
        seconds_so_far += seconds
        end = round(width * seconds_so_far / scale)
        bar.append("█" * (end - begun), _get_phase_color(name))
        begun = end
    return bar.append(" " * (width - begun))


def estimate_time_left(screen: Screen, now: float) -> float | None:
    """Estimate the seconds until the run's last step ends, from the last ten steps and the evaluations between them."""
    if not screen.steps or screen.has_ended:
        return None
    recent = screen.finished_at[-11:]
    between = (recent[-1] - recent[0]) / max(1, len(recent) - 1)
    pace = between if len(recent) > 1 else screen.steps[-1].duration_s
    return max(0.0, (screen.header.num_steps - screen.num_done) * pace - (now - recent[-1]))


def fit_to_line(text: str, width: int) -> str:
    """Return `text` as one line of at most `width` cells, without escape sequences."""
    # Sequences are removed as a whole first: without the escape character, `[31m` would stay as text.
    visible = _ESCAPE_SEQUENCE_PATTERN.sub("", text[:_MAX_CHARACTERS])
    collapsed = " ".join("".join(c if c.isprintable() else " " for c in visible).split())
    if cell_len(collapsed) <= width and len(text) <= _MAX_CHARACTERS:
        return collapsed
    return set_cell_size(collapsed, max(0, width - 1)).rstrip() + "…"
