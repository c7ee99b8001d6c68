"""Score answers with the scorer of a reasoning-gym task."""

from __future__ import annotations

import functools
import json
from typing import Any

from roll.config.rewards import ReasoningGymReward
from roll.errors import DataError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.final_answer import find_last_tagged
from roll.types import Rollout

__all__ = ["build_reasoning_gym_verifier", "extract_answer", "prepare_worker", "score_task"]

MAX_WRONG_SCORE = 0.05
"""Scores up to this value are treated as incorrect: tasks return 0.01 for an answer in the required format."""


def prepare_worker() -> None:
    """Import reasoning-gym, which takes seconds, before any time limit applies."""
    import reasoning_gym  # noqa: F401


def extract_answer(text: str) -> str:
    """Return the content of the last `<answer>…</answer>`, or else the whole text, without surrounding whitespace."""
    tagged = find_last_tagged(text)
    return (text if tagged is None else tagged).strip()


@functools.cache
def _load_task(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))


def score_task(name: str, options: str, entry: dict[str, Any], text: str) -> float:
    """Return the score that the task's scorer assigns to an answer, between 0 and 1.

    Args:
        name: The task's name.
        options: The task's settings, as JSON; some scorers depend on them.
        entry: The generated task: question, answer, metadata.
        text: The model's answer.
    """
    return float(_load_task(name, options).score_answer(answer=extract_answer(text), entry=entry))


def build_reasoning_gym_verifier(config: ReasoningGymReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `reasoning_gym`. It runs in the worker pool. A task is solved only with the
    maximum score.
    """

    async def judge(rollout: Rollout) -> Judgement:
        task = rollout.prompt.metadata.get("reasoning_gym")
        if task is None:
            raise DataError(
                f"prompt '{rollout.prompt.uid}' does not come from reasoning-gym, so it has no scorer: "
                "choose another reward for this source."
            )
        options = json.dumps(task["options"], sort_keys=True)
        value = await run_in_pool(
            pool, score_task, task["task"], options, task["entry"], rollout.text, time_limit_s=config.time_limit_s
        )
        solved = value >= 1.0
        verdict = "correct" if solved else "partly" if value > MAX_WRONG_SCORE else "wrong"
        return Judgement(value=value, verdict=verdict, correct=solved)

    return Verifier(judge=judge, decides_correctness=True)
