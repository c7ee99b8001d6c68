"""Rejection sampling (RAFT, arXiv 2304.06767), in one short loop:

sample → verify → keep the best → learn to write them → sync → evaluate → sample …

As everywhere, log-probs are those of the distribution that was sampled, at `rollout.temperature`.
"""

from __future__ import annotations

from functools import partial

from roll.algorithms.choosing import best_answers
from roll.algorithms.losses import LikelihoodLoss
from roll.config.pipelines.rejection_sampling import RejectionSamplingConfig
from roll.data.samples import build_batch
from roll.pipelines.online.rounds import Rounds

__all__ = ["train"]


async def train(rounds: Rounds[RejectionSamplingConfig]) -> None:
    """Take the remaining steps."""
    config, rollout = rounds.config, rounds.config.rollout
    best = partial(best_answers, keep=config.rejection.keep, min_reward=config.rejection.min_reward)
    loss = LikelihoodLoss(aggregation=config.rejection.aggregation)

    async def step() -> list[str]:
        sampled = await rounds.sample(best)
        kept = sampled.choice.rollouts
        batch = build_batch(kept, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        metrics = await rounds.learn(batch, loss, config.updates)
        metrics["data/rollouts_kept"] = float(len(kept))
        return await rounds.cross_boundary(sampled, metrics)

    await rounds.repeat(step)
