"""A replay's generation beside the recorded run's: a table, and `replay.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.pipelines.recording.recorded_work import WAITS, RecordedWork
from roll.tracking import atomic

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Comparison"]


@dataclass(slots=True)
class Comparison:
    """Collects steps."""

    work: RecordedWork
    """What was recorded."""
    steps: list[dict[str, float]] = field(default_factory=list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was generated again; `metrics` are those of its line in `metrics.jsonl`."""
        wait = sum(metrics.get(f"time/{name}_s", 0.0) for name in WAITS)
        self.steps.append(
            {
                "step": float(step),
                "recorded_wait_s": self.work.wait_s[step],
                "wait_s": wait,
                "recorded_step_s": self.work.step_s[step],
                "step_s": metrics.get("time/step_s", 0.0),
                "num_tokens": metrics["rollout/num_tokens"],
            }
        )

    def totals(self) -> dict[str, float]:
        """Sums over all steps, and how many times faster the wait for batches was."""
        names = ("recorded_wait_s", "wait_s", "recorded_step_s", "step_s", "num_tokens")
        sums = {name: sum(step[name] for step in self.steps) for name in names}
        return sums | {"speed_up": sums["recorded_wait_s"] / sums["wait_s"] if sums["wait_s"] else 0.0}

    def write(self, path: Path) -> None:
        """Write `replay.json`, atomically."""
        document: dict[str, Any] = {"steps": self.steps, "total": self.totals()}
        atomic.write_json(path, document)

    def table(self) -> Table:
        """For the terminal."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED, title="Waiting for batches, in seconds")
        for name in ("step", "recorded", "replayed", "tokens"):
            table.add_column(name, justify="right")
        for step in self.steps:
            table.add_row(
                f"{step['step']:.0f}", f"{step['recorded_wait_s']:.3g}", f"{step['wait_s']:.3g}",
                f"{step['num_tokens']:,.0f}",
            )  # fmt: skip
        total = self.totals()
        table.add_section()
        table.add_row(
            f"x {total['speed_up']:.2f}", f"{total['recorded_wait_s']:.3g}", f"{total['wait_s']:.3g}",
            f"{total['num_tokens']:,.0f}",
        )  # fmt: skip
        return table
