"""The interface through which a pipeline records and displays its run.

    log_step, log_evaluation ──► metrics.jsonl (the record: must succeed)
                             ├─► TensorBoard, W&B, SwanLab, MLflow, Trackio (may fail: counted)
    log_rollouts ────────────┼─► rollouts/*.parquet (may fail: counted)
    spans, on_rollout ───────┴─► console, trace.json

Invariants:
    - while the tracker's context is open, only its console writes to the terminal;
    - after a resume, every file has the content that it had when the checkpoint was saved, and continues from there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roll.callbacks import Callbacks
from roll.errors import CallbackError, EngineDiedError, EngineError, LossError, NoEngineError, RollError, UserError
from roll.tracking import atomic, logs
from roll.tracking.console import open_console
from roll.tracking.console_views import (
    Console,
    EvaluationView,
    RunHeader,
    StepView,
    format_failures,
    select_best_and_worst,
)
from roll.tracking.memory import PeakMemory
from roll.tracking.metrics_file import MetricsFile, RowKind, read_metrics
from roll.tracking.run_directory import RunDirectory, convert_write_errors
from roll.tracking.sinks import GuardedSink, build_rollout_table, open_sinks
from roll.tracking.spans import Spans
from roll.tracking.summary import Ending, Summary, list_next_commands, select_generation_time_name, summarize

if TYPE_CHECKING:
    from roll.config.run import RunConfig
    from roll.tracking.rollout_table import TokenColumns
    from roll.types import Group, Rollout

__all__ = ["Tracker"]

logger = logging.getLogger(__name__)
failure_logger = logging.getLogger("failure")
"""Logger outside of `roll`, so that failures are written only to the log; warnings of `roll` are also shown on the
console."""

LOG_ROLE = "controller"


class Tracker:
    """Records and displays one session of a run; a context manager.

    Args:
        run: Run directory, locked by this process.
        config: Configuration of the run.
        num_steps: Number of steps of the whole run.
        method: Name of the training method in the header; by default the name of the pipeline.
        setup: Description of engines, trainer and machine in the header.
        rollouts_per_step: Number of rollouts that a step waits for; `None` for a run without rollouts.
        resumed_at: Step of the checkpoint from which this session continues; later records are dropped. With `None` the
            run starts from the beginning, and all records are dropped (the records of a run that was killed before its
            first checkpoint).
        started_at: Time of the command (`time.time()`); by default, the start time of this process.
        callbacks: The user's callbacks, called when a step or an evaluation is recorded.

    Raises:
        RunDirectoryError: On entering, or later in `log_step` and `log_evaluation`: the record cannot be written.
        ConfigError: On entering: a configured tracker cannot be started.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        *,
        num_steps: int,
        method: str = "",
        setup: str = "",
        rollouts_per_step: int | None = None,
        resumed_at: int | None = None,
        started_at: float | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.run = run
        self.callbacks = callbacks or Callbacks()
        self.console = Console()
        self.spans = Spans()
        self._config = config
        self._resumed_at = resumed_at
        self._started_at = _read_process_start() if started_at is None else started_at
        self._rollouts_per_step = rollouts_per_step
        self._header = RunHeader(
            name=run.name,
            model=config.model.path,
            algorithm=method or config.pipeline,
            setup=setup,
            directory=str(run.path),
            num_steps=num_steps,
            resumed_at=resumed_at,
        )
        self._stack = ExitStack()
        self._sinks: list[GuardedSink] = []
        self._memory = PeakMemory()
        self._phase = ""
        self._num_ready = self._num_failed = self._num_timed_out = 0
        self._total: int | None = None
        self._setup_s: float | None = None
        self._parquet_failures = 0

    def __enter__(self) -> Tracker:
        config, run = self._config, self.run
        with ExitStack() as stack, convert_write_errors(run.path):
            self._metrics = MetricsFile(run.metrics_path)
            last_step = -1 if self._resumed_at is None else self._resumed_at
            self.truncate(last_step)
            run.summary_path.unlink(missing_ok=True)  # it describes the end of an earlier session
            settings = config.model_dump(mode="json")
            terminal = stack.enter_context(logs.redirect_infrastructure_logs(run.get_log_path(LOG_ROLE)))
            self._sinks = open_sinks(run, config.tracking, settings, last_step)
            stack.callback(self._report_abandoned_sinks)
            for sink in self._sinks:
                stack.callback(sink.close)
            self.console = open_console(config.tracking.console, terminal)
            stack.callback(self.console.close)
            stack.enter_context(_WarningHandler(self.console))
            self.spans = Spans(run.trace_path, on_phase=self._on_phase)
            stack.callback(self.spans.close)
            stack.callback(self._memory.start().stop)
            self.console.start(self._header)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, RollError):
            failure_logger.error("the run failed", exc_info=error)
        self.console.close()
        if error is not None:
            with contextlib.suppress(OSError):  # a full disk may have ended the run
                self._summarize(Ending.from_error(error)).write(self.run.summary_path)
        if isinstance(error, Exception) and _may_have_logs(error):
            self._print_last_log_lines()
        self._stack.close()

    def note(self, text: str) -> None:
        """Show a note about the startup progress, before the first step."""
        logger.info("%s", text)
        self.console.show_note(text)

    def on_rollout(self, rollout: Rollout) -> None:
        """Report that a rollout of the current phase is ready; returns immediately."""
        self._num_ready += 1
        self._num_failed += rollout.reward is None
        if rollout.reward is not None and rollout.reward.timed_out:
            if not self._num_timed_out:  # warn once per phase: a reward that hangs may hang for every answer
                logger.warning(
                    "verifying an answer to prompt '%s' exceeded the reward's time_limit_s: the reward is 0",
                    rollout.prompt.uid,
                )
            self._num_timed_out += 1
        self._show_progress()

    def _show_progress(self) -> None:
        self.console.show_progress(self._num_ready, self._total, format_failures(self._num_failed, self._num_timed_out))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a training step, with the throughput in tokens per second added.

        Generated tokens are divided by `time/generate_s` (by `time/step_s` if generation runs concurrently with the
        step), and trained tokens by `time/train_s`.
        """
        flat = {name: float(value) for name, value in metrics.items()}
        generating = select_generation_time_name(flat)
        generated = _compute_ratio(flat, "rollout/num_tokens", generating)
        trained = _compute_ratio(flat, "training/num_tokens", "time/train_s")
        rates = {"throughput/generated_tokens_per_s": generated, "throughput/trained_tokens_per_s": trained}
        flat |= {name: value for name, value in rates.items() if value is not None}
        flat |= {"memory/peak_rss_bytes": float(self._memory.peak_bytes)}
        self._record(step, "train", flat)
        reward = flat.get("reward/mean", None if self._rollouts_per_step is None else math.nan)
        if reward is not None and math.isfinite(reward):
            self.spans.add_counter_value("reward", reward)
        self.console.show_step(
            StepView(
                step=step,
                reward=reward,
                duration_s=flat.get("time/step_s", 0.0),
                phases={name: flat.get(f"time/{name}_s", 0.0) for name in self.spans.get_phases()},
                generated_per_s=generated,
                trained_per_s=trained,
                loss=flat.get("training/loss"),
                failures=format_failures(flat.get("rollout/infra_errors", 0), flat.get("reward/timeouts", 0)),
                truncated_share=flat.get("rollout/unfinished_share"),
            )
        )
        self.callbacks.notify_step(step, flat)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()) -> None:
        """Record the evaluation after `step` (0: before training) under `eval/…`, and its rollouts."""
        flat = {name if name.startswith("eval/") else f"eval/{name}": float(value) for name, value in metrics.items()}
        flat |= {"time/evaluate_s": self.spans.get_elapsed("evaluate")}
        self._record(step, "evaluation", flat)
        if groups:
            self._write_rollouts(self.run.get_evaluation_path(step), step, groups)
            self._send_rollouts("rollouts/evaluation", step, groups)
        self.console.show_evaluation(EvaluationView.from_metrics(step, flat))
        self.callbacks.notify_evaluation(step, flat)

    def log_rollouts(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Mapping[str, float] | None = None,
        tokens: TokenColumns | None = None,
    ) -> None:
        """Record every rollout of a step, with advantages and token columns for rollouts used for training."""
        self._write_rollouts(self.run.get_rollouts_path(step), step, groups, advantages, tokens)
        every = self._config.tracking.table_every_num_steps
        if every and step % every == 0:
            self._send_rollouts("rollouts/train", step, groups, advantages)
        self.console.show_answers(select_best_and_worst(groups))

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Write a fast tokenizer of `transformers` to the run directory, to decode rollouts; ignore any other
        tokenizer.
        """
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if not self._config.tracking.rollouts or fast is None or self.run.tokenizer_path.is_file():
            return
        try:
            atomic.write_text(self.run.tokenizer_path, fast.to_str())
        except Exception as error:
            reason = str(error) or type(error).__name__
            logger.warning("the tokenizer was not written to %s: %s", self.run.tokenizer_path, reason)

    def truncate(self, step: int) -> None:
        """Drop records after `step`; -1 drops all records."""
        self._metrics.truncate(step)
        for path in self.run.rollouts_dir.glob("*step-*.parquet"):
            number = path.stem.rpartition("-")[2]
            if number.isdigit() and int(number) > step:
                path.unlink()
        if any(self.run.tensorboard_dir.iterdir()):
            from roll.tracking.sinks.tensorboard import truncate_events

            truncate_events(self.run.tensorboard_dir, step)

    def _summarize(self, ending: Ending) -> Summary:
        return summarize(
            self.run.name,
            self.run.path,
            self.run.metrics_path,
            setup_s=self._setup_s,
            peak_rss_bytes=self._memory.stop(),
            tracker_failures=self._parquet_failures + sum(sink.num_failures for sink in self._sinks),
            steps_asked=self._header.num_steps,
            ending=ending,
        )

    def finish(self) -> Summary:
        """Write `summary.json` and the plot (`reward.png` or `loss.png`), show the summary, and return it."""
        from roll.tracking.plot import is_loss_plotted, plot_run

        for sink in self._sinks:
            sink.flush()
        summary = self._summarize(Ending(kind="finished"))
        with convert_write_errors(self.run.path):
            summary.write(self.run.summary_path)
            rows = read_metrics(self.run.metrics_path)
            plot_path = self.run.get_plot_path("loss" if is_loss_plotted(rows) else "reward")
            plot_run(plot_path, self.run.name, rows)
        self.console.close()
        self.console.show(summary.build_table())
        has_rollouts = self._rollouts_per_step is not None
        commands = list_next_commands(self.run, summary, self._config.pipeline, has_rollouts=has_rollouts)
        self.console.show("\n".join([str(self.run.summary_path), str(plot_path), *commands]))
        return summary

    def _record(self, step: int, kind: RowKind, metrics: Mapping[str, float]) -> None:
        with convert_write_errors(self.run.metrics_path):
            self._metrics.append(step, kind, metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def _write_rollouts(
        self,
        path: Path,
        step: int,
        groups: Sequence[Group],
        advantages: Mapping[str, float] | None = None,
        tokens: TokenColumns | None = None,
    ) -> None:
        if not self._config.tracking.rollouts:
            return
        from roll.tracking.rollout_table import write_rollouts

        try:
            write_rollouts(path, step, groups, advantages, tokens)
        except Exception as error:
            self._parquet_failures += 1
            reason = str(error) or type(error).__name__
            logger.warning("rollouts of step %d were not written to %s: %s", step, path, reason, exc_info=True)

    def _send_rollouts(
        self, name: str, step: int, groups: Sequence[Group], advantages: Mapping[str, float] | None = None
    ) -> None:
        num_rows = self._config.tracking.table_num_rows
        if self._sinks and num_rows:
            table = build_rollout_table(name, step, groups, advantages, num_rows)
            for sink in self._sinks:
                sink.log_table(step, table)

    def _on_phase(self, name: str) -> None:
        if self._phase == "train" and name != "train" and self._setup_s is None:
            self._setup_s = time.time() - self._started_at
        if not (name and self._phase):  # counts continue across the stages of a wait
            self._num_ready = self._num_failed = self._num_timed_out = 0
            self._total = self._rollouts_per_step if name == "generate" else None
        self._phase = name
        self.console.show_phase(name)
        if name in ("generate", "reward"):
            self._show_progress()

    def _report_abandoned_sinks(self) -> None:
        for sink in self._sinks:
            if sink.is_abandoned:
                self.console.show(
                    f"warning: tracking.{sink.name} did not finish in time and was abandoned; the tracker may be "
                    f"missing the last values, which are in {self.run.metrics_path}"
                )

    def _print_last_log_lines(self) -> None:
        written = sorted(self.run.logs_dir.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in written[-2:]:
            if lines := logs.read_tail(path, 8):
                self.console.show("\n".join([f"Last lines of {path}:", *(f"  {line}" for line in lines)]))


class _WarningHandler(logging.Handler):
    """Shows ROLL's warnings on the console within a `with` block."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._process_id = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        # A forked worker inherits this handler, but not the display's thread, so its warnings go to the log.
        if os.getpid() == self._process_id:
            self._console.warn(record.getMessage())

    def __enter__(self) -> _WarningHandler:
        logging.getLogger("roll").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("roll").removeHandler(self)


def _compute_ratio(metrics: Mapping[str, float], amount: str, seconds: str) -> float | None:
    return metrics[amount] / metrics[seconds] if amount in metrics and metrics.get(seconds) else None


def _may_have_logs(error: Exception) -> bool:
    """Return whether the logs may contain more information on the cause of an error than its message."""
    if isinstance(error, ExceptionGroup) and error.subgroup(UserError):
        return False
    # the messages of these errors state the cause
    if isinstance(error, EngineDiedError | EngineError | NoEngineError | LossError | CallbackError):
        return False
    return not isinstance(error, RollError) or isinstance(error, RuntimeError | ArithmeticError)


def _read_process_start() -> float:
    """Return the start time of this process; in a notebook or shell, the current time."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return time.time()
    import psutil

    return psutil.Process().create_time()
