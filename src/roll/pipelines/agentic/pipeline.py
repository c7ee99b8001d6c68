"""Reinforcement learning in environments: an `algorithm` over episodes, and a curriculum of environments.

episode: obs ► answer ► step ► obs ► … ► reward      one coroutine per episode, so that no episode waits for another
groups ► advantages of trajectories or turns ► train ► sync ► success rates ► which environments come next
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.agentic import AgenticConfig
from roll.data import Data
from roll.pipelines.agentic.objective import Episodes
from roll.pipelines.episodes.demonstrating import play_demonstrations
from roll.pipelines.episodes.draws import EpisodeDraws
from roll.pipelines.episodes.reading import read_demonstrations
from roll.pipelines.episodes.state import AgenticState
from roll.pipelines.evaluation import measure
from roll.pipelines.learning.losses import check_own_functions
from roll.pipelines.online.loop import train
from roll.pipelines.online.opening import RoleSpec, facts, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.reinforcement.objective import live_demonstrations
from roll.pipelines.reinforcement.sampling import build_controller
from roll.pipelines.reinforcement.trainers import device_role, learner_of, trainer_specs
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.rollout import AsyncController
from roll.running import run_in_thread

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: AgenticConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start every role, restore the checkpoint, and shut every role down afterwards, also after an error."""
    session.tracker.note("reading the model's files")
    check_own_functions(config.algorithm)
    shown = await run_in_thread(read_demonstrations, config)
    prepared = await run_in_thread(prepare, config)
    specs = await run_in_thread(trainer_specs, config, prepared.model_path)
    placed = [RoleSpec(device_role(spec), spec) for spec in specs]
    async with open_online(
        config, session, prepared, placed, partial(learner_of, config), controlled=_controller, state_type=AgenticState
    ) as online:
        await play_demonstrations(online, prepared.data.train, shown)
        yield partial(train, online, Episodes(online=online, shown=live_demonstrations(online)))


def _controller(config: AgenticConfig, state: AgenticState, data: Data, *parts: Any) -> AsyncController:
    draws = EpisodeDraws(config=config, state=state, stream=data.train)
    return build_controller(config, state, data, *parts, draws=draws)


def _facts(config: AgenticConfig, at: RunState) -> RunFacts:
    return facts(config, at, config.algorithm.type)


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=measure, state=AgenticState)
