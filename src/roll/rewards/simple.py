"""Rewards of a few lines.

The reference's text, a pattern, or an environment's reward; and penalties of form: repeated text, and answers that are
longer than necessary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from roll.config.rewards import EnvironmentReward, ExactReward, LengthPenalty, RegexReward, RepetitionPenalty
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = [
    "environment_verifier",
    "exact_verifier",
    "found",
    "length_penalty_verifier",
    "overlength",
    "regex_verifier",
    "repeated_share",
    "repetition_penalty_verifier",
]


def exact_verifier(config: ExactReward, pool: WorkerPool) -> Verifier:
    """Build the verifier: 1 if the answer's text equals the reference, computed in place."""

    def normal(text: str) -> str:
        text = text.strip() if config.strip else text
        return text.casefold() if config.ignore_case else text

    async def judge(rollout: Rollout) -> Judgement:
        equal = normal(rollout.text) == normal(rollout.prompt.answer)
        return Judgement(value=float(equal), verdict="correct" if equal else "wrong", correct=equal)

    return Verifier(judge=judge, decides=True)


def found(pattern: str, text: str) -> bool:
    """Return whether `pattern` occurs in `text`."""
    return re.search(pattern, text) is not None


def regex_verifier(config: RegexReward, pool: WorkerPool) -> Verifier:
    """Build the verifier: 1 if a regular expression matches, in the pool, as a pattern may backtrack for very long.

    With `{answer}` in its pattern it decides whether the task was solved; without, it only checks the format.
    """
    decides = config.needs_answer

    async def judge(rollout: Rollout) -> Judgement:
        pattern = config.pattern.replace("{answer}", re.escape(rollout.prompt.answer))
        matches = await in_pool(pool, found, pattern, rollout.text, time_limit_s=config.time_limit_s)
        verdict = ("correct" if matches else "wrong") if decides else ("match" if matches else "no match")
        return Judgement(value=float(matches), verdict=verdict, correct=matches if decides else None)

    return Verifier(judge=judge, decides=decides)


def environment_verifier(config: EnvironmentReward, pool: WorkerPool) -> Verifier:
    """Build the verifier: the sum of the environment's rewards over all turns, computed in place."""

    async def judge(rollout: Rollout) -> Judgement:
        total = sum(turn.reward for turn in (*rollout.replayed, *rollout.turns))
        solved = total >= config.solved_at
        return Judgement(value=total, verdict="solved" if solved else "not solved", correct=solved)

    return Verifier(judge=judge, decides=True)


def repeated_share(token_ids: Sequence[int] | np.ndarray, size: int) -> float:
    """Return the share of n-grams of `size` tokens that occurred before in the answer, 0 … 1 (arXiv 2502.03373)."""
    tokens = [int(token) for token in token_ids]
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def overlength(length: int, free: int, full: int) -> float:
    """Return 0 up to `free` tokens, 1 from `full` tokens on, linear in between."""
    return min(max((length - free) / (full - free), 0.0), 1.0)


def repetition_penalty_verifier(config: RepetitionPenalty, pool: WorkerPool) -> Verifier:
    """Build the verifier: -1 … 0, by the share of repeated n-grams above `tolerance`, computed in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.token_ids, config.ngram_size)
        share = await in_pool(pool, repeated_share, *arguments, time_limit_s=config.time_limit_s)
        over = max(share - config.tolerance, 0.0) / (1.0 - config.tolerance)
        return Judgement(value=-over, verdict="repeats" if over else "fine")

    return Verifier(judge=judge, decides=False)


def length_penalty_verifier(config: LengthPenalty, pool: WorkerPool) -> Verifier:
    """Build the verifier: -1 … 0, by the tokens beyond `free_tokens`, computed in place."""

    async def judge(rollout: Rollout) -> Judgement:
        over = overlength(len(rollout.token_ids), config.free_tokens, config.full_tokens)
        return Judgement(value=-over, verdict="too long" if over else "fine")

    return Verifier(judge=judge, decides=False)
