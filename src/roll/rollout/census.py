"""What a choice among rollouts left out: rewards and lengths of what counts, beside all that was launched.

    launched = counted (the groups that a step got) + unused (scored, but not chosen) + stopped (never finished)

A policy that takes what finishes first takes short answers, and where length and reward are related, rewards that are
not those of the policy that is trained. What was scored but not used says how far both means are off. Answers that
were stopped have no reward, and are longer than what was chosen in their place, so the difference of these means is a
lower bound of the bias in length. An estimate of the whole bias takes a stand-in for each of them: had it gone on, it
would have finished after the last rollout of its group that counts, so that one is the nearest whose reward is known.

A prompt that is deferred and launched again counts once for every launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from roll.rollout.group_run import GroupRun
from roll.types import Rollout

__all__ = ["Census"]


@dataclass(kw_only=True, slots=True)
class Census:
    """What became of the rollouts that one step accounts for."""

    counted: list[tuple[float, int]] = field(default_factory=list)
    """Reward and tokens of each rollout of the step's groups."""
    unused: list[tuple[float, int]] = field(default_factory=list)
    """The same of rollouts that were scored and not chosen."""
    launched: list[tuple[float, int]] = field(default_factory=list)
    """The same of all rollouts of the step's groups, with stand-ins for those that were stopped."""
    num_stopped: int = 0
    """Rollouts that were stopped before they had a reward."""

    def add(self, run: GroupRun, *, counts: bool) -> None:
        """Count a group that has ended or was stopped; `counts` says whether the step gets it."""
        chosen = {rollout.index for rollout in run.group.scored} if counts else set()
        for rollout in run.scored:
            (self.counted if rollout.index in chosen else self.unused).extend(_facts([rollout]))
        self.num_stopped += run.num_stopped
        if chosen:
            last = [rollout for rollout in run.scored if rollout.index in chosen][-1]
            self.launched += _facts([*run.scored, *[last] * run.num_stopped])

    def metrics(self) -> dict[str, float]:
        """Means of what counts, of all that finished and, an estimate, of all that was launched for the step's groups;
        the share that was stopped.
        """
        finished = [*self.counted, *self.unused]
        launched = len(finished) + self.num_stopped
        if not self.counted:
            return {}
        return {
            "choice/reward_counted": _mean(reward for reward, _ in self.counted),
            "choice/reward_finished": _mean(reward for reward, _ in finished),
            "choice/length_counted": _mean(length for _, length in self.counted),
            "choice/length_finished": _mean(length for _, length in finished),
            "choice/reward_launched": _mean(reward for reward, _ in self.launched),
            "choice/length_launched": _mean(length for _, length in self.launched),
            "choice/unused_share": len(self.unused) / launched,
            "choice/stopped_share": self.num_stopped / launched,
        }


def _facts(rollouts: Sequence[Rollout]) -> list[tuple[float, int]]:
    return [(r.reward.value, len(r.token_ids)) for r in rollouts if r.reward is not None]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
