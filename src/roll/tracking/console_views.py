"""The input of a console: a run, its steps, sample answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll.tracking.intervals import accuracy_text

if TYPE_CHECKING:
    from roll.types import Group

__all__ = [
    "AnswerView",
    "Console",
    "EvaluationView",
    "RunHeader",
    "StepView",
    "best_and_worst",
    "clock_text",
    "trouble",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """Description of a run, shown once."""

    name: str
    model: str
    algorithm: str
    where: str
    """Engine, trainer and machine, in a few words."""
    directory: str
    num_steps: int
    resumed_at: int | None = None
    """Step after which the run continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A finished step."""

    step: int
    reward: float | None
    """Mean reward of the step; `None` for a run without rewards, for which the loss is shown."""
    duration_s: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in order."""
    generated_per_s: float | None = None
    """Tokens per second while generating."""
    trained_per_s: float | None = None
    """Tokens per second while training."""
    loss: float | None = None
    trouble: str = ""
    """Infrastructure failures, in a few words; empty if there were none."""
    cut_off: float | None = None
    """Share of rollouts that were cut off, 0 … 1; `None` for a run without rollouts."""

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """The longest phase and its share of the step, 0 … 1."""
        if not self.phases or self.duration_s <= 0:
            return None
        name = max(self.phases, key=self.phases.__getitem__)
        return name, min(1.0, self.phases[name] / self.duration_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationView:
    """An evaluation on held-out prompts."""

    step: int
    value: float | None
    """`None` if there were no answers, which is not 0."""
    measure: str = "accuracy"
    """`accuracy` if every answer has a verdict, `mean reward` if none has, otherwise `score`: the mean of verdicts,
    and of rewards for answers without a verdict. `loss` if examples are measured without an answer.
    """
    num: float | None = None
    """Number of answers, or pairs, of an accuracy."""

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any]) -> EvaluationView:
        """Build the view of an evaluation from its metrics by name."""
        accuracy, score, loss = (metrics.get(f"eval/{name}") for name in ("accuracy", "score", "loss"))
        if accuracy is None and score is None and loss is not None:
            return cls(step=step, value=loss, measure="loss")
        judged = metrics.get("eval/verified_share", 1.0)
        if judged == 1.0 or score is None:
            return cls(step=step, value=accuracy, num=metrics.get("eval/accuracy_n"))
        return cls(step=step, value=score, measure="score" if judged else "mean reward")

    @property
    def text(self) -> str:
        """The measure and its value in words."""
        return "no answers" if self.value is None else f"{self.measure} {accuracy_text(self.value, self.num)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerView:
    """A sample answer."""

    prompt: str
    answer: str
    reward: float
    verdict: str = ""


class Console:
    """Displays a run; this class displays nothing, since everything is in the run directory. Methods return
    immediately.
    """

    def start(self, header: RunHeader) -> None:
        pass

    def note(self, text: str) -> None:
        """Show what is being done before the first step."""

    def phase(self, name: str) -> None:
        """Show that a phase began; an empty name means that no phase is running."""

    def progress(self, done: int, total: int | None, trouble: str = "") -> None:
        """Show the number of finished rollouts of this phase, and a description of failures among them."""

    def step(self, view: StepView) -> None:
        pass

    def answers(self, answers: Sequence[AnswerView]) -> None:
        """Show samples of the last step, best first."""

    def evaluation(self, view: EvaluationView) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def show(self, renderable: Any) -> None:
        """Print a renderable or text that stays on the screen."""

    def close(self) -> None:
        """Restore the terminal; may be called twice."""


def best_and_worst(groups: Sequence[Group]) -> list[AnswerView]:
    """Return the answers with the highest and the lowest reward; among equals the first."""
    scored = [(r.reward, r) for group in groups for r in group.scored if r.reward is not None]
    if not scored:
        return []
    chosen = [max(scored, key=lambda pair: pair[0].value), min(scored, key=lambda pair: pair[0].value)]
    return [
        AnswerView(
            prompt=rollout.prompt.asked[-1].text if rollout.prompt.messages else rollout.prompt.uid,
            answer=rollout.text,
            reward=reward.value,
            verdict=reward.verdict,
        )
        for reward, rollout in (chosen[:1] if chosen[0][1] is chosen[1][1] else chosen)
    ]


def trouble(num_failed: float, num_timed_out: float) -> str:
    """Describe how many answers have no reward or took too long to verify; empty if none did."""
    parts = [f"{num_failed:.0f} failed"] if num_failed else []
    parts += [f"{num_timed_out:.0f} timed out"] if num_timed_out else []
    return ", ".join(parts)


def clock_text(seconds: float) -> str:
    """Format a duration as `0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
