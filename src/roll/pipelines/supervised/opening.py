"""Opens a supervised run from its configuration; roles are shut down in reverse order."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from roll.cluster.base import Cluster, open_cluster
from roll.config.supervised import SupervisedConfig
from roll.config.training import check_back_end
from roll.data.examples import ExampleKind
from roll.pipelines.fingerprints import compute_fingerprints
from roll.pipelines.instant_checks import check_disk
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Run, Session, restore_state
from roll.pipelines.state import RunState
from roll.pipelines.supervised.answers import open_answers
from roll.pipelines.supervised.preparation import PreparedRun, build_policy_spec, count_planned_steps, prepare
from roll.pipelines.supervised.supervised_run import SupervisedRun
from roll.running import run_in_thread
from roll.training import TrainerSpec

__all__ = ["build_facts", "open_supervised"]


@asynccontextmanager
async def open_supervised(
    config: SupervisedConfig,
    session: Session,
    kind: ExampleKind,
    *,
    build_spec: Callable[[SupervisedConfig, PreparedRun], TrainerSpec] = build_policy_spec,
    before_start: Callable[[Cluster, PreparedRun], Awaitable[None]] | None = None,
    score_at_end: bool = False,
) -> AsyncIterator[SupervisedRun]:
    """Start all roles, restore the checkpoint, yield the run, and shut the roles down, even after an error.

    Args:
        config: Configuration of the run.
        session: Session of this process.
        kind: Type of the examples.
        build_spec: Returns the spec of the trained model.
        before_start: Coroutine function that is awaited before the trainer starts.
        score_at_end: Argument of `build_examples`.
    """
    tracker, saved = session.tracker, session.saved
    tracker.note("reading the model's files and the examples")
    initial = saved.state if saved else RunState()
    media_dir = session.directory.media_dir
    prepared = await run_in_thread(prepare, config, kind, initial, score_at_end=score_at_end, media_dir=media_dir)
    fingerprints = compute_fingerprints(config, prepared.examples.held_out_fingerprints)
    check_back_end(prepared.training.backend)
    check_disk(config, prepared.training, prepared.model_path, session)
    state = restore_state(saved, prepared.examples.train, fingerprints=fingerprints)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        if before_start is not None:
            await before_start(cluster, prepared)
        spec = build_spec(config, prepared)
        tracker.note(f"starting trainer ({spec.role})")
        policy = await cluster.start_trainer(spec, "actor_train")
        stack.push_async_callback(policy.close)
        if saved is not None:
            tracker.note(f"loading the checkpoint of step {state.step}")
            await saved.restore(policy)
        stream, num_steps = prepared.examples.train, prepared.training.num_steps
        run = Run.create(config, num_steps, session, state, stream, policy)
        answering, answers = config.build_prompt_run_config(), None
        if answering is not None:
            answers = await open_answers(answering, session, cluster, run, policy, stack)
            run.checkpointer.before_writing = answers.policy_engines.release_devices
        yield SupervisedRun(
            config=config,
            training=prepared.training,
            run=run,
            policy=policy,
            examples=prepared.examples,
            answers=answers,
        )


def build_facts(config: SupervisedConfig, state: RunState, kind: ExampleKind, method: str) -> RunFacts:
    """Return the facts that are shown about a run in a given state."""
    ranks, cores = config.roles["actor_train"].count, os.cpu_count() or 1
    setup = f"{config.cluster.type}: {ranks} trainer rank{'s' * (ranks != 1)}, {cores} core{'s' * (cores != 1)}"
    return RunFacts(method=method, setup=setup, num_steps=count_planned_steps(config, kind, state))
