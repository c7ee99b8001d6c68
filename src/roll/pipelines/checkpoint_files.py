"""Checkpoints as they lie on the disk: named, found, read, and cleared of what was never finished."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from roll.errors import CheckpointError, CheckpointVersionError
from roll.models import find_model_directory
from roll.pipelines.state import RunState
from roll.rollout.ledger import DataLedger

__all__ = [
    "SavedRun",
    "checkpoints",
    "critic_directory",
    "find_checkpoint",
    "find_model_directory",
    "read_checkpoint",
    "remove_unfinished",
]

S = TypeVar("S", bound=RunState)

UNFINISHED = ".saving-"
"""Begins the name of a directory that is being written, or removed."""

_STEP = re.compile(r"^step-(\d{6,})$")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun(Generic[S]):
    """A checkpoint's controller part, and where the trainers' lie."""

    path: Path
    state: S
    ledger: DataLedger

    @property
    def trainer_path(self) -> Path:
        """What `TrainerGroup.load` reads."""
        return self.path / "trainer"

    def critic_path(self, index: int) -> Path:
        """What a critic's `TrainerGroup.load` reads.

        Raises:
            CheckpointError: the run that wrote it had no such critic.
        """
        path = self.path / critic_directory(index)
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint '{self.path}' holds no '{path.name}': the run that wrote it had fewer critics. Resume it "
                "with the algorithm that it began with."
            )
        return path


def critic_directory(index: int) -> str:
    """Below a checkpoint, where a critic's state lies."""
    return f"critic-{index}"


def checkpoints(directory: Path) -> dict[int, Path]:
    """Complete checkpoints by step, ascending."""
    if not directory.is_dir():
        return {}
    found = {int(m.group(1)): p for p in directory.iterdir() if (m := _STEP.match(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


def find_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, or `None` where there is none."""
    return next(reversed(checkpoints(directory).values()), None)


def read_checkpoint(path: Path, kind: type[S]) -> SavedRun[S]:
    """Read a checkpoint's controller part.

    Args:
        path: its directory.
        kind: what is read of its state.

    Raises:
        CheckpointVersionError: another version of ROLL wrote it, and this one cannot read it.
        CheckpointError: a file is missing or malformed.
    """
    try:
        state = kind.from_json(json.loads((path / "state.json").read_text(encoding="utf-8")))
        ledger = DataLedger.loads((path / "ledger.jsonl").read_text(encoding="utf-8"))
    except CheckpointVersionError as error:
        raise CheckpointVersionError(f"checkpoint '{path}' cannot be read: {error}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
    return SavedRun(path=path, state=state, ledger=ledger)


def remove_unfinished(directory: Path) -> None:
    """Remove what a crash while saving or pruning left behind."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(UNFINISHED):
                shutil.rmtree(path)
