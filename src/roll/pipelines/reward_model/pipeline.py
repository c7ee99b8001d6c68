"""The pipeline of reward-model training: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from roll.config.pipelines.reward_model import RewardModelConfig
from roll.config.supervised import SupervisedConfig
from roll.data.examples import ExampleKind
from roll.pipelines.registry import Pipeline, RunFacts
from roll.pipelines.reward_model.losses import loss_of
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import measure_model
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import facts, open_course
from roll.pipelines.supervised.preparation import Prepared, policy_spec
from roll.training import TrainerSpec

__all__ = ["PIPELINE"]


def _scorer_spec(config: SupervisedConfig, prepared: Prepared) -> TrainerSpec:
    """Return the spec of the trained model, which has a score head instead of the vocabulary head."""
    return replace(policy_spec(config, prepared), role="reward_model")


def _kind(config: RewardModelConfig) -> ExampleKind:
    return "scored" if config.reward_model.loss == "regression" else "pair"


@asynccontextmanager
async def _open(config: RewardModelConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with open_course(config, session, _kind(config), spec_of=_scorer_spec, score_at_end=True) as course:
        yield partial(train, course, loss_of(config.reward_model))


async def _measure(config: RewardModelConfig) -> dict[str, float]:
    loss = loss_of(config.reward_model)
    return await measure_model(config, kind=_kind(config), loss=loss, role="reward_model", score_at_end=True)


def _facts(config: RewardModelConfig, at: RunState) -> RunFacts:
    return facts(config, at, _kind(config), config.reward_model.loss)


PIPELINE = Pipeline(open=_open, facts=_facts, evaluate=_measure)
