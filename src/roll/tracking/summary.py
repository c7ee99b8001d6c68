"""The summary of a finished run: `summary.json` and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from roll.errors import AlarmError, RollError, leaves
from roll.tracking import atomic
from roll.tracking.console_views import EvaluationView
from roll.tracking.intervals import accuracy_text
from roll.tracking.metrics_file import read_metrics

if TYPE_CHECKING:
    from rich.table import Table

    from roll.tracking.run_directory import RunDirectory

__all__ = ["Ending", "Summary", "generation_time", "next_commands", "num_compared", "summarize"]

EndingKind: TypeAlias = Literal["finished", "alarm", "interrupted", "error"]
_LONGEST_MESSAGE = 4000
_RECENT_STEPS = 5
_CHOICE = ("reward_counted", "reward_launched", "length_counted", "length_launched", "stopped_share")


def num_compared(num_steps: int) -> int:
    """Return how many of the first and of the last steps are compared, so that the two do not overlap."""
    return max(1, min(_RECENT_STEPS, num_steps // 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a session of a run ended."""

    kind: EndingKind
    message: str = ""
    """Message of the alarm or the error; empty for a run that finished."""

    @classmethod
    def of(cls, error: BaseException) -> Ending:
        """Return the ending of a session that an exception ended: an alarm, a signal, or a failure."""
        parts = list(leaves(error))
        alarm = next((part for part in parts if isinstance(part, AlarmError)), None)
        if alarm is not None:
            return cls(kind="alarm", message=str(alarm)[:_LONGEST_MESSAGE])
        signal_name = next((part.signal_name for part in parts if hasattr(part, "signal_name")), None)
        if signal_name is not None or not isinstance(error, Exception):
            return cls(kind="interrupted", message=str(signal_name or type(error).__name__))
        known = next((part for part in parts if isinstance(part, RollError)), None)
        text = str(known) if known is not None else f"{type(parts[0]).__name__}: {parts[0]}"
        return cls(kind="error", message=text[:_LONGEST_MESSAGE])


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Figures of a run, over all of its sessions; `None` for figures that were not measured."""

    name: str
    directory: str
    num_steps: int
    """Number of recorded steps."""
    num_trained_steps: int | None = None
    """Number of steps that updated the weights; a run without any did nothing."""
    accuracy_before: float | None = None
    """Share of correct answers before the first step, among those with a verdict; `None` without verdicts."""
    accuracy_after: float | None = None
    """Accuracy after the last evaluated step; `None` also if that evaluation had no answers."""
    accuracy_best: float | None = None
    accuracy_num: float | None = None
    """Number of answers, or pairs, of the last accuracy."""
    measure: str = "accuracy"
    """Kind of the scores: `accuracy`, `mean reward` without verdicts, or `score`, a mean of verdicts, and of rewards
    for answers without a verdict; every answer has the same weight. `loss` if examples were measured without answers.
    """
    score_before: float | None = None
    score_after: float | None = None
    score_best: float | None = None
    """Best score of the evaluations after training began; the lowest for a loss."""
    reward_first5: float | None = None
    """Mean reward of the first five steps; of a run of fewer than ten steps, of the first half."""
    reward_last5: float | None = None
    """Mean reward of the last five steps, or of the last half."""
    setup_s: float | None = None
    """Duration from the command to the end of the first optimizer step (of the last session)."""
    train_s: float | None = None
    """Duration of all steps, without evaluations."""
    evaluate_s: float | None = None
    seconds_per_step: float | None = None
    generated_tokens_per_s: float | None = None
    """Throughput while generating."""
    trained_tokens_per_s: float | None = None
    """Throughput while training."""
    peak_rss_bytes: int | None = None
    """Largest summed PSS of all processes of the run on this machine (of the last session)."""
    empty_evaluations: int = 0
    """Number of evaluations without an answer, which measured nothing."""
    evaluation_infra_errors: int = 0
    """Number of answers in evaluations without a reward because of an infrastructure error."""
    infra_errors: int = 0
    """Number of answers in training without a reward because of an infrastructure error."""
    infra_error_share: float | None = None
    timeouts: int = 0
    """Number of answers in training that a verifier did not finish in time, and that got a reward of 0."""
    timeout_share: float | None = None
    reward_counted: float | None = None
    """Mean reward of the trained rollouts, if the schedule selects among rollouts (`selection/…` of every step)."""
    reward_launched: float | None = None
    """Mean reward of all rollouts launched for the same groups: an estimate, see `roll.rollout.selection_bias`."""
    length_counted: float | None = None
    length_launched: float | None = None
    stopped_share: float | None = None
    """Share of launched rollouts that were stopped before they had a reward."""
    tracker_failures: int = 0
    """Number of failed writes to a tracker (TensorBoard, W&B, …) or a Parquet file."""
    steps_asked: int | None = None
    """Configured number of steps of the whole run."""
    ending: Ending | None = None
    """How the last session ended; `None` in summaries of older versions."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite become `None`."""
        values = asdict(self).items()
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values}

    @property
    def problem(self) -> str:
        """Why a completed run counts as a failure; empty if it does not."""
        if self.num_trained_steps != 0:
            return ""
        failed = f"; {self.infra_errors} answers got no reward" if self.infra_errors else ""
        return (
            f"none of {self.num_steps} steps trained anything{failed}. Look at the answers and rewards in "
            f"'{self.directory}/rollouts'."
        )

    def write(self, path: Path) -> None:
        """Write `summary.json`, atomically.

        Raises:
            OSError: the file cannot be written.
        """
        atomic.write_json(path, self.to_json())

    def table(self) -> Table:
        """Return the table for the terminal."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED, show_header=False, title=f"{self.name}: {self.num_steps} steps")
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        for label, text in _lines(self):
            table.add_row(label, text)
        return table


def summarize(
    name: str,
    directory: Path,
    metrics_path: Path,
    *,
    setup_s: float | None = None,
    peak_rss_bytes: int | None = None,
    tracker_failures: int = 0,
    steps_asked: int | None = None,
    ending: Ending | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> Summary:
    """Summarize `metrics.jsonl`; `rows` are its lines, if they were already read."""
    rows = read_metrics(metrics_path) if rows is None else rows
    steps = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    accuracies = _Scores.of(evaluations, lambda row: row.get("eval/accuracy"))
    views = [EvaluationView.of(row["step"], row) for row in evaluations]
    measure = next((view.measure for view in reversed(views) if view.value is not None), "accuracy")
    best = min if measure == "loss" else max
    scores = _Scores.of(evaluations, lambda row: EvaluationView.of(row["step"], row).value, best)
    compared = num_compared(len(steps))
    trained = _column(steps, "data/groups_trained")
    step_times = _column(steps, "time/step_s")
    return Summary(
        name=name,
        directory=str(directory),
        num_steps=len(steps),
        num_trained_steps=sum(n > 0 for n in trained) if trained else None,
        accuracy_before=accuracies.before,
        accuracy_after=accuracies.after,
        accuracy_best=max(_column(evaluations, "eval/accuracy"), default=None),
        accuracy_num=next(iter(_column(evaluations[::-1], "eval/accuracy_n")), None),
        measure=measure,
        score_before=scores.before,
        score_after=scores.after,
        score_best=scores.best,
        reward_first5=_mean(_column(steps[:compared], "reward/mean")),
        reward_last5=_mean(_column(steps[-compared:], "reward/mean")),
        setup_s=setup_s,
        train_s=math.fsum(step_times) if step_times else None,
        evaluate_s=math.fsum(_column(rows, "time/evaluate_s")) if evaluations else None,
        seconds_per_step=_mean(step_times),
        generated_tokens_per_s=_rate(steps, "rollout/num_tokens", generation_time(*steps)),
        trained_tokens_per_s=_rate(steps, "training/num_tokens", "time/train_s"),
        peak_rss_bytes=peak_rss_bytes,
        empty_evaluations=sum(view.value is None for view in views),
        evaluation_infra_errors=round(math.fsum(_column(evaluations, "eval/infra_errors"))),
        infra_errors=round(math.fsum(_column(steps, "rollout/infra_errors"))),
        infra_error_share=_mean(_column(steps, "rollout/infra_error_share")),
        timeouts=round(math.fsum(_column(steps, "reward/timeouts"))),
        timeout_share=_mean(_column(steps, "reward/timeout_share")),
        **{name: _mean(_column(steps, f"selection/{name}")) for name in _CHOICE},  # type: ignore[arg-type]
        tracker_failures=tracker_failures,
        steps_asked=steps_asked,
        ending=ending,
    )


def next_commands(run: RunDirectory, pipeline: str, has_rollouts: bool) -> list[str]:
    """Return lines with the location of a finished run's model, and commands to use it."""
    saved = sorted(run.checkpoints_dir.glob("step-*/model"), key=lambda path: (len(path.parent.name), path))
    if not saved:
        return ["no checkpoint was kept (checkpoint.at_end is false), so there is no model to use"]
    commands = [f"roll chat {run.path}"] if pipeline != "reward_model" else []
    commands += [f"roll view {run.path}"] if has_rollouts else []
    commands += [f"roll dashboard {run.path}", f"roll export {run.path} DIR"]
    return [f"model  {saved[-1]}", f"next   {'   '.join(commands)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """A measure over the evaluations of a run."""

    before: float | None
    after: float | None
    best: float | None
    """Best value after training began."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        value: Callable[[Mapping[str, Any]], float | None],
        best: Callable[..., float | None] = max,
    ) -> _Scores:
        first, later = rows[:1], [row for row in rows if row["step"] > 0]
        found = [v for row in later if (v := value(row)) is not None]
        return cls(
            before=value(first[0]) if first and first[0]["step"] == 0 else None,
            after=value(later[-1]) if later else None,
            best=best(found, default=None),
        )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def generation_time(*steps: Mapping[str, Any]) -> str:
    """Return the name of the metric with the time of generation: that of whole steps, if it runs concurrently with
    training.
    """
    return "time/generate_s" if any(step.get("time/generate_s") for step in steps) else "time/step_s"


