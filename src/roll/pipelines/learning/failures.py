"""Infrastructure errors of a run's answers: their fraction in each step, their causes, and the alarms that stop the
run.

    life cycle ──► RetryCounter ──► metrics, a warning at the first failure of a step
    rollouts of a step ──► FailureCounts (a step's counts, causes) ──► metrics, one warning
                                  │
                                  └─► the last steps together ──► alarm

A verifier that requires finished answers does not judge truncated answers. Fractions are therefore relative to the
answers that were judged or should have been judged."""

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

__all__ = [
    "FailureCounts",
    "RetryCounter",
    "check_failures",
    "check_step_failures",
    "count_failures",
    "describe_failures",
]

logger = logging.getLogger(__name__)

_PROCESS_ID_PATTERN = re.compile(r" \(process \d+\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCounts:
    """Numbers of failed and timed-out answers, and the causes of the failures."""

    num_judged: int = 0
    """Number of answers that were judged, or would have been judged without an infrastructure error."""
    failed: int = 0
    """Number of answers without a reward (`infra_error`)."""
    timed_out: int = 0
    """Number of answers with a reward of 0 because their verifier timed out."""
    causes: Counter[str] = field(default_factory=Counter)
    """Number of answers without a reward, by cause."""
    prompts: dict[str, str] = field(default_factory=dict)
    """UID of the first prompt with each cause."""

    def collect_metrics(self) -> dict[str, float]:
        """Return the numbers of failed and timed-out answers, and their fractions of `num_judged`, as metrics."""
        return {
            "rollout/infra_errors": float(self.failed),
            "rollout/infra_error_share": self.failed / self.num_judged if self.num_judged else 0.0,
            "reward/timeouts": float(self.timed_out),
            "reward/timeout_share": self.timed_out / self.num_judged if self.num_judged else 0.0,
        }

    @property
    def counts(self) -> list[int]:
        """The numbers of judged, failed and timed-out answers, as stored for a window of steps."""
        return [self.num_judged, self.failed, self.timed_out]


def count_failures(groups: Iterable[Group]) -> FailureCounts:
    """Count the failed and timed-out answers of some groups."""
    num_judged = failed = timed_out = 0
    causes: Counter[str] = Counter()
    prompts: dict[str, str] = {}
    for rollout in (r for group in groups for r in group.rollouts):
        if rollout.status is RolloutStatus.INFRA_ERROR:
            cause = _get_cause(rollout)
            causes[cause] += 1
            prompts.setdefault(cause, rollout.prompt.uid)
            num_judged, failed = num_judged + 1, failed + 1
        elif rollout.reward is not None and not rollout.reward.verdict.endswith(UNFINISHED):
            num_judged, timed_out = num_judged + 1, timed_out + bool(rollout.reward.timed_out)
    return FailureCounts(num_judged=num_judged, failed=failed, timed_out=timed_out, causes=causes, prompts=prompts)


class RetryCounter:
    """Counts retries of failed rollouts, whether a retry succeeds or not; a listener of `LifeCycle`."""

    def __init__(self) -> None:
        self._num = 0
        self._reported = False

    def on_transition(self, event: Transition) -> None:
        """Count a retry, and log the first failure since the last call to `collect_metrics`."""
        again = event.after is RolloutState.QUEUED and event.before is not None and bool(event.detail)
        self._num += again
        if not self._reported and (again or event.after is RolloutState.INFRA_ERROR):
            self._reported = True  # one warning per step: an outage may fail hundreds of answers
            logger.warning("an answer %s: %s", "failed and will be retried" if again else "got no reward", event.detail)

    def collect_metrics(self) -> dict[str, float]:
        """Return the number of retries since the last call."""
        num, self._num, self._reported = self._num, 0, False
        return {"rollout/retries": float(num)}


def _get_cause(rollout: Rollout) -> str:
    """Return the cause of a rollout's failure without UID and process ID, so that identical causes compare equal."""
    return _PROCESS_ID_PATTERN.sub("", rollout.cause.removesuffix(f" (prompt '{rollout.prompt.uid}')"))


def describe_failures(failures: FailureCounts) -> str:
    """Describe in a sentence how many answers failed and why; empty if no answer failed."""
    parts = []
    if failures.failed:
        cause, count = failures.causes.most_common(1)[0]
        often = "" if count == failures.failed else f", {count} of them"
        parts.append(
            f"{failures.failed} of {failures.num_judged} answers got no reward{often}: {cause} "
            f"(first: prompt '{failures.prompts[cause]}')"
        )
    if failures.timed_out:
        parts.append(f"{failures.timed_out} of {failures.num_judged} answers exceeded time_limit_s during verification")
    return "; ".join(parts)


def check_failures(
    config: AlarmsConfig, window: Sequence[Sequence[int]], latest: FailureCounts, *, is_first_step: bool
) -> list[Alarm]:
    """Return the alarms about failed and timed-out answers, summed over the last steps.

    Args:
        config: Thresholds.
        window: `FailureCounts.counts` of the last steps, at most `config.patience`, including the latest.
        latest: Failures of the step that has just ended.
        is_first_step: Whether this is the first step of a session. The session stops immediately if all answers of its
            first step failed.
    """
    full = len(window) >= config.patience
    num_judged = sum(counts[0] for counts in window)
    alarms = []
    for name, index, now, problem in (
        ("infra_errors_above", 1, latest.failed, "got no reward"),
        ("timeouts_above", 2, latest.timed_out, "exceeded time_limit_s during verification"),
    ):
        limit = getattr(config, name)
        if limit is None or not now:
            continue
        count = sum(counts[index] for counts in window)
        all_failed = is_first_step and now == latest.num_judged
        if all_failed or (full and count > limit * num_judged):
            last = describe_failures(latest)
            message = f"{count} of {num_judged} answers of {len(window)} steps {problem}; in the last step, {last}"
            message = last if len(window) == 1 else message
            alarms.append(Alarm(message=f"{message} (alarms.{name})", stops=config.stops_on(name)))
    return alarms


def check_step_failures(
    config: AlarmsConfig, state: LearningState, groups: Iterable[Group], *, is_first_step: bool
) -> list[Alarm]:
    """Store a finished step's failure counts in `state`, log them, and return the alarms about too many failures."""
    failures = count_failures(groups)
    state.failures = [*state.failures, failures.counts][-config.patience :]
    alarms = check_failures(config, state.failures, failures, is_first_step=is_first_step)
    if alarms:
        state.failures = []  # a run that is resumed after an alarm gets as many steps again
    elif text := describe_failures(failures):
        logger.warning("step %d: %s", state.step, text)
    return alarms
