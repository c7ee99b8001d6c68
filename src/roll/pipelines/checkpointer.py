"""Writing checkpoints: atomic, and pruned.

    checkpoints/step-000020/   model/ (HF safetensors)   trainer/ (optimiser, schedule, RNG of every rank)
                               critic-0/ … (as trainer/)   state.json   ledger.jsonl

Invariants:
    - a directory called `step-N` is complete: everything is written under another name, flushed to the disk, and
      renamed;
    - the previous checkpoint is removed only after the new one has its name; so a crash at any moment leaves one whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from roll.config.operations import CheckpointConfig
from roll.errors import CheckpointError, InfraError, RunDirectoryError
from roll.pipelines.checkpoint_files import (
    UNFINISHED,
    checkpoints,
    critic_directory,
    find_checkpoint,
    remove_unfinished,
)
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout.ledger import DataLedger
from roll.tracking import RunDirectory, atomic

__all__ = ["Checkpointer"]

FULL_BELOW_BYTES = 2**20
"""Libraries that write do not all say why they could not: with less than this left, the disk was full."""


@dataclass(eq=False)
class Checkpointer:
    """Writes and prunes the checkpoints of one run."""

    run: RunDirectory
    """Where they go."""
    config: CheckpointConfig
    """Which are written and kept."""
    trainer: TrainerGroup
    """Of the policy."""
    critics: Sequence[TrainerGroup] = ()
    """Whose states are saved beside it."""
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    """Seconds that only grow."""
    on_saved: Callable[[int, Path], object] | None = None
    """Is told the step and the directory of every new checkpoint."""
    before_writing: Callable[[], Awaitable[None]] | None = None
    """Brings trainers' states to where they can be written from."""
    _saved_at: float = field(init=False)
    _saved_step: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def due(self, state: RunState) -> bool:
        """Whether the configuration asks for a checkpoint of this step: by its number, by the time since the last one,
        or because it is the best.
        """
        every, longest = self.config.every_num_steps, self.config.every_s
        best = self.config.keep_best and state.best_step == state.step > 0
        late = longest is not None and self.clock() - self._saved_at > longest
        return best or late or bool(every and state.step % every == 0)

    async def save(self, state: RunState, ledger: DataLedger) -> Path:
        """Write a checkpoint of this step; one that exists already is left as it is."""
        final = self.run.checkpoint_path(state.step)
        # As they are now: in an asynchronous run rollouts go on while this writes.
        ledger_text, state_json = ledger.dumps(state.num_draws), state.to_json()
        if self._saved_step == state.step or final.is_dir():
            return final
        remove_unfinished(self.run.checkpoints_dir)
        temporary = final.with_name(f"{UNFINISHED}{final.name}")
        with _saying_what_to_do(final, temporary):
            await self._write(temporary, final, state_json, ledger_text)
        await asyncio.to_thread(self._prune, state.best_step)
        self._saved_step, self._saved_at = state.step, self.clock()
        if self.on_saved is not None:
            self.on_saved(state.step, final)
        return final

    async def _write(self, temporary: Path, final: Path, state_json: dict[str, Any], ledger_text: str) -> None:
        if self.before_writing is not None:
            await self.before_writing()
        temporary.mkdir(parents=True)
        await self.trainer.save(temporary / "trainer")
        for index, critic in enumerate(self.critics):
            await critic.save(temporary / critic_directory(index))
        await self.trainer.export(temporary / "model")
        await asyncio.to_thread(self._finish, temporary, final, state_json, ledger_text)

    def _finish(self, temporary: Path, final: Path, state_json: dict[str, Any], ledger_text: str) -> None:
        atomic.write_text(temporary / "ledger.jsonl", ledger_text)
        atomic.write_json(temporary / "state.json", state_json)
        atomic.replace_directory(temporary, final)

    def _prune(self, best_step: int | None) -> None:
        saved = checkpoints(self.run.checkpoints_dir)
        keep = set(list(saved)[-self.config.keep_last :])
        if self.config.keep_best and best_step is not None:
            keep.add(best_step)
        for step, path in saved.items():
            if step not in keep:
                discard = path.with_name(f"{UNFINISHED}{path.name}")
                path.rename(discard)
                shutil.rmtree(discard)


@contextlib.contextmanager
def _saying_what_to_do(final: Path, temporary: Path) -> Iterator[None]:
    """A checkpoint that could not be written, whichever library tried, as one message; its remains are removed.

    Raises:
        RunDirectoryError: the disk is full, or cannot be written to.
        CheckpointError: anything else.
    """
    try:
        yield
    except InfraError:
        raise
    except Exception as error:
        place = temporary if temporary.is_dir() else final.parents[1]
        free = shutil.disk_usage(place).free
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        newest = find_checkpoint(final.parent)
        before = f"The last one, '{newest.name}', is whole" if newest else "There is none before it"
        reason = _os_reason(error) or ("No space left on device" if free < FULL_BELOW_BYTES else None)
        what = f"the checkpoint '{final}' could not be written: {reason or error}. {before}."
        if reason is None:
            raise CheckpointError(what) from error
        mend = f"{free / 2**20:,.0f} MiB were free there. Make room or mend it; `roll resume` then goes on."
        raise RunDirectoryError(f"{what} {mend}") from error


def _os_reason(error: BaseException | None) -> str | None:
    """What the system said, however deep in the chain of causes."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return None
