"""What it does to training that the rollouts which finish first are the ones that count.

Where more rollouts are launched than a group needs and the first to finish make the group, what is trained is a sample
of short answers. If long answers are right more often than short ones, the trained rewards are lower than those of the
policy, and the other way round; either way the policy is drawn to short answers.

The rewards of rollouts that were stopped are not known. Each would have finished after the last one that counted, so
that one stands in for it:

    launched  ≈  mean over the groups' launched rollouts, the reward (length) of a stopped one being that of the last of
                 its group that finished

Choosing whole *prompts* by what finishes first has no such bias over a run: those that were slow are deferred and
trained later, with all their rollouts (`tail_batching` with `rollout_redundancy: 1`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roll.types import Rollout

__all__ = ["Race", "bias_metrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The rollouts of one group."""

    used: tuple[Rollout, ...]
    """Scored ones that make the group, in the order in which they finished."""
    unused: tuple[Rollout, ...]
    """Scored ones that came too late."""
    num_stopped: int
    """Launched ones that never finished."""


def bias_metrics(races: Sequence[Race]) -> dict[str, float]:
    """Rewards and lengths of what counts, beside those of what was launched; empty where everything counts.

    Args:
        races: of the groups of a step.
    """
    races = [race for race in races if race.used]
    if not any(race.unused or race.num_stopped for race in races):
        return {}
    used = [rollout for race in races for rollout in race.used]
    launched = [r for race in races for r in (*race.used, *race.unused, *[race.used[-1]] * race.num_stopped)]
    return {
        "selection/num_launched": float(len(launched)),
        "selection/num_stopped": float(sum(race.num_stopped for race in races)),
        "selection/reward_trained": _mean([_reward(rollout) for rollout in used]),
        "selection/reward_launched": _mean([_reward(rollout) for rollout in launched]),
        "selection/length_trained": _mean([float(len(rollout.token_ids)) for rollout in used]),
        "selection/length_launched": _mean([float(len(rollout.token_ids)) for rollout in launched]),
    }


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None, "only scored rollouts race"
    return rollout.reward.value


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
