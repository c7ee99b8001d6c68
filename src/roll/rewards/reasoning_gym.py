"""The scorer that a reasoning-gym task brings along."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from roll.config.rewards import ReasoningGymReward
from roll.errors import DataError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["final_answer", "reasoning_gym_verifier", "score_task"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def final_answer(text: str) -> str:
    """What the last `<answer>…</answer>` holds, or else the whole text, without surrounding white space."""
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def score_task(task: str, entry: dict[str, Any], text: str) -> float:
    """The task's own score of an answer, 0 … 1."""
    return float(_scorer(task)(answer=final_answer(text), entry=entry))


def reasoning_gym_verifier(config: ReasoningGymReward, pool: WorkerPool) -> Verifier:
    """Scores in the pool. Full marks count as solved."""

    async def verify(rollout: Rollout) -> Judgement:
        task = rollout.prompt.metadata.get("reasoning_gym")
        if task is None:
            raise DataError(
                f"prompt '{rollout.prompt.uid}' does not come from reasoning-gym, so it has no scorer: "
                "choose another reward for this source."
            )
        value = await in_pool(
            pool, score_task, task["task"], task["entry"], rollout.text, time_limit_s=config.time_limit_s
        )
        solved = value >= 1.0
        verdict = "correct" if solved else "partly" if value > 0.05 else "wrong"
        return Judgement(value=value, verdict=verdict, correct=solved)

    return verify
