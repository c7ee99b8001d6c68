"""Rewards with short implementations.

They compare an answer with the reference or a pattern, return the reward of an environment, or subtract a penalty for
repeated text or a long answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from roll.config.rewards import EnvironmentReward, ExactReward, LengthPenalty, RegexReward, RepetitionPenalty
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.types import Rollout

__all__ = [
    "build_environment_verifier",
    "build_exact_verifier",
    "build_length_penalty_verifier",
    "build_regex_verifier",
    "build_repetition_penalty_verifier",
    "compute_overlength_penalty",
    "compute_repeated_fraction",
    "matches_pattern",
]


def build_exact_verifier(config: ExactReward, pool: WorkerPool) -> Verifier:
    """Build a verifier whose value is 1 if the answer's text equals the reference, else 0.

    It runs in the controller's process.
    """

    def normalize(text: str) -> str:
        text = text.strip() if config.strip else text
        return text.casefold() if config.ignore_case else text

    async def judge(rollout: Rollout) -> Judgement:
        # Comparing strings takes linear time, so it needs no worker.
        equal = normalize(rollout.text) == normalize(rollout.prompt.answer)
        return Judgement(value=float(equal), verdict="correct" if equal else "wrong", correct=equal)

    return Verifier(judge=judge, decides_correctness=True)


def matches_pattern(pattern: str, text: str) -> bool:
    """Return whether `pattern` occurs in `text`."""
    return re.search(pattern, text) is not None


def build_regex_verifier(config: RegexReward, pool: WorkerPool) -> Verifier:
    """Build a verifier whose value is 1 if a regular expression matches, else 0.

    It runs in the worker pool, because matching may take long. If the pattern contains `{answer}`, the verifier decides
    whether the task was solved; if not, it only checks the format.
    """
    decides = config.needs_answer

    async def judge(rollout: Rollout) -> Judgement:
        pattern = config.pattern.replace("{answer}", re.escape(rollout.prompt.answer))
        matches = await run_in_pool(pool, matches_pattern, pattern, rollout.text, time_limit_s=config.time_limit_s)
        verdict = ("correct" if matches else "wrong") if decides else ("match" if matches else "no match")
        return Judgement(value=float(matches), verdict=verdict, correct=matches if decides else None)

    return Verifier(judge=judge, decides_correctness=decides)


def build_environment_verifier(config: EnvironmentReward, pool: WorkerPool) -> Verifier:
    """Build a verifier whose value is the sum of the environment's rewards over all turns.

    It runs in the controller's process.
    """

    async def judge(rollout: Rollout) -> Judgement:
        total = sum(turn.reward for turn in (*rollout.replayed, *rollout.turns))
        solved = total >= config.solved_at
        return Judgement(value=total, verdict="solved" if solved else "not solved", correct=solved)

    return Verifier(judge=judge, decides_correctness=True)


def compute_repeated_fraction(token_ids: Sequence[int] | np.ndarray, size: int) -> float:
    """Return the fraction of n-grams of `size` tokens that repeat an earlier n-gram of the answer (arXiv
    2502.03373)."""
    tokens = [int(token) for token in token_ids]
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def compute_overlength_penalty(num_tokens: int, free_tokens: int, full_tokens: int) -> float:
    """Return the overlength penalty: 0 up to `free_tokens`, 1 from `full_tokens` on, linear in between."""
    return min(max((num_tokens - free_tokens) / (full_tokens - free_tokens), 0.0), 1.0)


def build_repetition_penalty_verifier(config: RepetitionPenalty, pool: WorkerPool) -> Verifier:
    """Build a verifier that penalizes repetition. It runs in the worker pool.

    The value is 0 while the fraction of repeated n-grams is at most `tolerance`, and falls linearly to -1 for a
    fraction of 1.
    """

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.token_ids, config.ngram_size)
        share = await run_in_pool(pool, compute_repeated_fraction, *arguments, time_limit_s=config.time_limit_s)
        over = max(share - config.tolerance, 0.0) / (1.0 - config.tolerance)
        return Judgement(value=-over, verdict="repeats" if over else "fine")

    return Verifier(judge=judge, decides_correctness=False)


def build_length_penalty_verifier(config: LengthPenalty, pool: WorkerPool) -> Verifier:
    """Build a verifier that penalizes long answers. It runs in the controller's process.

    The value is 0 up to `free_tokens` tokens, and falls linearly to -1 at `full_tokens` tokens.
    """

    async def judge(rollout: Rollout) -> Judgement:
        over = compute_overlength_penalty(len(rollout.token_ids), config.free_tokens, config.full_tokens)
        return Judgement(value=-over, verdict="too long" if over else "fine")

    return Verifier(judge=judge, decides_correctness=False)
