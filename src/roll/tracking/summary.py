"""The summary of a finished run: `summary.json` and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from roll.errors import AlarmError, RollError, iterate_leaf_errors
from roll.tracking import atomic
from roll.tracking.console_views import EvaluationView
from roll.tracking.intervals import format_accuracy
from roll.tracking.metrics_file import read_metrics

if TYPE_CHECKING:
    from rich.table import Table

    from roll.tracking.run_directory import RunDirectory

__all__ = [
    "Ending",
    "Summary",
    "count_compared_steps",
    "list_next_commands",
    "select_generation_time_name",
    "summarize",
]

EndingKind: TypeAlias = Literal["finished", "alarm", "interrupted", "error"]
_MAX_MESSAGE_LENGTH = 4000
_RECENT_STEPS = 5
_SELECTION_METRICS = ("reward_counted", "reward_launched", "length_counted", "length_launched", "stopped_share")


def count_compared_steps(num_steps: int) -> int:
    """Return how many of a run's first and last steps to compare: at most 5 each, without overlap."""
    return max(1, min(_RECENT_STEPS, num_steps // 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a session of a run ended."""

    kind: EndingKind
    message: str = ""
    """Message of the alarm or the error; empty for a run that finished."""

    @classmethod
    def from_error(cls, error: BaseException) -> Ending:
        """Return how an exception ended a session: by an alarm, an interruption, or an error."""
        parts = list(iterate_leaf_errors(error))
        alarm = next((part for part in parts if isinstance(part, AlarmError)), None)
        if alarm is not None:
            return cls(kind="alarm", message=str(alarm)[:_MAX_MESSAGE_LENGTH])
        signal_name = next((part.signal_name for part in parts if hasattr(part, "signal_name")), None)
        if signal_name is not None or not isinstance(error, Exception):
            return cls(kind="interrupted", message=str(signal_name or type(error).__name__))
        known = next((part for part in parts if isinstance(part, RollError)), None)
        text = str(known) if known is not None else f"{type(parts[0]).__name__}: {parts[0]}"
        return cls(kind="error", message=text[:_MAX_MESSAGE_LENGTH])


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Statistics of a run, over all of its sessions; `None` for values that were not measured."""

    name: str
    directory: str
    num_steps: int
    """Number of recorded steps."""
    num_trained_steps: int | None = None
    """Number of steps that updated the weights; 0 is treated as a failure."""
    accuracy_before: float | None = None
    """Fraction of correct answers before the first step, among those with a verdict; `None` without verdicts."""
    accuracy_after: float | None = None
    """Accuracy after the last evaluated step; `None` without an evaluation, or if that evaluation had no answers."""
    accuracy_best: float | None = None
    accuracy_num: float | None = None
    """Number of answers or pairs that the last accuracy is computed from."""
    measure: str = "accuracy"
    """Type of the scores: `accuracy`, `mean reward` without verdicts, or `score`, a mean of verdicts, and of rewards
    for answers without a verdict; every answer has the same weight. `loss` if the loss on examples was measured instead
    of answers.
    """
    score_before: float | None = None
    score_after: float | None = None
    score_best: float | None = None
    """Best score of the evaluations after training began: the highest, or the lowest loss."""
    reward_first5: float | None = None
    """Mean reward of the first five steps, or of the first half of a run with fewer than ten steps."""
    reward_last5: float | None = None
    """Mean reward of the last five steps, or of the last half of a run with fewer than ten steps."""
    setup_s: float | None = None
    """Duration from the start of the command to the end of the first optimizer step, in the last session."""
    train_s: float | None = None
    """Duration of all steps, without evaluations."""
    evaluate_s: float | None = None
    seconds_per_step: float | None = None
    generated_tokens_per_s: float | None = None
    """Throughput while generating."""
    trained_tokens_per_s: float | None = None
    """Throughput while training."""
    peak_rss_bytes: int | None = None
    """Peak of the summed PSS of all processes of the run on this machine, in the last session."""
    empty_evaluations: int = 0
    """Number of evaluations without an answer."""
    evaluation_infra_errors: int = 0
    """Number of answers in evaluations without a reward because of an infrastructure error."""
    infra_errors: int = 0
    """Number of answers in training without a reward because of an infrastructure error."""
    infra_error_share: float | None = None
    timeouts: int = 0
    """Number of answers in training whose verifier timed out; their reward is 0."""
    timeout_share: float | None = None
    reward_counted: float | None = None
    """Mean reward of the trained rollouts, if the schedule selects among rollouts (`selection/…` of every step)."""
    reward_launched: float | None = None
    """Mean reward of all rollouts launched for the same groups: an estimate; see `roll.rollout.selection_bias`."""
    length_counted: float | None = None
    length_launched: float | None = None
    stopped_share: float | None = None
    """Fraction of launched rollouts that were stopped before they had a reward."""
    tracker_failures: int = 0
    """Number of failed writes to a tracker (TensorBoard, W&B, …) or a Parquet file."""
    steps_asked: int | None = None
    """Configured number of steps of the whole run."""
    ending: Ending | None = None
    """End of the last session; `None` in summaries of older versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values; numbers that are not finite become `None`."""
        values = asdict(self).items()
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values}

    @property
    def problem(self) -> str:
        """Reason why a completed run is treated as a failure; an empty string if it succeeded."""
        if self.num_trained_steps != 0:
            return ""
        failed = f"; {self.infra_errors} answers got no reward" if self.infra_errors else ""
        return (
            f"none of {self.num_steps} steps updated the weights{failed}. Inspect the answers and rewards with `roll "
            f"view {self.directory}`."
        )

    def write(self, path: Path) -> None:
        """Write `summary.json`, atomically.

        Raises:
            OSError: The file cannot be written.
        """
        atomic.write_json(path, self.to_json())

    def build_table(self) -> Table:
        """Return the summary as a table for the terminal."""
        from rich import box
        from rich.table import Table

        steps = "step" if self.num_steps == 1 else "steps"
        table = Table(box=box.ROUNDED, show_header=False, title=f"{self.name}: {self.num_steps} {steps}")
        table.add_column(style="dim")
        table.add_column(justify="right", style="bold")
        for label, text in _format_lines(self):
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
    """Summarize a run from `metrics.jsonl`; `rows` contains the lines of this file, if it was already read."""
    rows = read_metrics(metrics_path) if rows is None else rows
    steps = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    accuracies = _Scores.from_rows(evaluations, lambda row: row.get("eval/accuracy"))
    views = [EvaluationView.from_metrics(row["step"], row) for row in evaluations]
    measure = next((view.measure for view in reversed(views) if view.value is not None), "accuracy")
    best = min if measure == "loss" else max
    scores = _Scores.from_rows(evaluations, lambda row: EvaluationView.from_metrics(row["step"], row).value, best)
    compared = count_compared_steps(len(steps))
    trained = _select_values(steps, "data/groups_trained")
    step_times = _select_values(steps, "time/step_s")
    return Summary(
        name=name,
        directory=str(directory),
        num_steps=len(steps),
        num_trained_steps=sum(n > 0 for n in trained) if trained else None,
        accuracy_before=accuracies.before,
        accuracy_after=accuracies.after,
        accuracy_best=max(_select_values(evaluations, "eval/accuracy"), default=None),
        accuracy_num=next(iter(_select_values(evaluations[::-1], "eval/accuracy_n")), None),
        measure=measure,
        score_before=scores.before,
        score_after=scores.after,
        score_best=scores.best,
        reward_first5=_compute_mean(_select_values(steps[:compared], "reward/mean")),
        reward_last5=_compute_mean(_select_values(steps[-compared:], "reward/mean")),
        setup_s=setup_s,
        train_s=math.fsum(step_times) if step_times else None,
        evaluate_s=math.fsum(_select_values(rows, "time/evaluate_s")) if evaluations else None,
        seconds_per_step=_compute_mean(step_times),
        generated_tokens_per_s=_compute_rate(steps, "rollout/num_tokens", select_generation_time_name(*steps)),
        trained_tokens_per_s=_compute_rate(steps, "training/num_tokens", "time/train_s"),
        peak_rss_bytes=peak_rss_bytes,
        empty_evaluations=sum(view.value is None for view in views),
        evaluation_infra_errors=round(math.fsum(_select_values(evaluations, "eval/infra_errors"))),
        infra_errors=round(math.fsum(_select_values(steps, "rollout/infra_errors"))),
        infra_error_share=_compute_mean(_select_values(steps, "rollout/infra_error_share")),
        timeouts=round(math.fsum(_select_values(steps, "reward/timeouts"))),
        timeout_share=_compute_mean(_select_values(steps, "reward/timeout_share")),
        **{name: _compute_mean(_select_values(steps, f"selection/{name}")) for name in _SELECTION_METRICS},  # type: ignore[arg-type]
        tracker_failures=tracker_failures,
        steps_asked=steps_asked,
        ending=ending,
    )


def list_next_commands(run: RunDirectory, summary: Summary, pipeline: str, *, has_rollouts: bool) -> list[str]:
    """Return lines with the location of a finished run's model, and commands that use the model."""
    saved = sorted(run.checkpoints_dir.glob("step-*/model"), key=lambda path: (len(path.parent.name), path))
    if not saved:
        untrained = "no step updated the weights"
        reason = untrained if summary.num_trained_steps == 0 else "checkpoint.at_end is false"
        return [f"there is no trained model, because no checkpoint was saved ({reason})"]
    commands = [f"roll chat {run.path}"] if pipeline not in ("reward_model", "diffusion") else []
    commands += [f"roll view {run.path}"] if has_rollouts else []
    commands += [f"roll dashboard {run.path}", f"roll export {run.path} DIR"]
    samples = [f"samples  {run.samples_dir}"] if run.samples_dir.is_dir() else []
    return [*samples, f"model  {saved[-1]}", f"next   {'   '.join(commands)}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scores:
    """Scores of a run's evaluations for one metric; `None` if not measured."""

    before: float | None
    after: float | None
    best: float | None
    """Best value after training began."""

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        get_value: Callable[[Mapping[str, Any]], float | None],
        best: Callable[..., float | None] = max,
    ) -> _Scores:
        first, later = rows[:1], [row for row in rows if row["step"] > 0]
        found = [v for row in later if (v := get_value(row)) is not None]
        return cls(
            before=get_value(first[0]) if first and first[0]["step"] == 0 else None,
            after=get_value(later[-1]) if later else None,
            best=best(found, default=None),
        )


def _select_values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _compute_mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def select_generation_time_name(*steps: Mapping[str, Any]) -> str:
    """Return the name of the metric with the generation time.

    The name is `time/step_s` if generation runs concurrently with training.
    """
    return "time/generate_s" if any(step.get("time/generate_s") for step in steps) else "time/step_s"


def _compute_rate(rows: Sequence[Mapping[str, Any]], amount: str, seconds: str) -> float | None:
    """Return the total of the metric `amount` divided by the total of `seconds`, over the rows with both metrics."""
    both = [(row[amount], row[seconds]) for row in rows if row.get(amount) is not None and row.get(seconds)]
    return math.fsum(a for a, _ in both) / math.fsum(s for _, s in both) if both else None


def _format_selection(summary: Summary) -> list[tuple[str, str]]:
    """Return lines that compare the rollouts used for training with all launched rollouts; empty if all are used."""
    if summary.reward_counted is None or summary.reward_launched is None:
        return []
    return [
        ("reward, trained / launched", f"{summary.reward_counted:.3f} / about {summary.reward_launched:.3f}"),
        ("length, trained / launched", f"{summary.length_counted:.0f} / about {summary.length_launched:.0f}"),
        ("stopped before scoring", f"{summary.stopped_share:.0%}"),
    ]


def _format_lines(summary: Summary) -> list[tuple[str, str]]:
    def format_number(value: float | None, format_spec: str = ".3f", unit: str = "") -> str:
        return "–" if value is None else f"{value:{format_spec}}{unit}"

    def format_score(value: float | None) -> str:
        num = summary.accuracy_num if summary.measure == "accuracy" else None
        return "–" if value is None else format_accuracy(value, num)

    peak = None if summary.peak_rss_bytes is None else summary.peak_rss_bytes / 2**30
    name = summary.measure
    count = count_compared_steps(summary.num_steps)
    steps = "step" if count == 1 else f"{count} steps"
    rewards = [
        (f"reward, first {steps}", format_number(summary.reward_first5)),
        (f"reward, last {steps}", format_number(summary.reward_last5)),
    ]
    if summary.num_steps < 2:
        rewards = [("reward", format_number(summary.reward_last5))]
    lines = [
        (f"{name} before", format_score(summary.score_before)),
        (f"{name} after", format_score(summary.score_after)),
        *rewards,
        *_format_selection(summary),
        ("setup until first update", format_number(summary.setup_s, ".1f", " s")),
        ("training", format_number(summary.train_s, ".1f", " s")),
        ("evaluation", format_number(summary.evaluate_s, ".1f", " s")),
        ("per step", format_number(summary.seconds_per_step, ".2f", " s")),
        ("generated", format_number(summary.generated_tokens_per_s, ",.0f", " tok/s")),
        ("trained", format_number(summary.trained_tokens_per_s, ",.0f", " tok/s")),
        ("peak memory", format_number(peak, ".2f", " GiB")),
    ]
    if summary.num_trained_steps == 0:
        lines.insert(0, ("steps that updated the weights", "none"))
    for label, count, share in (
        ("answers without a reward (infrastructure errors)", summary.infra_errors, summary.infra_error_share),
        ("answers whose verifier timed out", summary.timeouts, summary.timeout_share),
    ):
        if count:
            lines.append((label, f"{count} ({format_number(share, '.1%')})"))
    if summary.evaluation_infra_errors:
        lines.append(("evaluation answers without a reward", str(summary.evaluation_infra_errors)))
    if summary.empty_evaluations:
        lines.append(("evaluations without answers", str(summary.empty_evaluations)))
    if summary.tracker_failures:
        lines.append(("tracker failures (see logs)", str(summary.tracker_failures)))
    return [line for line in lines if line[1] != "–"]
