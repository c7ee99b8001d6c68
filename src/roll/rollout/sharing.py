"""Rules that decide when engines release devices shared with trainers, and when they generate on them again.

    rule              engines that release devices    when                             they generate again
    ────────────────────────────────────────────────────────────────────────────────────────────────────────
    disaggregated     none                            never
    colocated         all                             the batch is complete            after the weight sync
    partial_overlap   those that share devices        the batch is complete            after the weight sync
    elastic_overlap   those that share devices        `ratio` of the batch is ready    if that saves more than a switch
    stream_training   those that share devices        20 to 95 % of the round is done, after the weight sync
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
from roll.rollout.pace import PaceCurve

__all__ = [
    "GenerationLoad",
    "OverlapState",
    "RoundProgress",
    "StreamStart",
    "compute_overlap_start",
    "measure_round",
    "predict_saved_s",
]

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
STREAM_STARTS = tuple(percent / 100 for percent in range(20, 100, 5))
"""Fractions of a round at which `stream_training` checks whether the devices can be released. RollPacker checks up to
0.5; long answers fit into the remaining KV caches only later, and then still take long enough to train meanwhile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapState:
    """The measurements of the sharing rule `elastic_overlap`; every method returns a new state."""

    ratio: float = FIRST_RATIO
    waits: tuple[bool, ...] = ()
    """Whether the trainer waited for data, in the last steps since the ratio changed."""
    switches_s: tuple[float, ...] = ()
    """Durations of the last switches in seconds, to training and back."""
    generated: tuple[tuple[int, float, float], ...] = ()
    """Finished groups, seconds and engine-seconds of the last steps."""
    spans_s: tuple[float, ...] = ()
    """Seconds from the start of the first group of a batch to the end of its last one, for the last batches."""

    def record_step(self, *, wait_s: float, step_s: float) -> OverlapState:
        """Adapt the ratio to the time that the trainer waited for data after the devices were released."""
        waited = wait_s > MIN_WAIT_SHARE * step_s
        waits = (*self.waits, waited) if all(before is waited for before in self.waits) else (waited,)
        if len(waits) < STREAK:
            return replace(self, waits=waits)
        change = RATIO_STEP_UP if waited else -RATIO_STEP_DOWN
        return replace(self, ratio=min(1.0, max(0.0, round(self.ratio + change, 9))), waits=())

    def record_generation(self, num_groups: int, seconds: float, engine_s: float) -> OverlapState:
        """Add the number of groups that finished in a step, its duration, and its total engine-seconds."""
        return replace(self, generated=(*self.generated, (num_groups, seconds, engine_s))[-NUM_STEPS:])

    @property
    def groups_per_s(self) -> float:
        """Groups that finish per second; 0 if unknown."""
        total_s = sum(seconds for _, seconds, _ in self.generated)
        return sum(count for count, _, _ in self.generated) / total_s if total_s > 0 else 0.0

    @property
    def mean_engines(self) -> float:
        """Mean number of engines that generated in the last steps; 0 if unknown."""
        total_s = sum(seconds for _, seconds, _ in self.generated)
        return sum(engine_s for _, _, engine_s in self.generated) / total_s if total_s > 0 else 0.0

    def record_span(self, span_s: float) -> OverlapState:
        """Add the seconds from the start of the first group of a batch to the end of its last one."""
        return replace(self, spans_s=(*self.spans_s, span_s)[-NUM_STEPS:])

    def predict_wait_s(self, num_missing: int, age_s: float | None, num_until_release: int | None = None) -> float:
        """Predict the wait for the next batch with as many engines as in the last steps; infinite if unknown.

        The batch needs a number of further groups, and it needs all groups that would be too old for a later batch. Of
        such groups, the longest answer ends at about the same time after the start as in the last batches.

        Args:
            num_missing: Number of groups of the next batch that have not finished.
            age_s: Seconds since the start of the first running group that the next batch needs; `None` if it needs no
                particular running group.
            num_until_release: Number of groups that must still finish before the devices are released for the next
                batch, to limit the result to the time until then; `None` if they are released when it is complete.
        """
        if num_missing <= 0 and age_s is None:
            return 0.0
        if self.groups_per_s <= 0:
            return math.inf
        last_s = 0.0
        if age_s is not None and self.spans_s:
            last_s = sum(self.spans_s) / len(self.spans_s) - age_s
        wait_s = max(last_s, num_missing / self.groups_per_s)
        return wait_s if num_until_release is None else min(wait_s, max(0, num_until_release) / self.groups_per_s)

    def record_switch(self, seconds: float) -> OverlapState:
        """Add the duration of a switch to training and back."""
        return replace(self, switches_s=(*self.switches_s, seconds)[-NUM_STEPS:])

    def should_generate(self, saved_s: float, released_s: float) -> bool:
        """Return whether engines should generate on the shared devices until the next update.

        Args:
            saved_s: Seconds by which these engines shorten the wait for the next batch (`predict_saved_s`).
            released_s: Duration of the last switch to training. Until a switch back has been measured, it is the lower
                bound of the time for both.
        """
        switch_s = sum(self.switches_s) / len(self.switches_s) if self.switches_s else released_s
        return saved_s > switch_s


