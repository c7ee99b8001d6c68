"""What a recording says of each answer's work, for schedules that answer the same prompts again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from roll.tracking.recording.records import RecordedStep
from roll.tracking.recording.tables import TRAIN
from roll.types import IntArray, RewardResult, Rollout

__all__ = ["WAITS", "RecordedWork", "previous_turn", "request_id"]

WAITS = ("generate", "wait", "environment", "reward")
"""Phases that wait for a batch."""


@dataclass(slots=True)
class RecordedWork:
    """Lengths, rewards and latencies by name, of a few hundred bytes for each rollout. Made by `of`."""

    tokens: dict[str, int] = field(default_factory=dict)
    """By request id, tokens that were generated until the answer ended by itself or at its limit."""
    stopped: dict[str, bool] = field(default_factory=dict)
    """By request id, whether the answer ended by itself."""
    environment_s: dict[str, float] = field(default_factory=dict)
    """By request id of a later turn, seconds between the end of the turn before and it."""
    rewards: dict[str, RewardResult] = field(default_factory=dict)
    """By rollout id."""
    between: dict[str, tuple[IntArray, ...]] = field(default_factory=dict)
    """By rollout id, what came between its turns; only of rollouts with several."""
    turn_rewards: dict[str, tuple[tuple[float, str], ...]] = field(default_factory=dict)
    """By rollout id, reward and state of each turn; only of rollouts with turns."""
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """By draw id."""
    train_s: dict[int, float] = field(default_factory=dict)
    """By step, from the batch to the weight sync."""
    sync_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    """By step, for the batch: in a synchronous run, generation and scoring."""
    step_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Iterable[RecordedStep]) -> RecordedWork:
        """Of these steps, read one after the other."""
        work = cls()
        ended: dict[str, float] = {}
        for step in steps:
            for request in step.requests:
                if request.finish_reason in ("stop", "length"):
                    work.tokens[request.request_id] = request.num_tokens
                    work.stopped[request.request_id] = request.finish_reason == "stop"
                before = previous_turn(request.request_id)
                if before in ended:
                    work.environment_s[request.request_id] = max(0.0, request.queued_s - ended[before])
                ended[request.request_id] = request.ended_s
            for group in step.groups:
                work.prompt_tokens[group.draw.draw_id] = len(group.draw.token_ids)
                for rollout in group.rollouts:
                    work._add(rollout)
            times = step.timings_s
            work.wait_s[step.step] = sum(times.get(name, 0.0) for name in WAITS)
            work.sync_s[step.step] = times.get("sync", 0.0)
            work.step_s[step.step] = times.get("step", 0.0)
            work.train_s[step.step] = _training(times)
        return work

    def _add(self, rollout: Rollout) -> None:
        name = rollout.rollout_id
        if rollout.reward is not None:
            self.rewards[name] = rollout.reward
        turns = rollout.turns
        if not turns:
            return
        self.turn_rewards[name] = tuple((turn.reward, turn.state) for turn in turns)
        self.between[name] = tuple(rollout.token_ids[a.end : b.start].copy() for a, b in pairwise(turns))


def previous_turn(request_id: str) -> str:
    """The id of the request before a later turn's; empty for a first one.

    >>> previous_turn("train-3.1"), previous_turn("train-3.1.t1"), previous_turn("train-3.1.t2")
    ('', 'train-3.1', 'train-3.1.t1')
    """
    first, mark, turn = request_id.rpartition(".t")
    if not mark:
        return ""
    return first if turn == "1" else f"{first}.t{int(turn) - 1}"


def request_id(draw_id: int, index: int, turn: int = 0) -> str:
    """Of a turn of a training rollout."""
    first = f"{TRAIN}-{draw_id}.{index}"
    return first if turn == 0 else f"{first}.t{turn}"


def _training(times: Mapping[str, float]) -> float:
    """What a step did besides waiting, syncing, evaluating and writing, as far as it was measured."""
    names = ("advantages", "old_logprobs", "reference", "values", "train_critic", "train")
    return sum(times.get(name, 0.0) for name in names)
