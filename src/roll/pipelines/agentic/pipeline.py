"""Reinforcement learning in environments: an `algorithm` over episodes.

episode: obs ► answer ► step ► obs ► … ► reward      one coroutine per episode, so that no episode waits for another
groups ► advantages of trajectories or turns ► train ► sync ► success rates ► which environments come next
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.agentic import AgenticConfig
from roll.data import PromptData
from roll.pipelines.agentic.objective import AgenticObjective
from roll.pipelines.episodes.demonstration_file import read_demonstrations
from roll.pipelines.episodes.demonstrations import play_demonstrations
from roll.pipelines.episodes.draws import EpisodeDraws
from roll.pipelines.episodes.state import AgenticState
from roll.pipelines.evaluation import measure
from roll.pipelines.learning.losses import check_user_functions
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, build_facts, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.reinforcement.objective import build_demonstration_player, open_gradient_stream
from roll.pipelines.reinforcement.sampling import build_controller
from roll.pipelines.reinforcement.trainers import build_learner, build_trainer_specs, get_device_role
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.rollout import AsyncController
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: AgenticConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start all roles, restore the checkpoint, yield the training loop, and shut the roles down, even after errors."""
    session.tracker.note("reading the model's files")
    check_user_functions(config.algorithm)
    shown = await run_in_thread(read_demonstrations, config)
    prepared = await run_in_thread(prepare, config, session.directory.media_dir)
    specs = await run_in_thread(build_trainer_specs, config, prepared.model_path)
    placed = [RoleSpec(get_device_role(spec), spec) for spec in specs]
    async with open_online(
        config,
        session,
        prepared,
        placed,
        partial(build_learner, config),
        make_controller=_build_agentic_controller,
        state_type=AgenticState,
    ) as online:
        await play_demonstrations(online, prepared.data.train, shown)
        online, stream = open_gradient_stream(online)
        objective = AgenticObjective(
            online=online, get_demonstrations=build_demonstration_player(online), stream=stream
        )
        yield partial(train, online, objective)


def _build_agentic_controller(
    config: AgenticConfig, state: AgenticState, data: PromptData, *parts: Any
) -> AsyncController:
    draws = EpisodeDraws(config=config, state=state, stream=data.train)
    return build_controller(config, state, data, *parts, draws=draws)


def _build_run_facts(config: AgenticConfig, state: RunState) -> RunFacts:
    return build_facts(config, state, config.algorithm.type)


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=measure, state=AgenticState)
