"""1 where the answer's text equals the reference."""

from __future__ import annotations

from roll.config.rewards import ExactReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier
from roll.types import Rollout

__all__ = ["exact_verifier"]


def exact_verifier(config: ExactReward, pool: WorkerPool) -> Verifier:
    """Compares in place: one pass over the text is not worth a worker."""

    def normal(text: str) -> str:
        text = text.strip() if config.strip else text
        return text.casefold() if config.ignore_case else text

    async def judge(rollout: Rollout) -> Judgement:
        equal = normal(rollout.text) == normal(rollout.prompt.answer)
        return Judgement(value=float(equal), verdict="correct" if equal else "wrong", correct=equal)

    return Verifier(judge=judge, decides=True)
