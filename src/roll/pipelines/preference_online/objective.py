"""Objective of online preference training (online DPO, arXiv 2402.04792):

sample → rewards → a better and a worse answer → reference log-probs → update → sync → evaluate → sample …

Log-probs are computed at `rollout.temperature`, as in all pipelines. The loss compares the current log-probs with the
reference's, so the staleness of an answer does not matter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from roll.algorithms.answer_selection import AnswerSelection, select_pairs
from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.data.samples import build_samples
from roll.pipelines.learning.losses import build_preference_loss
from roll.pipelines.online.answers import AnswersObjective
from roll.pipelines.online.online_run import OnlineRun
from roll.types import TrainingBatch

__all__ = ["build_objective", "build_pair_batch"]


def build_objective(online: OnlineRun[PreferenceOnlineConfig, Any]) -> AnswersObjective:
    """Build the objective that trains the policy to prefer the better answer of each pair."""
    config, reference, run = online.config, online.learner.reference, online.run

    async def build(choice: AnswerSelection) -> TrainingBatch:
        batch = build_pair_batch(choice, config.rollout.temperature)
        if reference is None:
            return batch
        with run.spans.phase("reference"):
            outputs = await reference.forward(batch, ["logprobs"])
        both = zip(batch.samples, outputs["logprobs"], strict=True)
        return replace(batch, samples=tuple(replace(sample, ref_logprobs=column) for sample, column in both))

    return AnswersObjective(
        online=online,
        choose=partial(select_pairs, pairing=config.pairing.type, min_difference=config.pairing.min_difference),
        build=build,
        loss=build_preference_loss(config.preference),
        compute_choice_metrics=lambda choice: {"data/pairs": float(len(choice.units))},
    )


def build_pair_batch(choice: AnswerSelection, temperature: float) -> TrainingBatch:
    """Build the batch of pairs; each pair is a loss unit, and a rollout in several pairs is repeated."""
    samples = [
        replace(
            sample, unit=number, sequence=sample.sequence and f"{number}/{sample.sequence}", preferred=rollout is better
        )
        for number, (better, worse) in enumerate(choice.units)
        for rollout in (better, worse)
        for sample in build_samples(rollout)
    ]
    return TrainingBatch(samples=tuple(samples), temperature=temperature)
