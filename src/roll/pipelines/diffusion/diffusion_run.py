"""The parts of a step of the pipeline `diffusion`.

    given images      rows ─► samples ─► update
    rewards           rows ─► requests ─ sample ─► images ─ score ─► groups ─ advantages ─► samples ─► updates
    reward gradients  rows ─► requests ─► update, which generates the samples itself

A step ends at a boundary: every draw has its outcome, and the run may be saved. Only updates change persistent state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roll.config.diffusion import NFTConfig, OnlineAlgorithmConfig, RewardWeightedConfig
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.diffusion.advantages import compute_step_rewards
from roll.diffusion.losses import DiffusionLoss, RewardGradientLoss
from roll.diffusion.records import DenoisingPath, DiffusionBatch, DiffusionSample
from roll.errors import InfraError, PartialUpdateError
from roll.media import MediaStore
from roll.pipelines.diffusion.batches import BatchBuilder
from roll.pipelines.diffusion.evaluation import Evaluation
from roll.pipelines.diffusion.groups import Group, build_samples, compute_reward_metrics, split_samples
from roll.pipelines.diffusion.rows import ImageRow, ImageRows, RowDraw
from roll.pipelines.diffusion.sample_files import SampleRecord, write_samples
from roll.pipelines.diffusion.scoring import ImageScore, ImageScorer
from roll.pipelines.learning.alarms import check_alarms
from roll.pipelines.learning.measures import compute_training_metrics
from roll.pipelines.run import Run
from roll.protocols import TrainerGroup
from roll.types import DrawOutcome, StepResult

__all__ = ["DiffusionRun"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _StepOutcome:
    """The results of a step: the outcomes of its draws, its optimizer steps, and its metrics."""

    draws: Sequence[RowDraw]
    draw_outcomes: dict[int, tuple[DrawOutcome, str]] = field(default_factory=dict)
    """Outcomes other than `TRAINED`, by draw ID, with the reason."""
    results: list[StepResult] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class DiffusionRun:
    """A run of the pipeline `diffusion`."""

    config: DiffusionConfig
    run: Run[Any]
    policy: TrainerGroup
    rows: ImageRows
    loss: DiffusionLoss | RewardGradientLoss
    scorers: ImageScorer
    """Scores images with the rewards of training."""
    builder: BatchBuilder
    evaluation: Evaluation
    store: MediaStore | None = None

    async def step(self) -> list[str]:
        """Run one step up to its boundary; return the alarms that stop the run."""
        algorithm, run = self.config.algorithm, self.run
        draws = self.rows.train.draw(self.config.training.prompts_per_step)
        outcome = _StepOutcome(draws=draws)
        if isinstance(algorithm, OnlineAlgorithmConfig):
            groups = await run.stop.run_unless_stopped(self._collect(draws))
            run.ledger.record_draws(draws, run.state.step + 1)
            await self._learn_from_rewards(algorithm, groups, outcome)
        else:
            batch = await run.stop.run_unless_stopped(asyncio.to_thread(self.builder.build_dataset_batch, draws))
            run.ledger.record_draws(draws, run.state.step + 1)
            with run.spans.phase("train"):
                outcome.results.append(await self._update(batch))
        if isinstance(algorithm, NFTConfig):
            await self.policy.call("update_old_policy", algorithm.compute_old_decay(run.state.step + 1))
        return self._finish_step(outcome)

    async def _collect(self, draws: Sequence[RowDraw]) -> list[Group]:
        """Generate and score the samples of a step; this changes no persistent state."""
        size = self.config.samples_per_prompt
        requests = await asyncio.to_thread(
            lambda: [
                request
                for draw in draws
                for request in self.builder.build_requests(draw.row, "train", draw.draw_id, size)
            ]
        )
        weights = "old" if isinstance(self.config.algorithm, NFTConfig) else "current"
        with self.run.spans.phase("generate"):
            paths = await self.policy.call("sample", requests, self.builder.settings, weights=weights)
        groups = [Group(draw=draw, paths=paths[i * size : (i + 1) * size]) for i, draw in enumerate(draws)]
        with self.run.spans.phase("reward"):
            scores = await self._score(paths, [draw.row for draw in draws for _ in range(size)])
        for i, group in enumerate(groups):
            group.scores = scores[i * size : (i + 1) * size]
        if self.config.uses_turning_points:
            await self._compute_step_rewards(groups)
        return groups

    async def _score(self, paths: Sequence[DenoisingPath], rows: Sequence[ImageRow]) -> list[ImageScore]:
        images = [path.images for path in paths if path.images is not None]
        return await self.scorers.score(images, [row.prompt for row in rows], [row.metadata for row in rows])

    async def _compute_step_rewards(self, groups: Sequence[Group]) -> None:
        """Compute a reward for every SDE step by completing the trajectory after the step with the ODE."""
        settings = replace(self.builder.settings, noise_level=0.0)
        count = self.builder.settings.stochastic_steps
        members = [(group, i) for group in groups for i in range(len(group.paths))]
        rewards = np.full((len(members), count + 1), np.nan)
        for k in range(count):
            requests = [
                replace(group.paths[i].request, start=group.paths[i].latents[k], start_step=k) for group, i in members
            ]
            with self.run.spans.phase("generate"):
                paths = await self.policy.call("sample", requests, settings)
            with self.run.spans.phase("reward"):
                found = await self._score(paths, [group.draw.row for group, _ in members])
            rewards[:, k] = [score.value for score in found]
        rewards[:, count] = [group.scores[i].value for group, i in members]
        usable = np.isfinite(rewards).all(axis=1)
        steps = np.full((len(members), count), np.nan)
        strict = getattr(self.config.algorithm, "turning_points", "") == "strict"
        steps[usable] = compute_step_rewards(rewards[usable], strict=strict)
        size = self.config.samples_per_prompt
        for place, group in enumerate(groups):
            group.step_rewards = steps[place * size : (place + 1) * size]

    async def _learn_from_rewards(
        self, algorithm: OnlineAlgorithmConfig, groups: Sequence[Group], outcome: _StepOutcome
    ) -> None:
        """Compute advantages, and run the updates of a step."""
        usable = [group for group in groups if self._is_usable(group, outcome)]
        samples = build_samples(algorithm, usable, self.config.seed)
        self._record_samples(groups, samples)
        outcome.metrics |= compute_reward_metrics(groups)
        outcome.metrics["algorithm/groups_used"] = float(len(usable))
        problems = [why for draw_outcome, why in outcome.draw_outcomes.values() if draw_outcome is DrawOutcome.FAILED]
        if problems:
            logger.warning(
                "%d of %d groups have samples without a reward, so this step does not train on them: %s",
                len(problems),
                len(groups),
                problems[0],
            )
        if not usable:
            logger.warning(
                "the policy is not updated in this step: %d groups have zero reward variance, %d have unscored samples",
                len(groups) - len(problems),
                len(problems),
            )
            return
        with self.run.spans.phase("train"):
            for epoch in range(algorithm.num_epochs):
                seed = (self.config.seed, self.run.state.step, epoch)
                for part in split_samples(samples, algorithm.num_minibatches, seed):
                    outcome.results.append(await self._update(self.builder.build_batch(part)))

    def _is_usable(self, group: Group, outcome: _StepOutcome) -> bool:
        """Return whether a group can be trained on; otherwise record its outcome."""
        problem = next((score.problem for score in group.scores if score.problem), "")
        if not problem and group.step_rewards is not None and not np.isfinite(group.step_rewards).all():
            problem = "a completion of its samples could not be scored"
        if problem:
            outcome.draw_outcomes[group.draw.draw_id] = DrawOutcome.FAILED, problem
        elif np.ptp(group.values) == 0 and not isinstance(self.config.algorithm, RewardWeightedConfig):
            outcome.draw_outcomes[group.draw.draw_id] = DrawOutcome.FILTERED, "all rewards are equal"
        return group.draw.draw_id not in outcome.draw_outcomes

    def _record_samples(self, groups: Sequence[Group], samples: Sequence[DiffusionSample]) -> None:
        """Write the step's samples to the run directory."""
        if not self.config.tracking.rollouts:
            return
        advantages = {s.sample_id: float(s.advantages.mean()) for s in samples if s.advantages is not None}
        records = [
            SampleRecord(
                draw_id=group.draw.draw_id,
                index=i,
                prompt=path.request.prompt,
                seed=path.request.seed,
                image=path.images,
                reward=score.value,
                parts=score.parts,
                advantage=advantages.get(path.request.sample_id, math.nan),
            )
            for group in groups
            for i, (path, score) in enumerate(zip(group.paths, group.scores, strict=True))
            if path.images is not None
        ]
        directory = self.run.tracker.run.samples_dir
        write_samples(directory, f"step-{self.run.state.step + 1:06d}", records, self.store)

    async def _update(self, batch: DiffusionBatch) -> StepResult:
        """Run one optimizer step; see `roll.pipelines.learner.update`."""
        run, trainer = self.run, self.policy
        is_first, run.mid_update = not run.mid_update, True
        try:
            result: StepResult = await trainer.call("train_step", batch, self.loss)
        except (PartialUpdateError, InfraError):
            raise
        except Exception:
            run.mid_update = not (is_first and trainer.num_ranks == 1)
            raise
        run.has_trained |= result.stepped
        return result

    def _finish_step(self, outcome: _StepOutcome) -> list[str]:
        """Finish the step: record every draw's outcome, log metrics, and return the alarms that stop the run."""
        run, state = self.run, self.run.state
        run.mid_update = True
        state.step += 1
        for draw in outcome.draws:
            draw_outcome, why = outcome.draw_outcomes.get(draw.draw_id, (DrawOutcome.TRAINED, ""))
            run.ledger.record_outcome(draw.draw_id, draw_outcome, state.step, why)
        state.policy_version += any(result.stepped for result in outcome.results)
        state.data, state.num_draws = self.rows.train.state(), self.rows.train.num_drawn
        run.mid_update = False
        metrics = compute_training_metrics(outcome.results) | outcome.metrics
        if "training/num_tokens" in metrics:  # a diffusion model has no tokens
            metrics["training/num_inputs"] = metrics.pop("training/num_tokens")
            del metrics["training/num_loss_tokens"]
        if isinstance(self.loss, RewardGradientLoss) and "training/reward/mean" in metrics:
            metrics["reward/mean"] = metrics["training/reward/mean"]
        metrics |= {f"data/{name}": float(count) for name, count in run.ledger.count_outcomes().items()}
        state.alarms, alarms = check_alarms(self.config.alarms, metrics, state.alarms)
        run.tracker.log_step(state.step, metrics | run.spans.get_metrics())
        for alarm in alarms:
            logger.warning("step %d: %s", state.step, alarm.message)
        return [alarm.message for alarm in alarms if alarm.stops]

    async def evaluate_if_due(self) -> None:
        """Evaluate the policy if an evaluation is due at this step."""
        every, step = self.config.evaluation.every_num_steps, self.run.state.step
        last = step == self.run.num_steps
        due = self.config.evaluation.before_training if step == 0 else last or bool(every and step % every == 0)
        if due and self.run.state.evaluated_at != step:
            with self.run.spans.phase("evaluate"):
                metrics, records = await self.run.stop.run_unless_stopped(self.evaluation.evaluate())
            self.run.state.evaluated_at = step
            self.run.state.record_score(step, metrics.get("eval/score", math.nan))
            directory = self.run.tracker.run.samples_dir
            write_samples(directory, f"evaluation-step-{step:06d}", records, self.store)
            self.run.tracker.log_evaluation(step, metrics)
