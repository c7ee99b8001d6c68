"""Learning from preferences among fresh rollouts (online DPO, arXiv 2402.04792), in one short loop:

sample → rewards → a better and a worse answer → what the reference says of them → prefer → sync → evaluate → sample …

As everywhere, log-probs are those of the distribution that was sampled, at `rollout.temperature`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from roll.algorithms.choosing import Choice, pairs
from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.data.samples import build_samples
from roll.pipelines.learning.losses import preference_loss
from roll.pipelines.online.online_loop import OnlineLoop
from roll.types import TrainingBatch

__all__ = ["pair_batch", "train"]


async def train(loop: OnlineLoop[PreferenceOnlineConfig]) -> None:
    """Take the remaining steps."""
    config, reference = loop.config, loop.learner.reference
    choose = partial(pairs, pairing=config.pairing.type, min_difference=config.pairing.min_difference)
    loss = preference_loss(config.preference)

    async def step() -> list[str]:
        sampled = await loop.sample(choose)
        batch = pair_batch(sampled.choice, config.rollout.temperature)
        if reference is not None and batch.samples:
            said = await loop.ask("reference", reference.forward(batch, ["logprobs"]))
            both = zip(batch.samples, said["logprobs"], strict=True)
            batch = replace(batch, samples=tuple(replace(s, ref_logprobs=column) for s, column in both))
        metrics = await loop.learn(batch, loss, config.updates)
        metrics["data/pairs"] = float(len(sampled.choice.answers))
        return await loop.cross_boundary(sampled, metrics)

    await loop.repeat(step)


def pair_batch(choice: Choice, temperature: float) -> TrainingBatch:
    """Both answers of each pair, which are a unit; a rollout of several pairs is in each of them."""
    samples = [
        replace(
            sample, unit=number, sequence=sample.sequence and f"{number}/{sample.sequence}", preferred=rollout is better
        )
        for number, (better, worse) in enumerate(choice.answers)
        for rollout in (better, worse)
        for sample in build_samples(rollout)
    ]
    return TrainingBatch(samples=tuple(samples), temperature=temperature)
