"""What the displays show, as text."""

from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console as RichConsole

from roll.tracking.console import PlainConsole, open_console
from roll.tracking.console_views import AnswerView, Console, EvaluationView, RunHeader, StepView
from roll.tracking.logs import Terminal
from roll.tracking.screen import Screen, estimate_time_left, fit_to_line, render, render_sparkline, render_stacked_bar

HEADER = RunHeader(name="demo", model="smollm2", algorithm="grpo", setup="local", directory="runs/demo", num_steps=40)


def view(step: int, **changes: object) -> StepView:
    values = {
        "step": step, "reward": step / 40, "duration_s": 4.0, "loss": 0.5, "generated_per_s": 912.0,
        "trained_per_s": 603.0, "phases": {"generate": 2.0, "train": 1.5, "sync": 0.25},
    }  # fmt: skip
    return StepView(**(values | changes))  # type: ignore[arg-type]


def get_text(screen: Screen, now: float = 60.0, columns: int = 100, rows: int = 40) -> str:
    console = RichConsole(file=io.StringIO(), record=True, width=columns, height=rows)
    console.print(render(screen, now, columns, rows))
    return console.export_text()


def running_screen() -> Screen:
    screen = Screen(header=HEADER, started_at=0.0)
    screen.steps = [view(i) for i in range(1, 13)]
    screen.finished_at = [5.0 * i for i in range(1, 13)]
    screen.phase, screen.phase_started_at, screen.progress = "generate", 57.0, (37, 64)
    screen.evaluations = [EvaluationView(step=0, value=0.1666), EvaluationView(step=10, value=0.5416)]
    screen.answers = (
        AnswerView(prompt="3 + 4 =", answer="It is\n7.", reward=1.0, verdict="correct"),
        AnswerView(prompt="8 + 9 =", answer="It is 16.", reward=0.0, verdict="wrong"),
    )
    screen.warnings = ["first", "second", "third"]
    return screen


@pytest.mark.parametrize("columns", [40, 46, 71, 72, 110])
def test_live_display_figures_stay_whole_on_a_narrow_terminal(columns: int) -> None:
    lines = get_text(running_screen(), columns=columns).splitlines()
    text = "\n".join(lines)
    for figure in ("generated", "trained", "0.167", "0.542"):
        assert figure in text
    assert text.count("tok/s") == 2
    assert all(len(line.rstrip()) <= columns for line in lines)


def test_live_display_the_display_says_all_that_a_run_must_say() -> None:
    text = get_text(running_screen())
    for part in (
        "12/40", "1:00 elapsed", "2:20 left", "generate  37 of 64 answers  3 s", "0.300",
        "0.167 before → 0.542 after step 10",
        "912 tok/s", "603 tok/s", "4.0 s", "generate 50%", "train 38%", "sync 6%", "generate is the bottleneck",
        "1.00  correct", "3 + 4 =  → It is 7.", "0.00  wrong", "8 + 9 =  → It is 16.",
        "second", "third", "and 1 earlier",
    ):  # fmt: skip
        assert part in text, part


def test_live_display_before_the_first_step_it_says_what_is_being_done() -> None:
    screen = Screen(header=HEADER, started_at=0.0, note="loading the model")
    assert "loading the model" in get_text(screen)
    assert "0/40" in get_text(screen)


def test_live_display_the_time_left_follows_the_pace_and_the_clock() -> None:
    screen = running_screen()  # a step every 5 s, although each takes 4 s: evaluations count
    assert estimate_time_left(screen, 60.0) == 28 * 5
    assert estimate_time_left(screen, 62.0) == 28 * 5 - 2
    screen.steps, screen.finished_at = [view(1)], [4.0]
    assert estimate_time_left(screen, 4.0) == 39 * 4
    screen.steps = []
    assert estimate_time_left(screen, 4.0) is None


@settings(deadline=None)
@given(st.integers(20, 200), st.integers(5, 60), st.text(max_size=300))
def test_live_display_no_line_is_wider_than_the_terminal_whatever_a_model_writes(
    columns: int, rows: int, answer: str
) -> None:
    screen = running_screen()
    screen.answers = (AnswerView(prompt=answer, answer=answer, reward=0.5, verdict=answer),)
    screen.warnings = [answer]
    for line in get_text(screen, columns=columns, rows=rows).splitlines():
        assert cell_len(line.rstrip()) <= columns


def test_live_display_a_low_terminal_does_without_samples() -> None:
    assert "It is" not in get_text(running_screen(), rows=15)


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(1, 80))
def test_live_display_shortened_text_is_one_printable_line_that_fits(text: str, width: int) -> None:
    line = fit_to_line(text, width)
    assert cell_len(line) <= width
    assert all(c.isprintable() for c in line)


def test_live_display_escape_sequences_of_a_model_are_removed() -> None:
    assert fit_to_line("a" + " " * 10**6 + "b", 40) == "a…"  # no more of it is read than a line can need
    assert fit_to_line("\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07text\x07", 40) == "red text"


def test_live_display_a_sparkline_of_rewards_between_0_and_1_has_a_fixed_scale() -> None:
    assert render_sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert render_sparkline([0.5, 0.52], 10) == "▅▅"
    assert render_sparkline([-3.0, 0.0, 4.0], 10) == "▁▄█"
    assert render_sparkline([0.0, 1.0, 1.0, 1.0], 2) == "▅█"
    assert render_sparkline([1.0, math.nan, 2.0], 10) == "▁ █"
    assert render_sparkline([5.0, 5.0], 10) == "▁▁"


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.floats(0, 100), max_size=8), st.floats(0, 500), st.integers(0, 90))
def test_live_display_a_stacked_bar_fills_its_width_exactly(phases: dict[str, float], total: float, width: int) -> None:
    assert len(render_stacked_bar(phases, total, width).plain) == width


def test_live_display_a_stacked_bar_shares_its_width_in_proportion() -> None:
    bar = render_stacked_bar({"generate": 2.0, "train": 1.0}, 4.0, 8)
    assert bar.plain == "██████  "
    assert [(span.start, span.end, span.style) for span in bar.spans] == [(0, 4, "cyan"), (4, 6, "magenta")]


def test_live_display_plain_output_is_one_line_per_event() -> None:
    file = io.StringIO()
    console = PlainConsole(Terminal(file))
    console.start(HEADER)
    console.show_step(view(9))
    console.show_evaluation(EvaluationView(step=10, value=0.5416))
    console.warn("engine-0 was replaced")
    console.show("[not markup] " + "x" * 150)
    assert file.getvalue().splitlines()[3:] == [
        "step  9/40  reward  0.225  loss   0.5000  generate   912 tok/s  train   603 tok/s    4.0 s"
        "  generate 50%  left 2:04",
        "evaluation after step 10: accuracy 0.542",
        "warning: engine-0 was replaced",
        "[not markup] " + "x" * 150,
    ]


def test_live_display_auto_is_plain_where_the_terminal_cannot_be_redrawn() -> None:
    terminal = Terminal(io.StringIO())
    assert type(open_console("auto", terminal)) is PlainConsole
    assert type(open_console("quiet", terminal)) is Console


@pytest.mark.parametrize("name", ["torch", "rich", "pyarrow", "matplotlib", "tensorboard", "pydantic"])
def test_live_display_importing_tracking_imports_nothing_heavy(name: str) -> None:
    code = f"import sys, roll.tracking; sys.exit({name!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
