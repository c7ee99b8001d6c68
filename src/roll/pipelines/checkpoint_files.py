"""Checkpoints on disk: naming, searching, reading, and removal of unfinished ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from roll.errors import CheckpointError, CheckpointVersionError
from roll.models import find_model_directory
from roll.pipelines.state import RunState
from roll.protocols import TrainerGroup
from roll.rollout.ledger import DataLedger

__all__ = [
    "SavedRun",
    "find_checkpoint",
    "find_model_directory",
    "get_critic_directory",
    "list_checkpoints",
    "read_checkpoint",
    "remove_unfinished",
]

S = TypeVar("S", bound=RunState)

UNFINISHED_PREFIX = ".saving-"
"""Prefix of the name of a directory that is being written or removed."""

_STEP_PATTERN = re.compile(r"^step-(\d{6,})$")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun(Generic[S]):
    """The controller's part of a checkpoint, and the paths of the trainers' parts."""

    path: Path
    state: S
    ledger: DataLedger

    @property
    def trainer_path(self) -> Path:
        """Directory of the policy's trainer state, which `TrainerGroup.load` reads."""
        return self.path / "trainer"

    def get_critic_path(self, index: int) -> Path:
        """Return the directory of a critic's trainer state, which `TrainerGroup.load` reads.

        Raises:
            CheckpointError: The checkpoint has no such critic.
        """
        path = self.path / get_critic_directory(index)
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint '{self.path}' has no '{path.name}': the run that wrote it had fewer critics. Resume the "
                "run with its original algorithm."
            )
        return path

    async def restore(self, policy: TrainerGroup, critics: Sequence[TrainerGroup] = ()) -> None:
        """Load the checkpoint into the trainers.

        Raises:
            CheckpointError: The files of a trainer are missing, or cannot be read.
        """
        paths = [self.trainer_path, *map(self.get_critic_path, range(len(critics)))]
        with _add_advice_on_error(self.path):
            for trainer, path in zip((policy, *critics), paths, strict=True):
                await trainer.load(path)


@contextmanager
def _add_advice_on_error(path: Path) -> Iterator[None]:
    """Append advice on continuing without the checkpoint `path` to a `CheckpointError` raised in this context."""
    try:
        yield
    except CheckpointError as error:
        names = [other.name for other in list_checkpoints(path.parent).values()]
        before = names[: names.index(path.name)] if path.name in names else []
        if before:
            advice = f"If files are corrupted, move '{path}' away: `roll resume` then continues from '{before[-1]}'."
        else:
            advice = "There is no older checkpoint: if files are corrupted, begin a new run."
        raise CheckpointError(f"{str(error).rstrip('.')}. {advice}") from error


def get_critic_directory(index: int) -> str:
    """Return the name of a critic's directory inside a checkpoint."""
    return f"critic-{index}"


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, ascending."""
    if not directory.is_dir():
        return {}
    found = {int(m.group(1)): p for p in directory.iterdir() if (m := _STEP_PATTERN.match(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


def find_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, or `None` if there is no checkpoint."""
    return next(reversed(list_checkpoints(directory).values()), None)


def read_checkpoint(path: Path, state_class: type[S]) -> SavedRun[S]:
    """Read a checkpoint's controller part.

    Args:
        path: Directory of the checkpoint.
        state_class: Class of the run's state in the checkpoint.

    Raises:
        CheckpointVersionError: Another version of ROLL wrote the checkpoint, and this version cannot read it.
        CheckpointError: A file is missing or malformed.
    """
    try:
        state = state_class.from_json(json.loads((path / "state.json").read_text(encoding="utf-8")))
        ledger = DataLedger.loads((path / "ledger.jsonl").read_text(encoding="utf-8"))
    except CheckpointVersionError as error:
        raise CheckpointVersionError(f"checkpoint '{path}' cannot be read: {error}") from None
    except (OSError, ValueError) as error:
        with _add_advice_on_error(path):
            raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
    return SavedRun(path=path, state=state, ledger=ledger)


def remove_unfinished(directory: Path) -> None:
    """Remove the unfinished checkpoints that a crash during saving or pruning left in `directory`."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(UNFINISHED_PREFIX):
                shutil.rmtree(path)
