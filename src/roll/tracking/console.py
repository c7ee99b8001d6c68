"""The display of a run in progress: live, one line per step, or nothing.

A console receives events and is never queried. It writes only to the `Terminal`; if a write fails (a closed terminal, a
full pipe), the display ends and the run continues.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from roll.tracking.console_views import Console, EvaluationView, RunHeader, StepView, format_clock
from roll.tracking.logs import Terminal

__all__ = ["PlainConsole", "open_console"]


def open_console(mode: Literal["auto", "live", "plain", "quiet"], terminal: Terminal) -> Console:
    """Return the console for `tracking.console`; `auto` is live if the terminal can be redrawn, otherwise plain."""
    if mode == "auto":
        mode = "live" if terminal.is_interactive else "plain"
    if mode == "quiet":
        return Console()
    if mode == "plain":
        return PlainConsole(terminal)
    # Only the live display needs Rich.
    from roll.tracking.live import LiveConsole

    return LiveConsole(terminal)


class PlainConsole(Console):
    """Prints one line per event, for files, pipes and continuous integration."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._num_steps = 0
        self._durations: list[float] = []
        self._open = True

    def start(self, header: RunHeader) -> None:
        self._num_steps = header.num_steps
        resumed = "" if header.resumed_at is None else f" (resumed after step {header.resumed_at})"
        self._print_line(f"ROLL {header.name}{resumed}: {header.model}, {header.algorithm}, {header.num_steps} steps")
        self._print_line(f"  runs on    {header.setup}")
        self._print_line(f"  directory  {header.directory}")

    def show_note(self, text: str) -> None:
        self._print_line(text)

    def show_step(self, view: StepView) -> None:
        self._durations.append(view.duration_s)
        width = len(str(self._num_steps))
        parts = [f"step {view.step:>{width}}/{self._num_steps}"]
        if view.reward is not None:
            parts.append(f"reward {view.reward:6.3f}" if math.isfinite(view.reward) else "reward      –")
        if view.truncated_share is not None:
            parts.append(f"truncated {view.truncated_share:4.0%}")
        if view.loss is not None:
            parts.append(f"loss {view.loss:8.4f}")
        if view.generated_per_s is not None:
            parts.append(f"generate {view.generated_per_s:5.0f} tok/s")
        if view.trained_per_s is not None:
            parts.append(f"train {view.trained_per_s:5.0f} tok/s")
        parts.append(f"{view.duration_s:5.1f} s")
        if view.bottleneck is not None:
            name, share = view.bottleneck
            parts.append(f"{name} {share:.0%}")
        recent = self._durations[-10:]
        left = (self._num_steps - view.step) * sum(recent) / len(recent)
        parts.append(f"left {format_clock(left)}")
        parts += [view.failures] if view.failures else []
        self._print_line("  ".join(parts))

    def show_evaluation(self, view: EvaluationView) -> None:
        self._print_line(f"evaluation after step {view.step}: {view.text}")

    def warn(self, text: str) -> None:
        self._print_line(f"warning: {text}")

    def show(self, renderable: Any) -> None:
        import io

        from rich.console import Console as RichConsole

        text = io.StringIO()
        rich = RichConsole(file=text, width=self._terminal.size[0], markup=False, highlight=False)
        rich.print(renderable, soft_wrap=isinstance(renderable, str))
        self._print_line(text.getvalue().rstrip("\n"))

    def _print_line(self, text: str) -> None:
        if not self._open:
            return
        try:
            self._terminal.file.write(text + "\n")
            self._terminal.file.flush()
        except (OSError, ValueError):
            # The reader has closed the pipe (`| head`), which must not end the run.
            self._open = False
