"""The pipeline of RLVR: its roles, for a run or for a replay, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines.evaluation import measure
from roll.pipelines.learning.losses import check_user_functions
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online.loop import train
from roll.pipelines.online.online_run import Recorder
from roll.pipelines.online.opening import RoleSpec, build_facts, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.recording.generation import open_rollout_replay
from roll.pipelines.recording.recorder import RecordingProxy, open_recorder
from roll.pipelines.recording.training import open_training_replay
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.reinforcement.objective import (
    ReinforcementObjective,
    build_demonstration_player,
    open_gradient_stream,
)
from roll.pipelines.reinforcement.sampling import build_controller
from roll.pipelines.reinforcement.trainers import build_learner, build_trainer_specs, get_device_role
from roll.pipelines.run import Run, Session
from roll.pipelines.state import RunState
from roll.rollout import LLMProxy
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start the roles of a run or of a replay, yield the loop to run, and shut the roles down afterwards.

    Raises:
        UserError: The run cannot start; the message gives the reason.
    """
    kinds = {"": _open_run, "train": open_training_replay, "rollout": open_rollout_replay}
    async with kinds[config.replay.only if config.replay else ""](config, session) as work:
        yield work


@asynccontextmanager
async def _open_run(config: RLVRConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start all roles, restore the checkpoint, yield the training loop, and shut the roles down, even after errors."""
    tracker = session.tracker
    tracker.note("reading the model's files and the prompts")
    check_user_functions(config.algorithm)
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    specs = await run_in_thread(build_trainer_specs, config, prepared.model_path)

    def build_recorder(run: Run[LearningState]) -> Recorder:
        return open_recorder(config, prepared, run.state, tracker, run.ledger)

    records = config.tracking.record_rollouts
    async with open_online(
        config,
        session,
        prepared,
        [RoleSpec(get_device_role(spec), spec) for spec in specs],
        partial(build_learner, config),
        make_controller=build_controller,
        build_recorder=build_recorder if records else None,
        proxy_type=RecordingProxy if records else LLMProxy,
    ) as online:
        online, stream = open_gradient_stream(online)
        objective = ReinforcementObjective(
            online=online, get_demonstrations=build_demonstration_player(online), stream=stream
        )
        yield partial(train, online, objective)


def _build_run_facts(config: RLVRConfig, state: RunState) -> RunFacts:
    only = config.replay.only if config.replay else ""
    engines, ranks = "no engine" if only == "train" else None, "no trainer" if only == "rollout" else None
    return build_facts(config, state, config.algorithm.type, engines=engines, ranks=ranks)


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=measure, state=LearningState)
