"""Penalties of form: text that repeats itself, answers that are longer than they need be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.config.rewards import LengthPenalty, RepetitionPenalty
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["length_penalty_verifier", "overlength", "repeated_share", "repetition_penalty_verifier"]


def repeated_share(token_ids: Sequence[int] | np.ndarray, size: int) -> float:
    """Share of n-grams of `size` tokens that occurred before in the same answer, 0 … 1 (arXiv 2502.03373)."""
    tokens = [int(token) for token in token_ids]
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def overlength(length: int, free: int, full: int) -> float:
    """0 up to `free` tokens, 1 from `full` tokens on, linear in between."""
    return min(max((length - free) / (full - free), 0.0), 1.0)


def repetition_penalty_verifier(config: RepetitionPenalty, pool: WorkerPool) -> Verifier:
    """-1 … 0, by the share of repeated n-grams above `tolerance`; counted in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.token_ids, config.ngram_size)
        share = await in_pool(pool, repeated_share, *arguments, time_limit_s=config.time_limit_s)
        over = max(share - config.tolerance, 0.0) / (1.0 - config.tolerance)
        return Judgement(value=-over, verdict="repeats" if over else "fine")

    return Verifier(judge=judge, decides=False)


def length_penalty_verifier(config: LengthPenalty, pool: WorkerPool) -> Verifier:
    """-1 … 0, by tokens beyond `free_tokens`. Two numbers are compared, in place."""

    async def judge(rollout: Rollout) -> Judgement:
        over = overlength(len(rollout.token_ids), config.free_tokens, config.full_tokens)
        return Judgement(value=-over, verdict="too long" if over else "fine")

    return Verifier(judge=judge, decides=False)