def _rate(rows: Sequence[Mapping[str, Any]], amount: str, seconds: str) -> float | None:
    """Return total amount over total time, of the steps that have both."""
    both = [(row[amount], row[seconds]) for row in rows if row.get(amount) is not None and row.get(seconds)]
    return math.fsum(a for a, _ in both) / math.fsum(s for _, s in both) if both else None


def _choice_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return lines that compare the trained rollouts with the launched ones, for a schedule that selects rollouts."""
    if summary.reward_counted is None or summary.reward_launched is None:
        return []
    return [
        ("reward, trained / launched", f"{summary.reward_counted:.3f} / about {summary.reward_launched:.3f}"),
        ("length, trained / launched", f"{summary.length_counted:.0f} / about {summary.length_launched:.0f}"),
        ("stopped, so not scored", f"{summary.stopped_share:.0%}"),
    ]


def _lines(summary: Summary) -> list[tuple[str, str]]:
    def number(value: float | None, form: str = ".3f", unit: str = "") -> str:
        return "–" if value is None else f"{value:{form}}{unit}"

    def score(value: float | None) -> str:
        num = summary.accuracy_num if summary.measure == "accuracy" else None
        return "–" if value is None else accuracy_text(value, num)

    peak = None if summary.peak_rss_bytes is None else summary.peak_rss_bytes / 2**30
    name = summary.measure
    count = num_compared(summary.num_steps)
    steps = "step" if count == 1 else f"{count} steps"
    rewards = [
        (f"reward, first {steps}", number(summary.reward_first5)),
        (f"reward, last {steps}", number(summary.reward_last5)),
    ]
    if summary.num_steps < 2:
        rewards = [("reward", number(summary.reward_last5))]
    lines = [
        (f"{name} before", score(summary.score_before)),
        (f"{name} after", score(summary.score_after)),
        *rewards,
        *_choice_lines(summary),
        ("set-up until first update", number(summary.setup_s, ".1f", " s")),
        ("training", number(summary.train_s, ".1f", " s")),
        ("evaluation", number(summary.evaluate_s, ".1f", " s")),
        ("per step", number(summary.seconds_per_step, ".2f", " s")),
        ("generated", number(summary.generated_tokens_per_s, ",.0f", " tok/s")),
        ("trained", number(summary.trained_tokens_per_s, ",.0f", " tok/s")),
        ("peak memory", number(peak, ".2f", " GiB")),
    ]
    if summary.num_trained_steps == 0:
        lines.insert(0, ("steps that trained anything", "none"))
    for label, count, share in (
        ("answers that we failed to score", summary.infra_errors, summary.infra_error_share),
        ("answers that took too long to verify", summary.timeouts, summary.timeout_share),
    ):
        if count:
            lines.append((label, f"{count} ({number(share, '.1%')})"))
    if summary.evaluation_infra_errors:
        lines.append(("answers of evaluations that we failed", str(summary.evaluation_infra_errors)))
    if summary.empty_evaluations:
        lines.append(("evaluations without an answer", str(summary.empty_evaluations)))
    if summary.tracker_failures:
        lines.append(("tracker failures (see logs)", str(summary.tracker_failures)))
    return [line for line in lines if line[1] != "–"]
