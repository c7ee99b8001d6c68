"""What the environment gave, over all turns."""

from __future__ import annotations

from roll.config.rewards import EnvironmentReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier
from roll.types import Rollout

__all__ = ["environment_verifier"]


def environment_verifier(config: EnvironmentReward, pool: WorkerPool) -> Verifier:
    """Adds up in place."""

    async def judge(rollout: Rollout) -> Judgement:
        total = sum(turn.reward for turn in rollout.turns)
        solved = total >= config.solved_at
        return Judgement(value=total, verdict="solved" if solved else "not solved", correct=solved)

    return Verifier(judge=judge, decides=True)
