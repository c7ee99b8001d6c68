"""Evaluation of a diffusion model: rewards of ODE samples with fixed noise, and the loss on images of a dataset."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.config.diffusion import DPOConfig, FlowMatchingConfig, ImageRewardConfig
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.diffusion.losses import DiffusionLoss, RewardGradientLoss
from roll.diffusion.records import DenoisingPath
from roll.pipelines.diffusion.batches import BatchBuilder
from roll.pipelines.diffusion.groups import compute_pixel_distance
from roll.pipelines.diffusion.rows import ImageRows, RowDraw
from roll.pipelines.diffusion.sample_files import SampleRecord
from roll.pipelines.diffusion.scoring import ImageScore, ImageScorer
from roll.protocols import TrainerGroup

__all__ = ["Evaluation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Evaluates a model, always with the same prompts and noise."""

    config: DiffusionConfig
    policy: TrainerGroup
    rows: ImageRows
    builder: BatchBuilder
    scorers: ImageScorer
    """Scores images with the training rewards and with the rewards that are used only for evaluation."""
    loss: DiffusionLoss | RewardGradientLoss

    async def evaluate(self) -> tuple[dict[str, float], list[SampleRecord]]:
        """Generate samples with the ODE and fixed noise; return the metrics and the samples."""
        config = self.config.evaluation
        rows = self.rows.evaluation[: config.num_prompts]
        num_steps = config.num_sampling_steps or self.config.sampling.num_steps
        settings = replace(self.builder.settings, noise_level=0.0, num_steps=num_steps)
        requests = await asyncio.to_thread(
            lambda: [
                request
                for place, row in enumerate(rows)
                for request in self.builder.build_requests(row, "evaluation", place, config.samples_per_prompt)
            ]
        )
        paths: list[DenoisingPath] = await self.policy.call("sample", requests, settings)
        owners = [row for row in rows for _ in range(config.samples_per_prompt)]
        images = [path.images for path in paths if path.images is not None]
        scores = [ImageScore(value=math.nan, parts={}) for _ in images]
        if self.scorers.rewards:
            prompts = [row.prompt for row in owners]
            scores = await self.scorers.score(images, prompts, [row.metadata for row in owners])
        metrics = _compute_evaluation_metrics(self.config.rewards, scores)
        metrics["eval/pixel_distance"] = compute_pixel_distance(images, [row.prompt for row in owners])
        if isinstance(self.config.algorithm, FlowMatchingConfig | DPOConfig):
            metrics |= await self._measure_loss()
        records = [
            SampleRecord(
                draw_id=place // config.samples_per_prompt,
                index=place % config.samples_per_prompt,
                prompt=path.request.prompt,
                seed=path.request.seed,
                image=image,
                reward=score.value,
                parts=score.parts,
            )
            for place, (path, image, score) in enumerate(zip(paths, images, scores, strict=True))
        ]
        return metrics, records

    async def _measure_loss(self) -> dict[str, float]:
        """Return the loss on the evaluation rows, always with the same noise."""
        count = self.config.training.prompts_per_step
        draws = [RowDraw(draw_id=i, row=row, position=i) for i, row in enumerate(self.rows.evaluation[:count])]
        batch = await asyncio.to_thread(self.builder.build_dataset_batch, draws)
        result = await self.policy.call("measure", batch, self.loss)
        return {"eval/loss": result.loss} | {f"eval/{name}": value for name, value in result.metrics.items()}


def _compute_evaluation_metrics(rewards: Sequence[ImageRewardConfig], scores: Sequence[ImageScore]) -> dict[str, float]:
    """Return the mean of every reward, and their weighted sum as `eval/score`; failed calls are ignored."""
    means = {
        name: float(np.mean([score.parts[name] for score in scores if name in score.parts]))
        for name in sorted({name for score in scores for name in score.parts})
    }
    metrics = {f"eval/reward/{name}": value for name, value in means.items()}
    metrics["eval/reward_errors"] = float(sum(bool(score.problem) for score in scores))
    weighted = [(reward.weight, means[reward.label]) for reward in rewards if reward.label in means]
    if means:  # without rewards of training, those that are only measured count equally
        score = sum(weight * value for weight, value in weighted) if weighted else np.mean(list(means.values()))
        # No reward decides whether an image is correct, so the score is not an accuracy.
        metrics |= {"eval/score": float(score), "eval/verified_share": 0.0}
    return metrics
