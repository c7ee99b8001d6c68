"""Objective of online preference training (online DPO, arXiv 2402.04792):

sample → rewards → a better and a worse answer → reference log-probs → update → sync → evaluate → sample …

As everywhere, log-probs are those of the sampling distribution, at `rollout.temperature`. The loss compares the current
log-probs with the reference's; the staleness of an answer does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from roll.algorithms.choosing import Choice, pairs
from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.data.samples import build_samples
from roll.pipelines.learning.losses import preference_loss
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.online_run import OnlineRun
from roll.types import TrainingBatch

__all__ = ["objective", "pair_batch"]


def objective(online: OnlineRun[PreferenceOnlineConfig, Any]) -> AnswersObjective:
    """Build the objective: prefer the better answer of each pair."""
    config, reference, run = online.config, online.learner.reference, online.run

    async def build(choice: Choice) -> TrainingBatch:
        batch = pair_batch(choice, config.rollout.temperature)
        if reference is None:
            return batch
        with run.spans.phase("reference"):
            said = await reference.forward(batch, ["logprobs"])
        both = zip(batch.samples, said["logprobs"], strict=True)
        return replace(batch, samples=tuple(replace(sample, ref_logprobs=column) for sample, column in both))

    return AnswersObjective(
        online=online,
        choose=partial(pairs, pairing=config.pairing.type, min_difference=config.pairing.min_difference),
        build=build,
        loss=preference_loss(config.preference),
        count=lambda choice: {"data/pairs": float(len(choice.answers))},
    )


def pair_batch(choice: Choice, temperature: float) -> TrainingBatch:
    """Build the batch of pairs; each pair is a unit, and a rollout in several pairs is repeated."""
    samples = [
        replace(
            sample, unit=number, sequence=sample.sequence and f"{number}/{sample.sequence}", preferred=rollout is better
        )
        for number, (better, worse) in enumerate(choice.answers)
        for rollout in (better, worse)
        for sample in build_samples(rollout)
    ]
    return TrainingBatch(samples=tuple(samples), temperature=temperature)
