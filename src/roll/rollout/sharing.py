"""Rules that decide when engines release devices shared with trainers, and when they generate on them again.

    rule              engines that release devices    when                             they generate again
    ────────────────────────────────────────────────────────────────────────────────────────────────────────
    disaggregated     none                            never
    colocated         all                             the batch is complete            after the weight sync
    partial_overlap   those that share devices        the batch is complete            after the weight sync
    elastic_overlap   those that share devices        `ratio` of the batch is ready    if that saves more than a switch
    stream_training   those that share devices        20 to 50 % of the round is done, after the weight sync
                                                      and the rest fits into the KV cache

`stream_training` is the stream trainer of RollPacker (arXiv 2509.21009, section 4.3), and `partial_overlap` the
train-rollout multiplexing of ROLL (arXiv 2512.24873). `elastic_overlap` adapts its ratio as verl does. A run and the
simulator call the same functions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from roll.rollout.buffer import SampleBuffer

__all__ = ["OverlapState", "RoundProgress", "StreamStart", "compute_overlap_start", "measure_round", "predict_saved_s"]

FIRST_RATIO = 0.4
"""Fraction of the batch that must be ready before the devices are released, in the first step."""
RATIO_STEP_UP, RATIO_STEP_DOWN = 0.05, 0.03
"""Changes of the ratio after steps in which the trainer did or did not wait for data."""
STREAK = 2
"""Number of consecutive steps with the same outcome after which the ratio changes."""
NUM_STEPS = 3
"""Number of recent steps and switches whose mean duration predicts the next one."""
MIN_WAIT_SHARE = 0.02
"""Minimum fraction of a step that the trainer must wait for data for the step to be treated as one with a wait."""
LENGTH_QUANTILE = 0.9
"""Quantile of past lengths that an unfinished request is expected to reach."""
MAX_LENGTHS = 8192
"""Number of past lengths that are stored."""
STREAM_STARTS = (0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
"""Fractions of a round at which `stream_training` checks whether the devices can be released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapState:
    """The measurements of the sharing rule `elastic_overlap`; every method returns a new state."""

    ratio: float = FIRST_RATIO
    waits: tuple[bool, ...] = ()
    """Whether the trainer waited for data, in the last steps since the ratio changed."""
    switches_s: tuple[float, ...] = ()
    """Durations of the last switches in seconds, to training and back."""
    generated: tuple[tuple[int, float], ...] = ()
    """Finished groups and engine-seconds of the last steps."""

    def record_step(self, *, wait_s: float, step_s: float) -> OverlapState:
        """Adapt the ratio to the time that the trainer waited for data after the devices were released."""
        waited = wait_s > MIN_WAIT_SHARE * step_s
        waits = (*self.waits, waited) if all(before is waited for before in self.waits) else (waited,)
        if len(waits) < STREAK:
            return replace(self, waits=waits)
        change = RATIO_STEP_UP if waited else -RATIO_STEP_DOWN
        return replace(self, ratio=min(1.0, max(0.0, round(self.ratio + change, 9))), waits=())

    def record_generation(self, num_groups: int, engine_s: float) -> OverlapState:
        """Add the number of groups that finished in a step, and the total engine-seconds of the step."""
        return replace(self, generated=(*self.generated, (num_groups, engine_s))[-NUM_STEPS:])

    @property
    def groups_per_engine_s(self) -> float:
        """Groups that one engine finishes per second; 0 if unknown."""
        engine_s = sum(seconds for _, seconds in self.generated)
        return sum(count for count, _ in self.generated) / engine_s if engine_s > 0 else 0.0

    def record_switch(self, seconds: float) -> OverlapState:
        """Add the duration of a switch to training and back."""
        return replace(self, switches_s=(*self.switches_s, seconds)[-NUM_STEPS:])

    def should_generate(self, saved_s: float) -> bool:
        """Return whether engines should generate on the shared devices until the next update.

        Args:
            saved_s: Seconds by which these engines shorten the wait for the next batch (`predict_saved_s`).
        """
        if not self.switches_s:
            return True
        return saved_s > sum(self.switches_s) / len(self.switches_s)


def compute_overlap_start(ratio: float, batch_size: int, min_groups: int) -> int:
    """Return the number of finished groups at which `elastic_overlap` releases the devices.

    Args:
        ratio: `OverlapState.ratio`.
        batch_size: Number of groups of a batch.
        min_groups: Smallest number of groups with which the trainer can begin; `batch_size` if it needs all of them.
    """
    return min(batch_size, max(min_groups, math.ceil(ratio * batch_size)))


def predict_saved_s(num_missing: int, groups_per_engine_s: float, num_kept: int, num_shared: int) -> float:
    """Predict by how many seconds engines on shared devices shorten the wait for the next batch.

    Args:
        num_missing: Number of groups of the next batch that have not finished.
        groups_per_engine_s: Groups that one engine finishes per second.
        num_kept: Number of engines that do not share devices.
        num_shared: Number of engines that share devices.
    """
    if num_missing <= 0:
        return 0.0
    if not num_kept or groups_per_engine_s <= 0:
        return math.inf
    return num_missing / groups_per_engine_s * (1 / num_kept - 1 / (num_kept + num_shared))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundProgress:
    """Progress of the rollouts of a synchronous round."""

    num_done: int
    """Number of rollouts that have finished."""
    unfinished_prompts: Sequence[int]
    """Number of prompt tokens of each rollout that has not finished."""

    @property
    def fraction_done(self) -> float:
        """Fraction of the rollouts that have finished."""
        total = self.num_done + len(self.unfinished_prompts)
        return self.num_done / total if total else 1.0


def measure_round(buffer: SampleBuffer) -> RoundProgress:
    """Return the progress of the rollouts of all groups that wait for a step."""
    runs = [live.run for live in buffer if not live.is_taken]
    return RoundProgress(
        num_done=sum(run.num_finished for run in runs),
        unfinished_prompts=[len(run.draw.token_ids) for run in runs for _ in range(run.num_stopped)],
    )


class StreamStart:
    """Decides when `stream_training` releases the devices; it does so at most once per round.

    It checks at each of the fractions in `STREAM_STARTS` whether the KV cache of the remaining engines can hold all
    unfinished requests until they end. A request is expected to reach the `LENGTH_QUANTILE` of past lengths.
    """

    def __init__(self) -> None:
        self._checked = 0.0
        self._lengths: deque[int] = deque(maxlen=MAX_LENGTHS)

    def is_due(self, progress: RoundProgress, capacity: int | None) -> bool:
        """Return whether the devices should be released now.

        Args:
            progress: The progress of the round.
            capacity: Number of tokens that fit into the KV caches of the remaining engines; `None` if unknown.
        """
        passed = [start for start in STREAM_STARTS if self._checked < start <= progress.fraction_done]
        if not passed:
            return False
        self._checked = passed[-1]
        if capacity is None or not self._lengths:
            return False
        ordered = sorted(self._lengths)
        expected = ordered[math.ceil(LENGTH_QUANTILE * len(ordered)) - 1]
        return sum(prompt + expected for prompt in progress.unfinished_prompts) <= capacity

    def end_round(self, lengths: Iterable[int]) -> None:
        """End a round, and record the lengths of its answers.

        Args:
            lengths: Lengths, in tokens, of the answers of this round that are trained on.
        """
        self._checked = 0.0
        self._lengths.extend(lengths)