def compute_overlap_start(ratio: float, batch_size: int, min_groups: int) -> int:
    """Return the number of finished groups at which `elastic_overlap` releases the devices.

    Args:
        ratio: `OverlapState.ratio`.
        batch_size: Number of groups of a batch.
        min_groups: Smallest number of groups with which the trainer can begin; `batch_size` if it needs all of them.
    """
    return min(batch_size, max(min_groups, math.ceil(ratio * batch_size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationLoad:
    """The requests in flight, and the pace of the engines that process them."""

    num_requests: float
    """Number of requests at engines and in the queue."""
    engine_share: float
    """Fraction of a rollout's time that is spent at engines and in their queue; the rest is the time of its environment
    and its reward."""
    num_slots: float
    """Mean number of requests that an engine can run at the same time."""
    curve: PaceCurve | None
    """Pace curve of the engines; `None` if unknown: the time per token is then proportional to the requests."""

    def compute_latency_ratio(self, num_engines: float, reference: float) -> float:
        """Return the time that a rollout takes on `num_engines` engines, divided by its time on `reference` engines.

        The same requests are in flight in both cases. An engine takes longer for a token the more requests it runs,
        and requests without a slot wait in the queue. Environments and rewards take the same time in both cases.

        Args:
            num_engines: Number of engines.
            reference: Number of engines with which the load was measured.
        """
        if not self.num_requests:
            return 1.0
        ratio = self._compute_engine_time(num_engines) / self._compute_engine_time(reference)
        return 1 - self.engine_share + self.engine_share * ratio

    def _compute_engine_time(self, num_engines: float) -> float:
        """Return a value proportional to the time of a request at `num_engines` engines and in their queue."""
        per_slot = self.num_requests / (num_engines * self.num_slots)
        use = min(1.0, per_slot)
        token_s = use if self.curve is None else self.curve.compute_token_s(use)
        return token_s * per_slot / use


def predict_saved_s(wait_s: float, mean_engines: float, num_kept: int, num_shared: int, load: GenerationLoad) -> float:
    """Predict by how many seconds engines on shared devices shorten the wait for the next batch.

    Further engines save no time if tokens take as long with fewer requests per engine, as at the end of long answers.

    Args:
        wait_s: Predicted wait with `mean_engines` engines (`OverlapState.predict_wait_s`).
        mean_engines: Mean number of engines in the last steps.
        num_kept: Number of engines that do not share devices, which generate now.
        num_shared: Number of engines that share devices.
        load: The current load of the kept engines.
    """
    if wait_s <= 0:
        return 0.0
    if not num_kept or mean_engines <= 0 or math.isinf(wait_s):
        return math.inf
    numbers = (mean_engines, num_kept, num_kept + num_shared)
    measured, less, more = (load.compute_latency_ratio(number, num_kept) for number in numbers)
    return wait_s * (less - more) / measured


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
