"""The console interface and its inputs: a run, its steps, its evaluations, sample answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll.tracking.intervals import format_accuracy
from roll.types import describe_content

if TYPE_CHECKING:
    from roll.types import Group, Prompt

__all__ = [
    "AnswerView",
    "Console",
    "EvaluationView",
    "RunHeader",
    "StepView",
    "format_clock",
    "format_failures",
    "select_best_and_worst",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """Description of a run, shown once."""

    name: str
    model: str
    algorithm: str
    setup: str
    """Short description of engine, trainer and machine."""
    directory: str
    num_steps: int
    resumed_at: int | None = None
    """Step after which the run resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """Metrics of a finished step, shown by a console."""

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
    failures: str = ""
    """Short description of infrastructure failures; empty if there were none."""
    truncated_share: float | None = None
    """Fraction of rollouts that were truncated, between 0 and 1; `None` for a run without rollouts."""

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """The longest phase, and its fraction of the step's time."""
        if not self.phases or self.duration_s <= 0:
            return None
        name = max(self.phases, key=self.phases.__getitem__)
        return name, min(1.0, self.phases[name] / self.duration_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationView:
    """An evaluation on held-out prompts."""

    step: int
    value: float | None
    """Value of `measure`; `None` (not 0) if there were no answers."""
    measure: str = "accuracy"
    """`accuracy` if every answer has a verdict, `mean reward` if none has, otherwise `score`: the mean of verdicts,
    and of rewards for answers without a verdict. `loss` for a run without answers.
    """
    num_answers: float | None = None
    """Number of answers or pairs that the accuracy is computed from."""
    num_failed: int = 0
    """Number of answers without a reward because of an infrastructure error."""
    num_scored: int = 0

    @classmethod
    def from_metrics(cls, step: int, metrics: Mapping[str, Any]) -> EvaluationView:
        """Build the view of the evaluation after `step` from the metrics `eval/…`."""
        accuracy, score, loss = (metrics.get(f"eval/{name}") for name in ("accuracy", "score", "loss"))
        # Pipelines on examples report a loss, and an accuracy only if the loss has one.
        if accuracy is None and score is None and loss is not None:
            return cls(step=step, value=loss, measure="loss")
        judged = metrics.get("eval/verified_share", 1.0)
        if judged == 1.0 or score is None:
            return cls(step=step, value=accuracy, num_answers=metrics.get("eval/accuracy_n"))
        counts = (int(metrics.get(f"eval/{name}", 0)) for name in ("infra_errors", "num_answers"))
        num_failed, num_scored = counts
        measure = "score" if judged else "mean reward"
        return cls(step=step, value=score, measure=measure, num_failed=num_failed, num_scored=num_scored)

    @property
    def text(self) -> str:
        """The result as text, such as `accuracy 0.620 of 500` or `mean reward 0.310 of 6 answers (102 failed)`."""
        if self.value is None:
            return "no answers"
        failed = f" of {self.num_scored:,} answers ({self.num_failed:,} failed)" if self.num_failed else ""
        return f"{self.measure} {format_accuracy(self.value, self.num_answers)}{failed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerView:
    """A sample answer that a console shows, with its reward."""

    prompt: str
    answer: str
    reward: float
    verdict: str = ""


class Console:
    """Displays a run. The base class displays nothing.

    All methods return immediately, so the run's thread never waits for a display.
    """

    def start(self, header: RunHeader) -> None:
        pass

    def show_note(self, text: str) -> None:
        """Show a note about the startup progress, before the first step."""

    def show_phase(self, name: str) -> None:
        """Show the current phase; an empty name means that no phase is running."""

    def show_progress(self, done: int, total: int | None, failures: str = "") -> None:
        """Show the number of finished rollouts of this phase, the total if known, and a description of failures."""

    def show_step(self, view: StepView) -> None:
        pass

    def show_answers(self, answers: Sequence[AnswerView]) -> None:
        """Show sample answers of the last step, best first."""

    def show_evaluation(self, view: EvaluationView) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def show(self, renderable: Any) -> None:
        """Print a Rich renderable or text that stays on the screen."""

    def close(self) -> None:
        """Restore the terminal. Calling it twice is safe."""


def select_best_and_worst(groups: Sequence[Group]) -> list[AnswerView]:
    """Return the answers with the highest and the lowest reward.

    Return one answer if both are the same, and none if no answer was scored.
    """
    scored = [(r.reward, r) for group in groups for r in group.scored_rollouts if r.reward is not None]
    if not scored:
        return []
    chosen = [max(scored, key=lambda pair: pair[0].value), min(scored, key=lambda pair: pair[0].value)]
    return [
        AnswerView(
            prompt=_describe_prompt(rollout.prompt),
            answer=rollout.text,
            reward=reward.value,
            verdict=reward.verdict,
        )
        for reward, rollout in (chosen[:1] if chosen[0][1] is chosen[1][1] else chosen)
    ]


def _describe_prompt(prompt: Prompt) -> str:
    return describe_content(prompt.input_messages[-1].content) if prompt.messages else prompt.uid


def format_failures(num_failed: float, num_timed_out: float) -> str:
    """Return a text such as `2 failed, 1 timed out` for answers without a reward."""
    parts = [f"{num_failed:.0f} failed"] if num_failed else []
    parts += [f"{num_timed_out:.0f} timed out"] if num_timed_out else []
    return ", ".join(parts)


def format_clock(seconds: float) -> str:
    """Format a duration as `0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
