"""Comparison of a replay's generation with the recorded run's: a table, and `replay.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from roll.pipelines.recording.recorded_work import WAIT_PHASES, RecordedWork
from roll.tracking import atomic

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Comparison"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timing:
    """The wait and step times of recording and replay, in seconds, and the number of generated tokens."""

    recorded_wait_s: float
    wait_s: float
    recorded_step_s: float
    step_s: float
    num_tokens: float

    @property
    def speed_up(self) -> float:
        """Recorded waiting time for batches divided by the replayed waiting time; 0 if the replay did not wait."""
        return self.recorded_wait_s / self.wait_s if self.wait_s else 0.0

    def format_cells(self) -> tuple[str, str, str]:
        """Return the recorded wait, the replayed wait, and the number of tokens as table cells."""
        return f"{self.recorded_wait_s:.3g}", f"{self.wait_s:.3g}", f"{self.num_tokens:,.0f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplayedStep(_Timing):
    """The times of one replayed step, whose answers were generated again."""

    step: float


@dataclass(slots=True)
class Comparison:
    """Collects the measurements of replayed steps."""

    work: RecordedWork
    """The recorded lengths and times."""
    steps: list[_ReplayedStep] = field(default_factory=list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a replayed step with its metrics, as written to `metrics.jsonl`."""
        wait = sum(metrics.get(f"time/{name}_s", 0.0) for name in WAIT_PHASES)
        self.steps.append(
            _ReplayedStep(
                step=float(step),
                recorded_wait_s=self.work.wait_s[step],
                wait_s=wait,
                recorded_step_s=self.work.step_s[step],
                step_s=metrics.get("time/step_s", 0.0),
                num_tokens=metrics["rollout/num_tokens"],
            )
        )

    def compute_totals(self) -> dict[str, float]:
        """Return the sum of each time over all steps, and the speedup in the time spent waiting for batches."""
        sums = self._sum_timings()
        return {**asdict(sums), "speed_up": sums.speed_up}

    def _sum_timings(self) -> _Timing:
        return _Timing(**{each.name: sum(getattr(step, each.name) for step in self.steps) for each in fields(_Timing)})

    def write(self, path: Path) -> None:
        """Write all steps and the totals to the JSON file `path`, atomically."""
        steps = [{"step": each.step, **asdict(each)} for each in self.steps]
        atomic.write_json(path, {"steps": steps, "total": self.compute_totals()})

    def build_table(self) -> Table:
        """Build the terminal table that compares recorded and replayed waits of every step."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED, title="Waiting for batches, in seconds")
        for name in ("step", "recorded", "replayed", "tokens"):
            table.add_column(name, justify="right")
        for step in self.steps:
            table.add_row(f"{step.step:.0f}", *step.format_cells())
        total = self._sum_timings()
        table.add_section()
        table.add_row(f"x {total.speed_up:.2f}", *total.format_cells())
        return table
