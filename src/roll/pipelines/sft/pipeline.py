"""The pipeline of supervised fine-tuning: its roles, facts and evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.algorithms.losses import LikelihoodLoss
from roll.config.pipelines.sft import SFTConfig
from roll.pipelines.registry import Pipeline
from roll.pipelines.run import Session
from roll.pipelines.supervised.evaluation import measure_model
from roll.pipelines.supervised.loop import train
from roll.pipelines.supervised.opening import build_facts, open_supervised

__all__ = ["LOSS", "PIPELINE"]

LOSS = LikelihoodLoss()


@asynccontextmanager
async def _open(config: SFTConfig, session: Session) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with open_supervised(config, session, "supervised") as supervised:
        yield partial(train, supervised, LOSS)


PIPELINE = Pipeline(
    open=_open,
    facts=partial(build_facts, kind="supervised", method="likelihood"),
    evaluate=partial(measure_model, kind="supervised", loss=LOSS),
)
