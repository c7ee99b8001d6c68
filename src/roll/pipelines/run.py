"""One session of a run: where it stands, what is written of it, and the loop of its steps.

What was begun since the last boundary (draws, rollouts) is forgotten when a run ends early, and made again by the
resumed run. What trainers did since then cannot be undone: while `Run.mid_update` says so, nothing true can be saved
before the next boundary.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from roll.config.operations import CheckpointConfig
from roll.config.run import RunConfig
from roll.data import WeightedStream
from roll.errors import AlarmError
from roll.pipelines.checkpoint_files import S, SavedRun
from roll.pipelines.checkpointer import Checkpointer
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest
from roll.pipelines.unchanging import check_unchanged
from roll.protocols import TrainerGroup
from roll.rollout import DataLedger
from roll.tracking import RunDirectory, Spans, Tracker

__all__ = ["Run", "Session", "beginning", "take_steps", "whole_run"]

logger = logging.getLogger(__name__)

LONGEST_LAST_SAVE_S = 1800.0
"""For the save of a run that failed: a rank that hangs must not keep the error from its user for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What a process is given to work on a run with."""

    directory: RunDirectory
    """Locked by this process."""
    tracker: Tracker
    stop: StopRequest
    """Set by a signal."""
    saved: SavedRun[Any] | None = None
    """With the pipeline's own kind of state: the checkpoint from which the run goes on; `None` for one that begins."""


def beginning(
    saved: SavedRun[S] | None,
    stream: WeightedStream[Any, Any],
    kind: type[S] = RunState,
    unchanging: Mapping[str, str] | None = None,
) -> S:
    """Return the state with which a session begins, and set its stream to it.

    Args:
        saved: the checkpoint that the session goes on from.
        stream: of the training data.
        kind: of the state.
        unchanging: see `roll.pipelines.unchanging.fingerprints`; not compared where it is left out.

    Raises:
        CheckpointError: data or code are not those that the checkpoint was saved with.
    """
    state = saved.state if saved else kind(data=stream.state())
    stream.restore(state.data)
    if unchanging is not None:
        check_unchanged(state.unchanging, unchanging)
        state.unchanging = dict(unchanging)
    return state


@dataclass(kw_only=True, slots=True)
class Run(Generic[S]):
    """What every pipeline has, whatever it trains, and however."""

    seed: int
    num_steps: int
    checkpoint: CheckpointConfig
    state: S
    stream: WeightedStream[Any, Any]
    """Where draws come from; at a boundary, `state.data` is its cursor."""
    ledger: DataLedger
    checkpointer: Checkpointer
    tracker: Tracker
    stop: StopRequest
    began_at: int
    """Step after which this session began."""
    mid_update: bool = False
    """Whether trainers may have moved on from the last boundary: until the next one, nothing true can be saved."""
    has_trained: bool = False
    """Whether a trainer has weights that no model directory has: of a checkpoint, or after an update."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        num_steps: int,
        session: Session,
        state: S,
        stream: WeightedStream[Any, Any],
        policy: TrainerGroup,
        critics: Sequence[TrainerGroup] = (),
    ) -> Run[S]:
        """Build the run of a session, from its initial state: see `beginning`."""
        tracker, checkpoint = session.tracker, config.checkpoint
        return cls(
            seed=config.seed,
            num_steps=num_steps,
            checkpoint=checkpoint,
            state=state,
            stream=stream,
            ledger=session.saved.ledger if session.saved else DataLedger(),
            checkpointer=Checkpointer(session.directory, checkpoint, policy, critics, on_saved=tracker.callbacks.saved),
            tracker=tracker,
            stop=session.stop,
            began_at=state.step,
            has_trained=session.saved is not None,
        )

    @property
    def spans(self) -> Spans:
        """Where time goes."""
        return self.tracker.spans

    async def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the last boundary; wait until it is whole, also where it is written asynchronously."""
        with self.spans.phase("checkpoint"):
            path = await self.checkpointer.save(self.state, self.ledger)
            if wait:
                await self.checkpointer.settle(wait=True)
            return path

    async def save_at_the_end(self) -> None:
        """Save, unless nothing was trained: the model that the run began with is there already."""
        if self.has_trained:
            await self.save()
            return
        await self.checkpointer.settle(wait=True)
        logger.warning("nothing was trained, so no checkpoint is saved")

    async def save_boundary(self) -> Path:
        """Forget draws that were made since the last boundary, which will be made again, and save that."""
        self.stream.restore(self.state.data)
        self.ledger.forget_from(self.state.num_draws)
        return await self.save()

    async def save_before_the_end(self, error: Exception, close: Callable[[], Awaitable[None]]) -> None:
        """Save the last boundary, if possible, before the run ends because of an error.

        Args:
            error: The error that ends the run.
            close: Ends the tasks that still draw.
        """
        try:
            async with asyncio.timeout(LONGEST_LAST_SAVE_S):
                if self.state.step == self.began_at or self.mid_update or not self.has_trained:
                    await self.checkpointer.settle(wait=True)
                    return
                await close()
                path = await self.save_boundary()
        except Exception as failure:  # what broke the run may break this as well
            if str(failure) != str(error):
                logger.warning("what was learnt since the last checkpoint could not be saved: %s", failure)
        else:
            logger.warning("the run ends early (%s); up to step %d it is saved in %s", error, self.state.step, path)


async def take_steps(run: Run[Any], step: Callable[[], Awaitable[list[str]]]) -> None:
    """Take the remaining steps: the one loop of every pipeline that trains.

    What was there before stays, so that the collector need not look for garbage in it: to go through all that torch
    imports takes a quarter of a second, in which nobody is answered. Where the caller has frozen objects of its own,
    that is left as it is.

    Args:
        run: at a step's boundary.
        step: makes the next one, up to its boundary, where the run may be saved; returns alarms that stop the run.

    Raises:
        AlarmError: an alarm stops the run; everything up to this boundary is saved.
    """
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        while run.state.step < run.num_steps:
            with run.spans.step(run.state.step + 1):
                alarms = await step()
                await run.checkpointer.settle(wait=False)
                if alarms:
                    await run.save_at_the_end()
                elif run.checkpointer.due(run.state):
                    await run.save(wait=False)
                if alarms:
                    raise AlarmError("; ".join(alarms))
    finally:
        if freezes:
            gc.unfreeze()


async def _nothing_to_close() -> None:
    """Do nothing; used for a run without background tasks."""


@asynccontextmanager
async def whole_run(run: Run[Any], close: Callable[[], Awaitable[None]] = _nothing_to_close) -> AsyncIterator[None]:
    """Run the body, a whole session, and save what can be saved however it ends.

    Args:
        run: The run to save.
        close: Ends the background tasks; may be called twice.
    """
    try:
        yield
    except Interrupted:
        await close()
        if run.has_trained:
            await run.save_boundary()
        raise
    except AlarmError:
        raise
    except Exception as error:
        await run.save_before_the_end(error, close)
        raise
    finally:
        await close()
    await (run.save_at_the_end() if run.checkpoint.at_end else run.checkpointer.settle(wait=True))
