"""The recorded lengths, rewards and latencies of each answer, for replays and simulations of the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise, takewhile

from roll.pipelines.recording.records import RecordedStep
from roll.types import EncodedText, IntArray, MediaSpan, RewardResult, Rollout, RolloutId

__all__ = ["WAIT_PHASES", "RecordedWork"]

WAIT_PHASES = ("generate", "wait", "environment", "reward")
"""Names of the phases in which a step waits for its batch."""


@dataclass(slots=True)
class RecordedWork:
    """Lengths, rewards and latencies of recorded rollouts, created with `from_steps`.

    Each rollout takes a few hundred bytes.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    """Number of generated tokens of answers that stopped or reached their limit, by request id."""
    stopped: dict[str, bool] = field(default_factory=dict)
    """True for answers that ended before the token limit, by request ID."""
    environment_s: dict[str, float] = field(default_factory=dict)
    """Seconds between the end of the previous turn and the start of a turn, by the turn's request ID."""
    answers: dict[RolloutId, int] = field(default_factory=dict)
    """Length in tokens of each rollout's first answer, if it ended; includes rollouts outside any batch."""
    rewards: dict[RolloutId, RewardResult] = field(default_factory=dict)
    tokens_between_turns: dict[RolloutId, tuple[IntArray, ...]] = field(default_factory=dict)
    """Tokens between the turns of a rollout; only for rollouts with several turns."""
    contexts: dict[RolloutId, dict[int, EncodedText]] = field(default_factory=dict)
    """Rewritten context of a turn, by number of the turn; only for rollouts with branches."""
    media: dict[RolloutId, tuple[MediaSpan, ...]] = field(default_factory=dict)
    """Spans of images between the turns of a rollout; only for rollouts with such images."""
    turn_rewards: dict[RolloutId, tuple[tuple[float, str], ...]] = field(default_factory=dict)
    """Reward and state of each turn; only for rollouts with turns."""
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """Length of each draw's prompt, by draw id."""
    train_s: dict[int, float] = field(default_factory=dict)
    """Seconds from the batch to the weight sync, by step."""
    sync_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the weight sync, by step."""
    wait_s: dict[int, float] = field(default_factory=dict)
    """Seconds of waiting for the batch, by step; in a synchronous run, the time of generation and scoring."""
    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds of each whole step, by step."""

    @classmethod
    def from_steps(cls, steps: Iterable[RecordedStep]) -> RecordedWork:
        """Collect lengths, rewards and times of recorded steps, which are read one at a time."""
        work = cls()
        seen: dict[str, RolloutId] = {}
        times_of: dict[str, tuple[float, float]] = {}
        for step in steps:
            for request in step.requests:
                if request.finish_reason in ("stop", "length"):
                    work.tokens[request.request_id] = request.num_tokens
                    work.stopped[request.request_id] = request.finish_reason == "stop"
                times_of[request.request_id] = request.queued_s, request.ended_s
            for group in step.groups:
                work.prompt_tokens[group.draw.draw_id] = len(group.draw.token_ids)
                for rollout in group.rollouts:
                    work._add(rollout)
            seen |= {move.rollout_id.request_id(): move.rollout_id for move in step.transitions}
            seen |= {r.rollout_id.request_id(): r.rollout_id for group in step.groups for r in group.rollouts}
            times = step.timings_s
            work.wait_s[step.step] = sum(times.get(name, 0.0) for name in WAIT_PHASES)
            work.sync_s[step.step] = times.get("sync", 0.0)
            work.step_s[step.step] = times.get("step", 0.0)
            work.train_s[step.step] = _sum_training_time(times)
        work.answers = {seen[name]: tokens for name, tokens in work.tokens.items() if name in seen}
        for rollout_id in seen.values():
            turns = takewhile(times_of.__contains__, map(rollout_id.request_id, count()))
            for before, after in pairwise(turns):
                work.environment_s[after] = max(0.0, times_of[after][0] - times_of[before][1])
        return work

    def _add(self, rollout: Rollout) -> None:
        name = rollout.rollout_id
        if rollout.reward is not None:
            self.rewards[name] = rollout.reward
        turns = rollout.turns
        if not turns:
            return
        self.turn_rewards[name] = tuple((turn.reward, turn.state) for turn in turns)
        self.tokens_between_turns[name] = tuple(rollout.token_ids[a.end : b.start].copy() for a, b in pairwise(turns))
        if rollout.branches:
            numbers = {turn.start: number for number, turn in enumerate(turns)}
            self.contexts[name] = {
                numbers[b.start]: EncodedText(b.context.copy(), b.media) for b in rollout.branches if b.start in numbers
            }
        if rollout.media:
            self.media[name] = rollout.media


def _sum_training_time(times: Mapping[str, float]) -> float:
    """Return the sum of a step's phase times, excluding waits, weight sync, evaluation and recording."""
    names = ("advantages", "old_logprobs", "reference", "values", "snapshots", "train_critic", "train")
    return sum(times.get(name, 0.0) for name in names)
