"""One session of a run: its state, its checkpoints, and the loop of its steps.

Draws and rollouts since the last boundary are discarded when a run ends early, and repeated by the resumed run. Updates
since then cannot be undone: while `Run.mid_update` is True, no consistent checkpoint can be saved before the next
boundary.
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
from roll.errors import AlarmError, one_line_error
from roll.pipelines.checkpoint_files import S, SavedRun
from roll.pipelines.checkpointer import Checkpointer
from roll.pipelines.fingerprints import check_fingerprints
from roll.pipelines.state import RunState
from roll.pipelines.stop import Interrupted, StopRequest
from roll.protocols import TrainerGroup
from roll.rollout import DataLedger
from roll.tracking import RunDirectory, Spans, Tracker

__all__ = ["Run", "Session", "restore_state", "run_session", "run_steps"]

logger = logging.getLogger(__name__)

LAST_SAVE_TIMEOUT_S = 1800.0
"""Timeout for saving a failed run, so that a hanging rank does not hide the error from the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The objects that a process needs for a session of a run."""

    directory: RunDirectory
    """Run directory, locked by this process."""
    tracker: Tracker
    stop: StopRequest
    """Stop request, set by a signal."""
    saved: SavedRun[Any] | None = None
    """Checkpoint from which the run resumes, with the pipeline's class of state; `None` for a new run."""


def restore_state(
    saved: SavedRun[S] | None,
    stream: WeightedStream[Any, Any],
    state_class: type[S] = RunState,
    fingerprints: Mapping[str, str] | None = None,
) -> S:
    """Return the initial state of a session, and set the stream to its position in this state.

    Args:
        saved: Checkpoint from which the session resumes.
        stream: Stream of the training data.
        state_class: Class of the state.
        fingerprints: Result of `roll.pipelines.fingerprints.compute_fingerprints`; if omitted, no digests are compared.

    Raises:
        CheckpointError: The data or the code has changed since the checkpoint.
    """
    state = saved.state if saved else state_class(data=stream.state())
    stream.restore(state.data)
    if fingerprints is not None:
        check_fingerprints(state.unchanging, fingerprints)
        state.unchanging = dict(fingerprints)
    return state


@dataclass(kw_only=True, slots=True)
class Run(Generic[S]):
    """The objects of a run that every pipeline uses."""

    seed: int
    num_steps: int
    checkpoint: CheckpointConfig
    state: S
    stream: WeightedStream[Any, Any]
    """Source of draws; at a boundary, `state.data` is its cursor."""
    ledger: DataLedger
    checkpointer: Checkpointer
    tracker: Tracker
    stop: StopRequest
    began_at: int
    """Step after which this session began."""
    mid_update: bool = False
    """True if trainers may have changed since the last boundary, so no consistent checkpoint can be saved.
    """
    has_trained: bool = False
    """True if a trainer's weights differ from the initial model, after an update or from a checkpoint."""

    @classmethod
    def create(
        cls,
        config: RunConfig,
        num_steps: int,
        session: Session,
        state: S,
        stream: WeightedStream[Any, Any],
        policy: TrainerGroup,
        critics: Sequence[TrainerGroup] = (),
    ) -> Run[S]:
        """Build the run of a session from the state that `restore_state` returned."""
        tracker, checkpoint = session.tracker, config.checkpoint
        return cls(
            seed=config.seed,
            num_steps=num_steps,
            checkpoint=checkpoint,
            state=state,
            stream=stream,
            ledger=session.saved.ledger if session.saved else DataLedger(),
            checkpointer=Checkpointer(
                session.directory, checkpoint, policy, critics, on_saved=tracker.callbacks.notify_saved
            ),
            tracker=tracker,
            stop=session.stop,
            began_at=state.step,
            has_trained=session.saved is not None,
        )

    @property
    def spans(self) -> Spans:
        """Spans of the tracker, which measure time by phase."""
        return self.tracker.spans

    async def save(self, *, wait: bool = True) -> Path:
        """Write a checkpoint of the last step boundary; with `wait`, wait until it is complete, even if saves are
        asynchronous.
        """
        with self.spans.phase("checkpoint"):
            path = await self.checkpointer.save(self.state, self.ledger)
            if wait:
                await self.checkpointer.publish_pending(wait=True)
            return path

    async def save_at_end(self) -> None:
        """Save a checkpoint, unless no step was trained."""
        if self.has_trained:
            await self.save()
            return
        await self.checkpointer.publish_pending(wait=True)
        logger.warning("no training step was completed, so no checkpoint is saved")

    async def save_boundary(self) -> Path:
        """Save a checkpoint of the last step boundary; later draws are discarded and repeated when the run resumes."""
        self.stream.restore(self.state.data)
        self.ledger.drop_from(self.state.num_draws)
        return await self.save()

    async def save_after_error(self, error: Exception, close: Callable[[], Awaitable[None]]) -> None:
        """Save a checkpoint of the last step boundary, if possible, before an error ends the run.

        Args:
            error: The error that ends the run.
            close: Ends the background tasks that still use the stream of draws.
        """
        try:
            # The error may have broken a role that saving waits for, so the last save has a time limit.
            async with asyncio.timeout(LAST_SAVE_TIMEOUT_S):
                # Without a new consistent boundary, only a checkpoint that is still being written can be completed.
                if self.state.step == self.began_at or self.mid_update or not self.has_trained:
                    await self.checkpointer.publish_pending(wait=True)
                    return
                await close()
                path = await self.save_boundary()
        except Exception as failure:  # the cause of the first error may break this too
            if str(failure) != str(error):
                logger.warning(
                    "the training progress since the last checkpoint could not be saved: %s", one_line_error(failure)
                )
        else:
            logger.warning(
                "the run ends early (%s): the checkpoint of step %d is saved in '%s'",
                one_line_error(error),
                self.state.step,
                path,
            )


async def run_steps(run: Run[Any], step: Callable[[], Awaitable[list[str]]]) -> None:
    """Run the remaining steps; this is the training loop of every pipeline.

    Existing objects are frozen, so that the garbage collector skips them: scanning all objects of torch blocks the
    event loop for a quarter of a second. Objects that the caller has frozen stay frozen.

    Args:
        run: The run, at a step boundary.
        step: Function that runs the next step up to its boundary, at which the run may be saved, and returns the alarms
            that stop the run.

    Raises:
        AlarmError: An alarm stops the run; everything up to this boundary is saved.
    """
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        while run.state.step < run.num_steps:
            with run.spans.step(run.state.step + 1):
                alarms = await step()
                # Errors of an asynchronous save surface at the next boundary, before another save begins.
                await run.checkpointer.publish_pending(wait=False)
                if alarms:
                    await run.save_at_end()
                elif run.checkpointer.is_due(run.state):
                    await run.save(wait=False)
                if alarms:
                    raise AlarmError("; ".join(alarms))
    finally:
        if freezes:
            gc.unfreeze()


async def _do_nothing() -> None:
    """Do nothing; used for a run without background tasks."""


@asynccontextmanager
async def run_session(run: Run[Any], close: Callable[[], Awaitable[None]] = _do_nothing) -> AsyncIterator[None]:
    """Save a checkpoint when this context ends, if possible also after an error.

    Args:
        run: The run to save.
        close: Ends the background tasks. Calling it twice is safe.
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
        await run.save_after_error(error, close)
        raise
    finally:
        await close()
    await (run.save_at_end() if run.checkpoint.at_end else run.checkpointer.publish_pending(wait=True))
