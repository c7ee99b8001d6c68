"""What a console is told of: a run, its steps, sample answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AnswerView", "RunHeader", "StepView", "clock_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What a run is, said once."""

    name: str
    model: str
    algorithm: str
    where: str
    """Engine, trainer, and machine, in a few words."""
    directory: str
    num_steps: int
    resumed_at: int | None = None
    """Step that it continues after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A finished step."""

    step: int
    reward: float
    duration_s: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in order."""
    generated_per_s: float | None = None
    """Tokens per second while generating."""
    trained_per_s: float | None = None
    """Tokens per second while training."""
    loss: float | None = None

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """The longest phase and its share of the step, 0 … 1."""
        if not self.phases or self.duration_s <= 0:
            return None
        name = max(self.phases, key=self.phases.__getitem__)
        return name, min(1.0, self.phases[name] / self.duration_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerView:
    """A sample answer."""

    prompt: str
    answer: str
    reward: float
    verdict: str = ""


def clock_text(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
