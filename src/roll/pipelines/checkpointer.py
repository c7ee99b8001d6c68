"""Writes checkpoints atomically, and removes old ones.

    checkpoints/step-000020/   model/ (HF safetensors)   trainer/ (optimizer, schedule, RNG of every rank)
                               critic-0/ … (as trainer/)   state.json   ledger.jsonl

Invariants:
    - a directory called `step-N` is complete: everything is written under another name, flushed to the disk, and
      renamed;
    - the previous checkpoint is removed only after the new one has its name, so a crash leaves a complete checkpoint;
    - an asynchronous checkpoint contains the state and the ledger of the step at which it began; it is published, or
its failure is reported, at the first step boundary after it was written, and before the next checkpoint begins."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from roll.config.operations import CheckpointConfig
from roll.errors import CheckpointError, InfraError, RunDirectoryError
from roll.pipelines.checkpoint_files import (
    UNFINISHED_PREFIX,
    find_checkpoint,
    get_critic_directory,
    list_checkpoints,
    remove_unfinished,
)
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout.ledger import DataLedger
from roll.tracking import RunDirectory, atomic

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 2**20
"""Free space below which the disk is treated as full, because not all libraries report why a write failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingCheckpoint:
    """A checkpoint that is not published yet."""

    step: int
    best_step: int | None
    final: Path
    ledger_text: str
    state_json: dict[str, Any]

    @property
    def temporary(self) -> Path:
        """Directory in which the checkpoint is written."""
        return self.final.with_name(f"{UNFINISHED_PREFIX}{self.final.name}")


@dataclass(eq=False)
class Checkpointer:
    """Writes and prunes the checkpoints of one run."""

    run: RunDirectory
    """Directory of the run."""
    config: CheckpointConfig
    """Checkpoint schedule and retention."""
    trainer: TrainerGroup
    """Trainer of the policy."""
    critics: Sequence[TrainerGroup] = ()
    """Trainers of critics, which are saved as well."""
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock, in seconds."""
    on_saved: Callable[[int, Path], object] | None = None
    """Called with the step and the directory of every new checkpoint."""
    before_writing: Callable[[], Awaitable[None]] | None = None
    """Called before writing, to move the trainers' states to where they can be saved."""
    _saved_at: float = field(init=False)
    _pending: _PendingCheckpoint | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def is_due(self, state: RunState) -> bool:
        """Return whether a checkpoint must be saved now.

        This depends on the step's number, the time since the last checkpoint, and the best score so far.
        """
        every, longest = self.config.every_num_steps, self.config.every_s
        best = self.config.keep_best and state.best_step == state.step > 0
        late = longest is not None and self.clock() - self._saved_at > longest
        return best or late or bool(every and state.step % every == 0)

    async def save(self, state: RunState, ledger: DataLedger) -> Path:
        """Write the checkpoint of the state's step, or start writing it asynchronously; return its directory.

        An existing checkpoint of this step is not changed.
        """
        final = self.run.get_checkpoint_path(state.step)
        # Copied now: in an asynchronous run, rollouts continue while this writes.
        new = _PendingCheckpoint(
            step=state.step,
            best_step=state.best_step,
            final=final,
            ledger_text=ledger.dumps(state.num_draws),
            state_json=state.to_json(),
        )
        try:
            await self.publish_pending(wait=True)
        except (RunDirectoryError, CheckpointError) as error:  # the new checkpoint replaces it, or fails as well
            logger.warning("%s", error)
        if final.is_dir():
            return final
        async with self._add_advice_on_error(final, new.temporary):
            await asyncio.to_thread(remove_unfinished, self.run.checkpoints_dir)
            await self._start_writing(new.temporary)
        self._pending, self._saved_at = new, self.clock()
        if not self.config.asynchronous:
            await self.publish_pending(wait=True)
        return final

    async def publish_pending(self, *, wait: bool) -> None:
        """Publish the pending checkpoint if all of its files are written; with `wait`, first wait for the files.

        Raises:
            RunDirectoryError: The disk is full or not writable.
            CheckpointError: The checkpoint could not be written for another reason.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            async with self._add_advice_on_error(pending.final, pending.temporary):
                if self.config.asynchronous and not all([await t.is_save_written(wait=wait) for t in self._trainers]):
                    return
                await asyncio.to_thread(self._publish, pending)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        await asyncio.to_thread(self._prune, pending.best_step)
        if self.on_saved is not None:
            self.on_saved(pending.step, pending.final)

    async def _start_writing(self, temporary: Path) -> None:
        if self.before_writing is not None:
            await self.before_writing()
        temporary.mkdir(parents=True)
        how = {"background": True} if self.config.asynchronous else {}
        await self.trainer.save(temporary / "trainer", **how)
        for index, critic in enumerate(self.critics):
            await critic.save(temporary / get_critic_directory(index), **how)
        await self.trainer.export(temporary / "model")

    def _publish(self, pending: _PendingCheckpoint) -> None:
        atomic.write_text(pending.temporary / "ledger.jsonl", pending.ledger_text)
        atomic.write_json(pending.temporary / "state.json", pending.state_json)
        atomic.replace_directory(pending.temporary, pending.final)

    def _prune(self, best_step: int | None) -> None:
        saved = list_checkpoints(self.run.checkpoints_dir)
        keep = set(list(saved)[-self.config.keep_last :])
        if self.config.keep_best and best_step is not None:
            keep.add(best_step)
        for step, path in saved.items():
            if step not in keep:
                discard = path.with_name(f"{UNFINISHED_PREFIX}{path.name}")
                try:
                    path.rename(discard)
                    shutil.rmtree(discard)
                except OSError as error:  # the next save tries again
                    logger.warning("the old checkpoint '%s' could not be removed: %s", path, error)

    @property
    def _trainers(self) -> list[TrainerGroup]:
        return [self.trainer, *self.critics]

    @contextlib.asynccontextmanager
    async def _add_advice_on_error(self, final: Path, temporary: Path) -> AsyncIterator[None]:
        """Convert an error while writing the checkpoint `final` to an error with advice.

        The unfinished checkpoint is removed when no trainer writes to it anymore.

        Raises:
            RunDirectoryError: The disk is full or not writable.
            CheckpointError: The checkpoint cannot be written for another reason.
        """
        try:
            yield
        except InfraError:
            raise
        except Exception as error:
            if self.config.asynchronous:  # report the same failure of other trainers once
                await asyncio.gather(*(t.is_save_written(wait=True) for t in self._trainers), return_exceptions=True)
            raise _build_save_error(final, temporary, error) from error


def _build_save_error(final: Path, temporary: Path, error: Exception) -> CheckpointError | RunDirectoryError:
    """Build the error for a checkpoint that could not be written, and remove the unfinished checkpoint."""
    place = temporary if temporary.is_dir() else final.parents[1]
    free = shutil.disk_usage(place).free
    shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
    newest = find_checkpoint(final.parent)
    before = f"The previous checkpoint, '{newest.name}', is complete" if newest else "The run has no earlier checkpoint"
    reason = _get_os_reason(error) or ("No space left on device" if free < MIN_FREE_BYTES else None)
    what = f"the checkpoint '{final}' could not be written: {reason or error}. {before}."
    if reason is None:
        return CheckpointError(what)
    advice = f"{free / 2**20:,.0f} MiB were free there. Free space or fix the cause; `roll resume` then continues."
    return RunDirectoryError(f"{what} {advice}")


def _get_os_reason(error: BaseException | None) -> str | None:
    """Return the message of the first `OSError` in the chain of causes; `None` if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None
