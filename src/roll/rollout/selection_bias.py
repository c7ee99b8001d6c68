"""Selection bias of scheduling: rewards and lengths of the counted rollouts compared with all launched ones.

    launched = counted (the groups that a step got) + unused (scored, but not chosen) + stopped (never finished)

A scheduler that takes the rollouts that finish first takes short answers and, if length and reward are correlated, a
biased sample of rewards. Rollouts that were scored but not used show how far both means are off. Stopped answers have
no reward, and are longer than the answers chosen instead of them, so the difference of these means is a lower bound of
the bias in length. To estimate the whole bias, each stopped answer gets a stand-in: it would have finished after the
last counted rollout of its group, so that rollout is the nearest one with a known reward.

A prompt that is deferred and launched again counts once for every launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.rollout.group_run import GroupRun
from roll.types import Rollout

__all__ = ["SelectionBias"]


@dataclass(kw_only=True, slots=True)
class SelectionBias:
    """Statistics of the rollouts that one step accounts for."""

    counted: list[tuple[float, int]] = field(default_factory=list)
    """Reward and tokens of each rollout of the step's groups."""
    unused: list[tuple[float, int]] = field(default_factory=list)
    """Reward and tokens of each rollout that was scored and not chosen."""
    launched: list[tuple[float, int]] = field(default_factory=list)
    """Reward and tokens of all rollouts of the step's groups, with stand-ins for stopped rollouts."""
    num_stopped: int = 0
    """Number of rollouts that were stopped before they had a reward."""

    def add(self, run: GroupRun, *, counts: bool) -> None:
        """Add a group that has ended or was stopped; `counts` is True if the step gets the group."""
        chosen = {rollout.index for rollout in run.group.scored} if counts else set()
        for rollout in run.scored:
            (self.counted if rollout.index in chosen else self.unused).extend(_facts([rollout]))
        self.num_stopped += run.num_stopped
        if chosen:
            last = [rollout for rollout in run.scored if rollout.index in chosen][-1]
            self.launched += _facts([*run.scored, *[last] * run.num_stopped])

    def metrics(self) -> dict[str, float]:
        """Compute mean reward and length of the counted, of all finished and of all launched rollouts, and the stopped
        share.

        The means over launched rollouts are estimates, with stand-ins for stopped rollouts.
        """
        finished = [*self.counted, *self.unused]
        launched = len(finished) + self.num_stopped
        if not self.counted:
            return {}
        return {
            "selection/reward_counted": _mean(reward for reward, _ in self.counted),
            "selection/reward_finished": _mean(reward for reward, _ in finished),
            "selection/length_counted": _mean(length for _, length in self.counted),
            "selection/length_finished": _mean(length for _, length in finished),
            "selection/reward_launched": _mean(reward for reward, _ in self.launched),
            "selection/length_launched": _mean(length for _, length in self.launched),
            "selection/unused_share": len(self.unused) / launched,
            "selection/stopped_share": self.num_stopped / launched,
        }


def _facts(rollouts: Sequence[Rollout]) -> list[tuple[float, int]]:
    return [(r.reward.value, len(r.token_ids)) for r in rollouts if r.reward is not None]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
