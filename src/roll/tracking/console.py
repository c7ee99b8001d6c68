"""What a run tells the user while it goes on: live display, one line per step, or nothing.

A console is told of events and never asked anything. It writes to the `Terminal` alone, and a failure to
write (a closed terminal, a full pipe) ends the display, never the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from roll.tracking.console_views import AnswerView, EvaluationView, RunHeader, StepView, clock_text

if TYPE_CHECKING:
    from roll.tracking.logs import Terminal

__all__ = ["Console", "PlainConsole", "QuietConsole", "open_console"]


class Console(Protocol):
    """Shows a run. Methods return at once."""

    def start(self, header: RunHeader) -> None: ...

    def note(self, text: str) -> None:
        """What is being done now, before the first step."""
        ...

    def phase(self, name: str) -> None:
        """A phase began; empty: none is going on."""
        ...

    def progress(self, done: int, total: int | None, trouble: str = "") -> None:
        """Rollouts ready in this phase, and in words what went wrong with some of them."""
        ...

    def step(self, view: StepView) -> None: ...

    def answers(self, answers: Sequence[AnswerView]) -> None:
        """Samples of the last step, best first."""
        ...

    def evaluation(self, view: EvaluationView) -> None: ...

    def warn(self, text: str) -> None: ...

    def show(self, renderable: Any) -> None:
        """Print something that stays (a Rich renderable or text)."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        ...


def open_console(mode: Literal["auto", "live", "plain", "quiet"], terminal: Terminal) -> Console:
    """The console for a mode; `auto` is live where the terminal can be redrawn, otherwise plain."""
    if mode == "auto":
        mode = "live" if terminal.is_interactive else "plain"
    if mode == "quiet":
        return QuietConsole()
    if mode == "plain":
        return PlainConsole(terminal)
    from roll.tracking.live import LiveConsole

    return LiveConsole(terminal)


class QuietConsole:
    """Says nothing; everything is in the run directory."""

    def start(self, header: RunHeader) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def progress(self, done: int, total: int | None, trouble: str = "") -> None:
        pass

    def step(self, view: StepView) -> None:
        pass

    def answers(self, answers: Sequence[AnswerView]) -> None:
        pass

    def evaluation(self, view: EvaluationView) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def show(self, renderable: Any) -> None:
        pass

    def close(self) -> None:
        pass


class PlainConsole(QuietConsole):
    """One line per event, for files, pipes and continuous integration."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._num_steps = 0
        self._durations: list[float] = []
        self._open = True

    def start(self, header: RunHeader) -> None:
        self._num_steps = header.num_steps
        resumed = "" if header.resumed_at is None else f" (resumed after step {header.resumed_at})"
        self._line(f"ROLL {header.name}{resumed}: {header.model}, {header.algorithm}, {header.num_steps} steps")
        self._line(f"  runs on  {header.where}")
        self._line(f"  writes   {header.directory}")

    def note(self, text: str) -> None:
        self._line(text)

    def step(self, view: StepView) -> None:
        self._durations.append(view.duration_s)
        width = len(str(self._num_steps))
        reward = f"{view.reward:6.3f}" if math.isfinite(view.reward) else "     –"
        parts = [f"step {view.step:>{width}}/{self._num_steps}", f"reward {reward}"]
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
        parts.append(f"left {clock_text(left)}")
        parts += [view.trouble] if view.trouble else []
        self._line("  ".join(parts))

    def evaluation(self, view: EvaluationView) -> None:
        self._line(f"evaluation after step {view.step}: {view.text}")

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def show(self, renderable: Any) -> None:
        import io

        from rich.console import Console as RichConsole

        text = io.StringIO()
        rich = RichConsole(file=text, width=self._terminal.size[0], markup=False, highlight=False)
        rich.print(renderable, soft_wrap=isinstance(renderable, str))
        self._line(text.getvalue().rstrip("\n"))

    def _line(self, text: str) -> None:
        if not self._open:
            return
        try:
            self._terminal.file.write(text + "\n")
            self._terminal.file.flush()
        except (OSError, ValueError):
            # The reader is gone (`| head`): a run does not end because of that.
            self._open = False
