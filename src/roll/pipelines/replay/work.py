"""What a configuration asks for: a run, or a replay of one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from roll.config.pipelines.rlvr import RLVRConfig
from roll.pipelines import rlvr
from roll.pipelines.replay.generation import open_generation
from roll.pipelines.replay.training import open_training, train_again
from roll.pipelines.saved import SavedRun
from roll.pipelines.setup import open_parts
from roll.pipelines.stop import StopRequest
from roll.tracking import RunDirectory, Tracker

__all__ = ["open_work"]


@asynccontextmanager
async def open_work(
    config: RLVRConfig, run: RunDirectory, tracker: Tracker, stop: StopRequest, *, saved: SavedRun | None = None
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Start the roles, and end them afterwards; inside, what is to be done with them.

    Raises:
        UserError: it cannot be done; says why.
    """
    if config.replay is None:
        async with open_parts(config, run, tracker, stop, saved=saved) as parts:
            yield partial(rlvr.run, parts)
    elif config.replay.only == "train":
        async with open_training(config, run, tracker, stop, saved=saved) as parts:
            yield partial(train_again, parts)
    else:
        async with open_generation(config, run, tracker, stop) as work:
            yield work
