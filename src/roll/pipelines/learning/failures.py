"""Infrastructure errors among a run's answers: their share of each step, their causes, and when they stop the run.

    life cycle ──► Retries ──► metrics, a warning at the first failure of a step
    rollouts of a step ──► Failures (a step's counts, causes) ──► metrics, one warning
                                  │
                                  └─► the last steps together ──► alarm

A verifier that requires finished answers does not judge an answer that was cut off, so such an answer gives no
information about the verifier: shares are of the answers that were, or should have been, judged.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.config.alarms import AlarmsConfig
from roll.pipelines.learning.alarms import Alarm
from roll.pipelines.learning.state import LearningState
from roll.rewards.compose import UNFINISHED
from roll.rollout.lifecycle import RolloutState, Transition
from roll.types import Group, Rollout, RolloutStatus

__all__ = ["Failures", "Retries", "check_failures", "count_failures", "describe", "step_alarms"]

logger = logging.getLogger(__name__)

_PROCESS = re.compile(r" \(process \d+\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How many of some answers we failed, and why."""

    asked: int = 0
    """Answers that were judged, or would have been without an infrastructure error."""
    failed: int = 0
    """Answers without a reward (`infra_error`)."""
    timed_out: int = 0
    """Answers whose verifier timed out, which got its 0."""
    causes: Counter[str] = field(default_factory=Counter)
    """Number of answers without a reward, by cause."""
    prompts: dict[str, str] = field(default_factory=dict)
    """UID of the first prompt with each cause."""

    def metrics(self) -> dict[str, float]:
        """Return counts, and shares of the answers that were, or should have been, judged."""
        return {
            "rollout/infra_errors": float(self.failed),
            "rollout/infra_error_share": self.failed / self.asked if self.asked else 0.0,
            "reward/timeouts": float(self.timed_out),
            "reward/timeout_share": self.timed_out / self.asked if self.asked else 0.0,
        }

    @property
    def counts(self) -> list[int]:
        """The numbers asked, failed and timed out, as stored for a window of steps."""
        return [self.asked, self.failed, self.timed_out]


def count_failures(groups: Iterable[Group]) -> Failures:
    """Count what we failed of the answers of these groups."""
    asked = failed = timed_out = 0
    causes: Counter[str] = Counter()
    prompts: dict[str, str] = {}
    for rollout in (r for group in groups for r in group.rollouts):
        if rollout.status is RolloutStatus.INFRA_ERROR:
            cause = _cause(rollout)
            causes[cause] += 1
            prompts.setdefault(cause, rollout.prompt.uid)
            asked, failed = asked + 1, failed + 1
        elif rollout.reward is not None and not rollout.reward.verdict.endswith(UNFINISHED):
            asked, timed_out = asked + 1, timed_out + bool(rollout.reward.timed_out)
    return Failures(asked=asked, failed=failed, timed_out=timed_out, causes=causes, prompts=prompts)


class Retries:
    """Counts retries of failed attempts, whatever their outcome; a listener of the life cycle."""

    def __init__(self) -> None:
        self._num = 0
        self._reported = False

    def on_transition(self, event: Transition) -> None:
        """Count a retry; a listener of the life cycle that returns at once."""
        again = event.after is RolloutState.QUEUED and event.before is not None and bool(event.detail)
        self._num += again
        if not self._reported and (again or event.after is RolloutState.INFRA_ERROR):
            self._reported = True  # one warning per step: an outage fails hundreds of answers alike
            logger.warning("an answer %s: %s", "is tried again" if again else "got no reward", event.detail)

    def metrics(self) -> dict[str, float]:
        """Return the number of retries since the last call."""
        num, self._num, self._reported = self._num, 0, False
        return {"rollout/retries": float(num)}


def _cause(rollout: Rollout) -> str:
    """Return a rollout's cause without prompt and process, so that equal causes are counted together."""
    return _PROCESS.sub("", rollout.cause.removesuffix(f" (prompt '{rollout.prompt.uid}')"))


def describe(failures: Failures) -> str:
    """Describe in a sentence how many answers failed and why; empty if none did."""
    parts = []
    if failures.failed:
        cause, count = failures.causes.most_common(1)[0]
        often = "" if count == failures.failed else f", {count} of them"
        parts.append(
            f"{failures.failed} of {failures.asked} answers got no reward{often}: {cause} "
            f"(first: prompt '{failures.prompts[cause]}')"
        )
    if failures.timed_out:
        parts.append(f"{failures.timed_out} of {failures.asked} answers took longer to verify than time_limit_s")
    return "; ".join(parts)


def check_failures(
    config: AlarmsConfig, window: Sequence[Sequence[int]], latest: Failures, *, first: bool
) -> list[Alarm]:
    """Return the alarms of failures over the last steps together.

    Args:
        config: Thresholds.
        window: `Failures.counts` of the last steps, at most `config.patience`, including the latest.
        latest: Failures of the step that has just ended.
        first: Whether it is the first step of a session, which stops at once if all answers failed.
    """
    full = len(window) >= config.patience
    asked = sum(counts[0] for counts in window)
    alarms = []
    for name, index, now, problem in (
        ("infra_errors_above", 1, latest.failed, "got no reward"),
        ("timeouts_above", 2, latest.timed_out, "took longer to verify than time_limit_s"),
    ):
        limit = getattr(config, name)
        if limit is None or not now:
            continue
        count = sum(counts[index] for counts in window)
        whole = first and now == latest.asked
        if whole or (full and count > limit * asked):
            last = describe(latest)
            message = f"{count} of {asked} answers of {len(window)} steps {problem}; of the last one, {last}"
            message = last if len(window) == 1 else message
            alarms.append(Alarm(message=f"{message} (alarms.{name})", stops=config.stops_on(name)))
    return alarms


def step_alarms(config: AlarmsConfig, state: LearningState, groups: Iterable[Group], *, first: bool) -> list[Alarm]:
    """Store a finished step's failure counts in `state`, log them, and return the alarms of too many failures."""
    failures = count_failures(groups)
    state.failures = [*state.failures, failures.counts][-config.patience :]
    alarms = check_failures(config, state.failures, failures, first=first)
    if alarms:
        state.failures = []  # a run that is resumed after an alarm gets as many steps again
    elif text := describe(failures):
        logger.warning("step %d: %s", state.step, text)
    return alarms
