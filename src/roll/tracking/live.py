"""The live display of a terminal.

    run's thread ──► Screen (under a lock) ──► display thread, ≤4 Hz after changes, else 1 Hz ──► terminal

Invariants:
    - the run's thread only records events: it never draws, and never waits for the terminal while training;
    - the display thread sleeps between frames; a frame takes a few milliseconds, so the display uses well under 2 % of
      a core;
    - `close` (also at interpreter exit) draws the last frame and shows the cursor again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.text import Text

from roll.tracking.console_views import AnswerView, Console, EvaluationView, RunHeader, StepView
from roll.tracking.logs import Terminal
from roll.tracking.screen import Screen, render

__all__ = ["LiveConsole"]

_MIN_FRAME_INTERVAL_S = 0.25
_MAX_FRAME_INTERVAL_S = 1.0


class LiveConsole(Console):
    """Redraws one block of lines in place, without using the alternate screen, so that scrolling back works."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._rich = RichConsole(file=terminal.file, force_terminal=True, markup=False, highlight=False)
        self._screen: Screen | None = None
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._live: Live | None = None
        self._thread = threading.Thread(target=self._run, name="roll-display", daemon=True)

    def start(self, header: RunHeader) -> None:
        """Print the header and start drawing."""
        self._screen = Screen(header=header, started_at=time.monotonic())
        with self._ignore_lost_terminal():
            self._fit_to_terminal()
            self._rich.print(_format_title(header))
            self._live = Live(
                console=self._rich,
                auto_refresh=False,
                # Descriptors 1 and 2 are redirected to the log already: see `roll.tracking.logs`.
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
                get_renderable=self._render_frame,
            )
            self._live.start(refresh=True)
            atexit.register(self.close)  # otherwise an exit without `close` would leave the cursor hidden
            self._thread.start()

    def show_note(self, text: str) -> None:
        self._update(note=text)

    def show_phase(self, name: str) -> None:
        now = time.monotonic()
        self._update(phase=name, phase_started_at=now, progress=None, failures="", note="between steps")

    def show_progress(self, done: int, total: int | None, failures: str = "") -> None:
        self._update(progress=(done, total), failures=failures)

    def show_step(self, view: StepView) -> None:
        def append_step(screen: Screen) -> None:
            screen.steps.append(view)
            screen.finished_at.append(time.monotonic())

        self._change(append_step)

    def show_answers(self, answers: Sequence[AnswerView]) -> None:
        self._update(answers=tuple(answers))

    def show_evaluation(self, view: EvaluationView) -> None:
        self._change(lambda screen: screen.evaluations.append(view))

    def warn(self, text: str) -> None:
        self._change(lambda screen: screen.warnings.append(text))

    def show(self, renderable: Any) -> None:
        """Print a Rich renderable or text above the live display, or below the display once it is closed."""
        with self._ignore_lost_terminal():
            self._fit_to_terminal()
            self._rich.print(renderable, soft_wrap=isinstance(renderable, str))

    def close(self) -> None:
        """Draw the last frame and restore the cursor. Calling it twice is safe."""
        # A forked worker inherits the exit hook, but not the thread: it must not write to the terminal.
        if os.getpid() != self._process_id:
            return
        self._closing.set()
        self._changed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        live, self._live = self._live, None
        if live is not None:
            self._update(has_ended=True, phase="")
            with self._ignore_lost_terminal():
                self._fit_to_terminal()
                live.refresh()
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        atexit.unregister(self.close)

    def _change(self, change: Callable[[Screen], None]) -> None:
        if self._screen is not None:
            with self._lock:
                change(self._screen)
            self._changed.set()

    def _update(self, **values: Any) -> None:
        """Set the given fields of the screen, and wake the display thread."""

        def set_fields(screen: Screen) -> None:
            for name, value in values.items():
                setattr(screen, name, value)

        self._change(set_fields)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.wait(_MAX_FRAME_INTERVAL_S)
            self._changed.clear()
            with self._ignore_lost_terminal():
                self._fit_to_terminal()
                if self._live is not None:
                    self._live.refresh()
            self._closing.wait(_MIN_FRAME_INTERVAL_S)

    def _render_frame(self) -> Any:
        if self._screen is None:
            return Text()
        with self._lock:
            columns, rows = self._rich.size
            return render(self._screen, time.monotonic(), columns, rows)

    def _fit_to_terminal(self) -> None:
        """Set the size of Rich's console to the size of the terminal."""
        # Rich queries descriptors 0 to 2, of which 1 and 2 are redirected to the log.
        self._rich.size = ConsoleDimensions(*self._terminal.size)

    @contextlib.contextmanager
    def _ignore_lost_terminal(self) -> Any:
        try:
            yield
        except (OSError, ValueError):
            self._closing.set()


def _format_title(header: RunHeader) -> Text:
    title = Text.assemble(("ROLL ", "bold green"), (header.name, "bold"))
    if header.resumed_at is not None:
        title.append(f"  resumed after step {header.resumed_at}", "yellow")
    title.append(f"\n{header.model}  ·  {header.algorithm}  ·  {header.setup}\n", "dim")
    return title.append(f"{header.directory}\n", "dim")
