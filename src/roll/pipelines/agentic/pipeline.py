"""Reinforcement learning in environments: the loop of `rlvr` over episodes, and a curriculum of environments.

episode: obs ► answer ► step ► obs ► … ► reward      one coroutine each: none waits for another's environment
groups ► advantages of trajectories or turns ► train ► sync ► success rates ► which environments come next
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.agentic.curriculum import AgenticState, domain_of, note_successes
from roll.pipelines.evaluation import measure
from roll.pipelines.learning.losses import check_own_functions
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.online.opening import Placed, facts, open_online
from roll.pipelines.preparation import prepare
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.rlvr import loop
from roll.pipelines.rlvr.collecting import Collected
from roll.pipelines.rlvr.sampling import build_controller
from roll.pipelines.rlvr.step import learn_from
from roll.pipelines.rlvr.trainers import device_role, learner_of, trainer_specs
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.rollout import AsyncController

__all__ = ["PIPELINE"]


@asynccontextmanager
async def _open(config: AgenticConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start every role, restore what a checkpoint holds, and end every role afterwards, also after an error."""
    session.tracker.note("reading the model's files")
    check_own_functions(config.algorithm)
    prepared = await asyncio.to_thread(prepare, config)
    specs = await asyncio.to_thread(trainer_specs, config, prepared.model_path)
    placed = [Placed(device_role(spec), spec) for spec in specs]
    async with open_online(
        config, session, prepared, placed, partial(learner_of, config), controlled=_controller, state_type=AgenticState
    ) as opened:
        yield partial(loop.train, opened.online, opened.live, opened.evaluator, _learn)


def _controller(config: AgenticConfig, state: AgenticState, *parts: Any) -> AsyncController:
    chosen = partial(domain_of, config, state) if config.curriculum else None
    return build_controller(config, state, *parts, domain_of=chosen)


async def _learn(online: OnlineRun[AgenticConfig], collected: Collected) -> list[str]:
    """Learn from a batch up to the step's boundary, and note which environments were solved."""
    alarms = await learn_from(online, collected)
    state, curriculum = online.run.state, online.config.curriculum
    if curriculum is not None:
        assert isinstance(state, AgenticState)
        note_successes(curriculum, state, collected.batch.groups)
    return alarms


def _facts(config: AgenticConfig, at: RunState) -> RunFacts:
    return facts(config, at, config.algorithm.type)


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=measure, state=AgenticState)
