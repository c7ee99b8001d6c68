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
from roll.pipelines.reward_model.losses import build_loss
from roll.pipelines.run import Session
from roll.pipelines.state import RunState
from roll.pipelines.supervised.evaluation import measure_model
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import build_facts, open_supervised
from roll.pipelines.supervised.preparation import PreparedRun, build_policy_spec
from roll.training import TrainerSpec

__all__ = ["PIPELINE"]


def _build_scorer_spec(config: SupervisedConfig, prepared: PreparedRun) -> TrainerSpec:
    """Return the spec of the trained model, which has a score head instead of the LM head."""
    return replace(build_policy_spec(config, prepared), role="reward_model")


def _get_example_kind(config: RewardModelConfig) -> ExampleKind:
    return "scored" if config.reward_model.loss == "regression" else "pair"


@asynccontextmanager
async def _open(config: RewardModelConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with open_supervised(
        config, session, _get_example_kind(config), build_spec=_build_scorer_spec, score_at_end=True
    ) as supervised:
        yield partial(train, supervised, build_loss(config.reward_model))


async def _measure(config: RewardModelConfig) -> dict[str, float]:
    loss = build_loss(config.reward_model)
    return await measure_model(
        config, kind=_get_example_kind(config), loss=loss, role="reward_model", score_at_end=True
    )


def _build_run_facts(config: RewardModelConfig, state: RunState) -> RunFacts:
    return build_facts(config, state, _get_example_kind(config), config.reward_model.loss)


PIPELINE = Pipeline(open=_open, facts=_build_run_facts, evaluate=_measure)
