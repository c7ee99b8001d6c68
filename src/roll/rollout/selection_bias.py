"""Selection bias of scheduling: compare rewards and lengths of the counted rollouts and of all launched rollouts.

    launched = counted (in the step's groups) + unused (scored, but not chosen) + stopped (never finished)

A scheduler that prefers rollouts that finish first selects short answers and, if length and reward are correlated, a
biased sample of rewards. Rollouts that were scored but not used show the bias of both means. Stopped answers have no
reward and are longer than the answers chosen instead, so this is a lower bound of the bias in length. To estimate the
whole bias, each stopped answer is replaced by the last counted rollout of the same group, which is the most similar
rollout with a known reward.

A prompt that is deferred and launched again is counted once per launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.rollout.group_run import GroupRun
from roll.types import Rollout

__all__ = ["SelectionBias"]


@dataclass(kw_only=True, slots=True)
class SelectionBias:
    """Rewards and lengths of the rollouts that were launched for one step."""

    counted: list[tuple[float, int]] = field(default_factory=list)
    """Reward and number of tokens of each rollout in the step's groups."""
    unused: list[tuple[float, int]] = field(default_factory=list)
    """Reward and number of tokens of each rollout that was scored but not chosen."""
    launched: list[tuple[float, int]] = field(default_factory=list)
    """Reward and number of tokens of each launched rollout; a stopped rollout is replaced by the last chosen rollout
    of the same group.
    """
    num_stopped: int = 0
    """Number of rollouts that were stopped before they had a reward."""

    def add(self, run: GroupRun, *, is_counted: bool) -> None:
        """Add a group that has ended or was stopped; `is_counted` is True if the step trains on the group."""
        chosen = {rollout.index for rollout in run.group.scored_rollouts} if is_counted else set()
        for rollout in run.scored_rollouts:
            (self.counted if rollout.index in chosen else self.unused).extend(_list_rewards_and_lengths([rollout]))
        self.num_stopped += run.num_stopped
        if chosen:
            last = [rollout for rollout in run.scored_rollouts if rollout.index in chosen][-1]
            self.launched += _list_rewards_and_lengths([*run.scored_rollouts, *[last] * run.num_stopped])

    def compute_metrics(self) -> dict[str, float]:
        """Return mean rewards and lengths of trained, finished and launched rollouts; empty if no rollout was trained
        on.

        The means over launched rollouts are estimates: a stopped rollout is replaced by the last chosen rollout of its
        group. The fractions of unused and of stopped rollouts are returned as well.
        """
        finished = [*self.counted, *self.unused]
        launched = len(finished) + self.num_stopped
        if not self.counted:
            return {}
        return {
            "selection/reward_counted": _compute_mean(reward for reward, _ in self.counted),
            "selection/reward_finished": _compute_mean(reward for reward, _ in finished),
            "selection/length_counted": _compute_mean(length for _, length in self.counted),
            "selection/length_finished": _compute_mean(length for _, length in finished),
            "selection/reward_launched": _compute_mean(reward for reward, _ in self.launched),
            "selection/length_launched": _compute_mean(length for _, length in self.launched),
            "selection/unused_share": len(self.unused) / launched,
            "selection/stopped_share": self.num_stopped / launched,
        }


def _list_rewards_and_lengths(rollouts: Sequence[Rollout]) -> list[tuple[float, int]]:
    return [(r.reward.value, len(r.token_ids)) for r in rollouts if r.reward is not None]


def _compute_mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
