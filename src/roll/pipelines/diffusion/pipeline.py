"""The pipeline of diffusion and flow models: its roles, facts and evaluation."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from roll.cluster.base import Cluster, open_cluster, start_concurrently
from roll.config.diffusion import DPOConfig, FlowMatchingConfig, NFTConfig
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.diffusion.losses import DiffusionLoss, RewardGradientLoss
from roll.media import MediaStore
from roll.pipelines.diffusion.batches import BatchBuilder
from roll.pipelines.diffusion.diffusion_run import DiffusionRun
from roll.pipelines.diffusion.evaluation import Evaluation
from roll.pipelines.diffusion.losses import build_loss
from roll.pipelines.diffusion.rows import ImageRows, read_rows
from roll.pipelines.diffusion.scoring import ImageScorer, check_rewards
from roll.pipelines.fingerprints import compute_fingerprints
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.run import Run, Session, restore_state, run_session, run_steps
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup, WorkerPool
from roll.running import run_in_thread
from roll.training import Schedule, TrainerSpec

__all__ = ["PIPELINE", "build_spec", "list_image_columns"]

logger = logging.getLogger(__name__)

TRAINER_PATH = "roll.diffusion.trainer:DiffusionTrainer"


def list_image_columns(config: DiffusionConfig) -> list[str]:
    """Return the names of the images that the method needs in every row, such as `chosen` and `rejected`."""
    if isinstance(config.algorithm, FlowMatchingConfig):
        return ["image"]
    return ["chosen", "rejected"] if isinstance(config.algorithm, DPOConfig) else []


def build_spec(config: DiffusionConfig) -> TrainerSpec:
    """Return the spec of the trainer, for a single rank."""
    updates = getattr(config.algorithm, "num_minibatches", 1) * getattr(config.algorithm, "num_epochs", 1)
    training = config.training.model_copy(update={"backend": TRAINER_PATH})
    return TrainerSpec(
        model_path=config.model.path,
        model=config.model,
        training=training,
        holds_reference=config.uses_reference,
        schedule=Schedule.from_config(training, updates_per_step=updates),
        seed=config.seed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunInputs:
    """The data of a run, and the loss of its method."""

    rows: ImageRows
    loss: DiffusionLoss | RewardGradientLoss


def _prepare(config: DiffusionConfig) -> _RunInputs:
    """Read the data, and import the user's functions.

    Raises:
        UserError: The data or a function cannot be used.
    """
    check_rewards([*config.rewards, *config.evaluation.rewards])
    return _RunInputs(rows=read_rows(config.data, config.seed, list_image_columns(config)), loss=build_loss(config))


async def _start(config: DiffusionConfig, cluster: Cluster, stack: AsyncExitStack) -> tuple[TrainerGroup, WorkerPool]:
    policy, pool = await start_concurrently(
        stack, cluster.start_trainer(build_spec(config), "actor_train"), cluster.start_pool(config.reward_workers)
    )
    if isinstance(config.algorithm, NFTConfig):
        await policy.call("start_old_policy")  # before a checkpoint is loaded, which has the old policy
    return policy, pool


def _build_evaluation(
    config: DiffusionConfig, prepared: _RunInputs, policy: TrainerGroup, pool: WorkerPool
) -> Evaluation:
    return Evaluation(
        config=config,
        policy=policy,
        rows=prepared.rows,
        builder=BatchBuilder(config=config),
        scorers=ImageScorer(pool=pool, rewards=[*config.rewards, *config.evaluation.rewards]),
        loss=prepared.loss,
    )


@asynccontextmanager
async def _open(config: DiffusionConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start all roles, restore the checkpoint, yield the training loop, and shut the roles down, even after errors."""
    tracker, saved = session.tracker, session.saved
    tracker.note("reading the data")
    prepared = await run_in_thread(_prepare, config)
    fingerprints = compute_fingerprints(config, prepared.rows.fingerprints) | dict(prepared.rows.image_fingerprints)
    state = restore_state(saved, prepared.rows.train, fingerprints=fingerprints)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        tracker.note("starting trainer (policy)")
        policy, pool = await _start(config, cluster, stack)
        if saved is not None:
            tracker.note(f"loading the checkpoint of step {state.step}")
            await saved.restore(policy)
        run = Run.create(config, config.training.num_steps, session, state, prepared.rows.train, policy)
        evaluation = _build_evaluation(config, prepared, policy, pool)
        diffusion = DiffusionRun(
            config=config,
            run=run,
            policy=policy,
            rows=prepared.rows,
            loss=prepared.loss,
            scorers=ImageScorer(pool=pool, rewards=config.rewards),
            builder=evaluation.builder,
            evaluation=evaluation,
            store=MediaStore(session.directory.media_dir) if config.tracking.rollouts else None,
        )

        async def train() -> None:
            async def step() -> list[str]:
                alarms = await diffusion.step()
                await diffusion.evaluate_if_due()
                return alarms

            async with run_session(run):
                await diffusion.evaluate_if_due()
                await run_steps(run, step)

        yield train


def _build_facts(config: DiffusionConfig, state: RunState) -> RunFacts:
    ranks, cores = config.roles["actor_train"].count, os.cpu_count() or 1
    setup = f"{config.cluster.type}: {ranks} trainer rank{'s' * (ranks != 1)}, {cores} core{'s' * (cores != 1)}"
    return RunFacts(method=config.algorithm.type, setup=setup, num_steps=config.training.num_steps)


async def _evaluate(config: DiffusionConfig) -> dict[str, float]:
    """Return the metrics of the configuration's model, without training."""
    prepared = await run_in_thread(_prepare, config)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles)
        stack.push_async_callback(cluster.close)
        policy, pool = await _start(config, cluster, stack)
        metrics, _ = await _build_evaluation(config, prepared, policy, pool).evaluate()
        return metrics


PIPELINE = Pipeline(open=_open, facts=_build_facts, evaluate=_evaluate)
