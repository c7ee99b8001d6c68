"""Checkpoints: atomic, pruned, and found again.

    checkpoints/step-000020/   model/ (HF safetensors)   trainer/ (optimiser, schedule, RNG of every rank)
                               state.json   ledger.jsonl   COMPLETE

Invariants:
    - a directory called `step-N` is complete: everything is written under another name, flushed to the disk, and
      renamed;
    - the previous checkpoint is removed only after the new one has its name; so a crash at any moment leaves one whole.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll.config.operations import CheckpointConfig
from roll.errors import CheckpointError
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout.ledger import DataLedger
from roll.tracking import RunDirectory, atomic

__all__ = ["Checkpointer", "SavedRun", "find_checkpoint", "read_checkpoint"]

logger = logging.getLogger(__name__)

_STEP = re.compile(r"^step-(\d{6,})$")
_UNFINISHED = ".saving-"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """A checkpoint's controller part, and where the trainer's lies."""

    path: Path
    state: RunState
    ledger: DataLedger

    @property
    def trainer_path(self) -> Path:
        """What `TrainerGroup.load` reads."""
        return self.path / "trainer"


def checkpoints(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step, ascending."""
    if not directory.is_dir():
        return {}
    found = {int(m.group(1)): p for p in directory.iterdir() if (m := _STEP.match(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


def find_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or `None` where there is none."""
    return next(reversed(checkpoints(directory).values()), None)


def read_checkpoint(path: Path) -> SavedRun:
    """Read a checkpoint's controller part.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    try:
        state = RunState.from_json(json.loads((path / "state.json").read_text(encoding="utf-8")))
        ledger = DataLedger.loads((path / "ledger.jsonl").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
    return SavedRun(path=path, state=state, ledger=ledger)


class Checkpointer:
    """Writes and prunes the checkpoints of one run."""

    def __init__(self, run: RunDirectory, config: CheckpointConfig, trainer: TrainerGroup) -> None:
        self._run = run
        self._config = config
        self._trainer = trainer
        self._saved_step = -1

    def due(self, state: RunState) -> bool:
        """Whether the configuration asks for a checkpoint of this step: by its number, or because it is the best."""
        every = self._config.every_num_steps
        best = self._config.keep_best and state.best_step == state.step > 0
        return best or bool(every and state.step % every == 0)

    async def save(self, state: RunState, ledger: DataLedger) -> Path:
        """Write a checkpoint of this step; one that exists already is left as it is."""
        final = self._run.checkpoint_path(state.step)
        if self._saved_step == state.step or final.is_dir():
            return final
        remove_unfinished(self._run.checkpoints_dir)
        temporary = final.with_name(f"{_UNFINISHED}{final.name}")
        temporary.mkdir(parents=True)
        await self._trainer.save(temporary / "trainer")
        await self._trainer.export(temporary / "model")
        await _in_thread(lambda: self._finish(temporary, final, state, ledger))
        self._saved_step = state.step
        return final

    def _finish(self, temporary: Path, final: Path, state: RunState, ledger: DataLedger) -> None:
        atomic.write_text(temporary / "ledger.jsonl", ledger.dumps())
        atomic.write_json(temporary / "state.json", state.to_json())
        atomic.replace_directory(temporary, final)
        self._prune(state)

    def _prune(self, state: RunState) -> None:
        saved = checkpoints(self._run.checkpoints_dir)
        keep = set(list(saved)[-self._config.keep_last :])
        if self._config.keep_best and state.best_step is not None:
            keep.add(state.best_step)
        for step, path in saved.items():
            if step not in keep:
                discard = path.with_name(f"{_UNFINISHED}{path.name}")
                path.rename(discard)
                shutil.rmtree(discard)


async def _in_thread(function: Callable[[], None]) -> None:
    import asyncio

    await asyncio.to_thread(function)


def remove_unfinished(directory: Path) -> None:
    """Remove what a crash while saving or pruning left behind."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(_UNFINISHED):
                shutil.rmtree(path)
