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
from roll.pipelines.online.online_loop import OnlineLoop

__all__ = ["train"]


async def train(loop: OnlineLoop[RejectionSamplingConfig]) -> None:
    """Take the remaining steps."""
    config, rollout = loop.config, loop.config.rollout
    best = partial(best_answers, keep=config.rejection.keep, min_reward=config.rejection.min_reward)
    loss = LikelihoodLoss(aggregation=config.rejection.aggregation)

    async def step() -> list[str]:
        sampled = await loop.sample(best)
        kept = sampled.choice.rollouts
        batch = build_batch(kept, temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens)
        metrics = await loop.learn(batch, loss, config.updates)
        metrics["data/rollouts_kept"] = float(len(kept))
        return await loop.cross_boundary(sampled, metrics)

    await loop.repeat(step)
