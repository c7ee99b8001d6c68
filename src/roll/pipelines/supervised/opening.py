"""Opening of a supervised run from its configuration, and shutdown in reverse order."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from roll.cluster.base import Cluster, open_cluster
from roll.config.supervised import SupervisedConfig
from roll.config.training import check_back_end
from roll.data.examples import ExampleKind
from roll.pipelines.fingerprints import fingerprints
from roll.pipelines.instant_checks import check_disk
from roll.pipelines.registry import RunFacts
from roll.pipelines.run import Run, Session, restore_state
from roll.pipelines.state import RunState
from roll.pipelines.supervised.answers import open_answers
from roll.pipelines.supervised.preparation import Prepared, planned_steps, policy_spec, prepare
from roll.pipelines.supervised.supervised_run import SupervisedRun
from roll.running import run_in_thread
from roll.training import TrainerSpec

__all__ = ["facts", "open_course"]


@asynccontextmanager
async def open_course(
    config: SupervisedConfig,
    session: Session,
    kind: ExampleKind,
    *,
    spec_of: Callable[[SupervisedConfig, Prepared], TrainerSpec] = policy_spec,
    first: Callable[[Cluster, Prepared], Awaitable[None]] | None = None,
    score_at_end: bool = False,
) -> AsyncIterator[SupervisedRun]:
    """Start every role, restore the checkpoint, and shut every role down afterwards, also after an error.

    Args:
        config: Configuration of the run.
        session: Session of this process.
        kind: Kind of the examples.
        spec_of: Returns the spec of the trained model.
        first: Coroutine function that is awaited before the trainer starts.
        score_at_end: See `build_examples`.
    """
    tracker, saved = session.tracker, session.saved
    tracker.note("reading the model's files and the examples")
    at = saved.state if saved else RunState()
    prepared = await run_in_thread(prepare, config, kind, at, score_at_end=score_at_end)
    unchanging = fingerprints(config, prepared.examples.held_out_fingerprints)
    check_back_end(prepared.training.backend)
    check_disk(config, prepared.training, prepared.model_path, session)
    state = restore_state(saved, prepared.examples.train, unchanging=unchanging)
    async with AsyncExitStack() as stack:
        cluster = open_cluster(config.cluster, config.roles, session.directory)
        stack.push_async_callback(cluster.close)
        if first is not None:
            await first(cluster, prepared)
        spec = spec_of(config, prepared)
        tracker.note(f"starting trainer ({spec.role})")
        policy = await cluster.start_trainer(spec, "actor_train")
        stack.push_async_callback(policy.close)
        if saved is not None:
            tracker.note(f"loading the checkpoint of step {state.step}")
            await saved.restore(policy)
        stream, num_steps = prepared.examples.train, prepared.training.num_steps
        run = Run.of(config, num_steps, session, state, stream, policy)
        answering, answers = config.answering(), None
        if answering is not None:
            answers = await open_answers(answering, session, cluster, run, policy, stack)
            run.checkpointer.before_writing = answers.live.hand_to_trainers
        yield SupervisedRun(
            config=config,
            training=prepared.training,
            run=run,
            policy=policy,
            examples=prepared.examples,
            answers=answers,
        )


def facts(config: SupervisedConfig, at: RunState, kind: ExampleKind, method: str) -> RunFacts:
    """Return the facts that are shown about a run in a given state."""
    ranks, cores = config.roles["actor_train"].count, os.cpu_count() or 1
    where = f"{config.cluster.type}: {ranks} trainer rank{'s' * (ranks != 1)}, {cores} core{'s' * (cores != 1)}"
    return RunFacts(method=method, where=where, num_steps=planned_steps(config, kind, at))
