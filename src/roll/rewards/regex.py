"""1 where a regular expression is found in the answer."""

from __future__ import annotations

import re

from roll.config.rewards import RegexReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["found", "regex_verifier"]


def found(pattern: str, text: str) -> bool:
    """Whether `pattern` occurs in `text`."""
    return re.search(pattern, text) is not None


def regex_verifier(config: RegexReward, pool: WorkerPool) -> Verifier:
    """Runs in the pool: on an unlucky text a pattern may backtrack for ever.

    With `{answer}` in its pattern it decides whether the task was solved; without, it is a check of form.
    """
    decides = config.needs_answer

    async def judge(rollout: Rollout) -> Judgement:
        pattern = config.pattern.replace("{answer}", re.escape(rollout.prompt.answer))
        matches = await in_pool(pool, found, pattern, rollout.text, time_limit_s=config.time_limit_s)
        verdict = ("correct" if matches else "wrong") if decides else ("match" if matches else "no match")
        return Judgement(value=float(matches), verdict=verdict, correct=matches if decides else None)

    return Verifier(judge=judge, decides=decides)
