"""The live display as a pure function: `Screen` in, a Rich renderable out."""

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

from roll.tracking.console_views import AnswerView, EvaluationView, RunHeader, StepView, clock_text
from roll.tracking.intervals import accuracy_text

__all__ = ["Screen", "one_line", "render", "sparkline", "stacked_bar", "time_left"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_COLOURS = {
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
_OTHER_PHASE = "white"
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\-_])")
_MOST_SHOWN = 4_000
"""Characters of a text that are used for a line, which is drawn several times a second."""
_LABEL_WIDTH = 10
_MAX_WIDTH = 110
_FEWEST_ROWS = 20
_FEWEST_COLUMNS = 72
"""With fewer columns, figures are stacked."""
_MUCH_CUT_OFF = 0.5
"""Share of truncated answers above which it is shown in red, as `alarms.unfinished_above` warns."""
_SMALLEST_SHARE = 0.01
_NUM_WARNINGS = 2


@dataclass(kw_only=True, slots=True)
class Screen:
    """Everything that the display shows."""

    header: RunHeader
    started: float
    """Start time of the run; all times are in seconds of one clock."""
    steps: list[StepView] = field(default_factory=list)
    finished_at: list[float] = field(default_factory=list)
    """End time of each step."""
    phase: str = ""
    phase_started: float = 0.0
    progress: tuple[int, int | None] | None = None
    note: str = "starting"
    answers: Sequence[AnswerView] = ()
    trouble: str = ""
    """Description of failures of this phase's answers."""
    evaluations: list[EvaluationView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def num_done(self) -> int:
        """Number of completed steps, including those before a resume."""
        return self.steps[-1].step if self.steps else self.header.resumed_at or 0


def render(screen: Screen, now: float, columns: int, rows: int) -> Group:
    """Render the whole display for a terminal of `columns` × `rows`; if rows are few, samples are left out first."""
    width = min(columns, _MAX_WIDTH)
    parts: list[Text | Table] = [_progress(screen, now, width), _now(screen, now), Text()]
    if screen.steps:
        parts += [_figures(screen, width), Text(), *_times(screen.steps[-1], width)]
    if screen.answers and rows >= _FEWEST_ROWS:
        labelled = zip(screen.answers, ("best", "worst"), strict=False)
        parts += [Text(), *(_answer(answer, label, width) for answer, label in labelled)]
    if screen.warnings:
        parts += [Text(), *_warnings(screen.warnings, width)]
    return Group(*parts)


def _progress(screen: Screen, now: float, width: int) -> Text:
    done, total = screen.num_done, screen.header.num_steps
    left = time_left(screen, now)
    tail = f"  {clock_text(now - screen.started)} elapsed"
    tail += "" if left is None else f"   {clock_text(left)} left"
    line = _label("step").append(f"{done:>{len(str(total))}}/{total}  ", "bold")
    length = max(8, width - cell_len(line.plain) - cell_len(tail))
    filled = round(length * min(1.0, done / total))
    line.append("━" * filled, "green").append("━" * (length - filled), "bright_black")
    return line.append(tail, "dim")


def _now(screen: Screen, now: float) -> Text:
    line = _label("")
    if screen.ended:
        return line.append("done" if screen.num_done >= screen.header.num_steps else "stopped", "dim")
    if not screen.phase:
        return line.append(screen.note, "dim")
    line.append(screen.phase, _phase_colour(screen.phase))
    if screen.progress is not None:
        done, total = screen.progress
        line.append(f"  {done} answers" if total is None else f"  {done} of {total} answers")
    line.append(f"  {screen.trouble}" if screen.trouble else "", "bold red")
    return line.append(f"  {now - screen.phase_started:.0f} s", "dim")


def _figures(screen: Screen, width: int) -> Table:
    last = screen.steps[-1]
    left = [_course(screen, width // 2), _accuracy(screen.evaluations)]
    right = [_rate("generated", last.generated_per_s), _rate("trained", last.trained_per_s)]
    if last.cut_off is not None:
        left.append(_cut_off(last.cut_off))
        right.append(Text())
    table = Table.grid(expand=False, padding=0)
    if width < _FEWEST_COLUMNS:  # stacked
        table.add_column(width=width)
        for cell in (*left, *right):
            table.add_row(cell)
        return table
    table.add_column(width=width - 28)
    table.add_column(width=28)
    for cells in zip(left, right, strict=True):
        table.add_row(*cells)
    return table


def _course(screen: Screen, width: int) -> Text:
    """Render the reward of every step, or the loss if there are no rewards."""
    rewards = [s.reward for s in screen.steps if s.reward is not None]
    values = rewards or [math.nan if s.loss is None else s.loss for s in screen.steps]
    last = f"{values[-1]:.3f}" if math.isfinite(values[-1]) else "–"
    line = _label("reward" if rewards else "loss").append(last, "bold green")
    return line.append("  ").append(sparkline(values, max(8, min(40, width - 12))), "green")


def _accuracy(evaluations: Sequence[EvaluationView]) -> Text:
    measure = evaluations[-1].measure if evaluations else "accuracy"
    line = _label("accuracy" if measure == "accuracy" else "held-out")
    if not evaluations:
        return line.append("not measured yet", "dim")
    for index, view in enumerate([*evaluations[:1], *evaluations[1:][-1:]]):
        line.append(" → " if index else "", "dim")
        line.append("no answers" if view.value is None else f"{view.value:.3f}", "bold green" if index else "bold")
        line.append(" before" if view.step == 0 else f" after step {view.step}", "dim")
    last = evaluations[-1]
    if measure != "accuracy":
        return line.append(f" ({measure})", "dim")
    if last.value is None or not last.num:
        return line
    return line.append(accuracy_text(last.value, last.num).removeprefix(f"{last.value:.3f}"), "dim")


def _cut_off(share: float) -> Text:
    """Return the share of the last step's truncated answers, in red above a half."""
    style = "bold red" if share > _MUCH_CUT_OFF else "bold"
    return _label("cut off").append(f"{share:.0%}", style).append(" of answers, at rollout.max_new_tokens", "dim")


def _rate(name: str, per_s: float | None) -> Text:
    figure = "–" if per_s is None else f"{per_s:,.0f}"
    return Text.assemble((f"{name:<{_LABEL_WIDTH}}", "dim"), (f"{figure:>7}", "bold"), (" tok/s", "dim"))


def _times(view: StepView, width: int) -> list[Text]:
    bar = _label("time").append_text(stacked_bar(view.phases, view.duration_s, width - _LABEL_WIDTH - 9))
    bar.append(f" {view.duration_s:6.1f} s", "bold")
    legend = _label("")
    for name, seconds in view.phases.items():
        entry = f"{name} {seconds / max(view.duration_s, 1e-9):.0%}   "
        if seconds < _SMALLEST_SHARE * view.duration_s or cell_len(legend.plain) + cell_len(entry) + 2 > width:
            continue
        legend.append("■ ", _phase_colour(name)).append(entry)
    if view.bottleneck is None:
        return [bar, legend]
    return [bar, legend, _label("").append(view.bottleneck[0], "bold").append(" holds the step back", "dim")]


def _phase_colour(name: str) -> str:
    return _PHASE_COLOURS.get(name, _OTHER_PHASE)


def _answer(answer: AnswerView, label: str, width: int) -> Text:
    good = label == "best"
    line = _label(label).append(f"{answer.reward:5.2f}  ", "green" if good else "red")
    if answer.verdict:
        line.append(f"{one_line(answer.verdict, 10):<10}  ", "dim")
    room = max(16, width - cell_len(line.plain) - 4)
    prompt = one_line(answer.prompt, room // 2)
    line.append(prompt).append("  → ", "dim")
    return line.append(one_line(answer.answer, room - cell_len(prompt)), "italic")


def _warnings(warnings: Sequence[str], width: int) -> list[Text]:
    shown = [one_line(warning, width - _LABEL_WIDTH) for warning in warnings[-_NUM_WARNINGS:]]
    lines = [_label("warning", "yellow").append(text) for text in shown]
    hidden = len(warnings) - len(lines)
    return lines if not hidden else [*lines, _label("").append(f"and {hidden} before, in the log", "dim")]


def _label(text: str, style: str = "dim") -> Text:
    return Text(no_wrap=True, overflow="crop").append(f"{text:<{_LABEL_WIDTH}}", style)


def sparkline(values: Sequence[float], width: int) -> str:
    """Render `values` as blocks; more than `width` values are averaged in equal spans.

    The scale is 0 … 1 if all values are in that range, so that noise does not look like progress; otherwise lowest to
    highest.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    finite = [v for v in values if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def stacked_bar(phases: Mapping[str, float], total: float, width: int) -> Text:
    """Render shares of `total` side by side, in order, always `width` cells wide; the rest is empty."""
    bar = Text()
    scale = max(total, sum(phases.values()), 1e-9)
    begun, seconds_so_far = 0, 0.0
    for name, seconds in phases.items():
        seconds_so_far += seconds
        end = round(width * seconds_so_far / scale)
        bar.append("█" * (end - begun), _phase_colour(name))
        begun = end
    return bar.append(" " * (width - begun))


def time_left(screen: Screen, now: float) -> float | None:
    """Return the seconds to the last step, from the pace of the last ten (including evaluations between them)."""
    if not screen.steps or screen.ended:
        return None
    recent = screen.finished_at[-11:]
    between = (recent[-1] - recent[0]) / max(1, len(recent) - 1)
    pace = between if len(recent) > 1 else screen.steps[-1].duration_s
    return max(0.0, (screen.header.num_steps - screen.num_done) * pace - (now - recent[-1]))


def one_line(text: str, width: int) -> str:
    """Return `text` on one line of at most `width` cells, without the escape sequences that a model may generate."""
    visible = _ESCAPES.sub("", text[:_MOST_SHOWN])
    collapsed = " ".join("".join(c if c.isprintable() else " " for c in visible).split())
    if cell_len(collapsed) <= width and len(text) <= _MOST_SHOWN:
        return collapsed
    return set_cell_size(collapsed, max(0, width - 1)).rstrip() + "…"
