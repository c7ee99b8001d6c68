"""Checks before any role starts: they take seconds, where the run itself would take minutes to fail."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from roll.config.data import DataConfig
from roll.config.estimate import disk_use, num_trained
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.config.training import TrainingConfig
from roll.data import Data
from roll.errors import RunDirectoryError
from roll.models import describe_model
from roll.pipelines.run import Session
from roll.preflight.references import check_references
from roll.preflight.rewards import check_rewards
from roll.training import TrainerSpec

__all__ = ["check_disk", "check_own_references", "check_own_rewards"]

logger = logging.getLogger(__name__)

MOST_REFERENCES = 2_000
"""Largest number of references of one source; scoring them takes a second or two, and no time for plain numbers."""


def check_disk(
    config: RunConfig, training: TrainingConfig, model_path: Path, session: Session, others: Iterable[TrainerSpec] = ()
) -> None:
    """Check that the checkpoints which the run is sure to write will fit on its disk.

    Args:
        config: Configuration of the run.
        training: Training configuration with the number of steps.
        model_path: Path of the policy's model.
        session: Session whose directory is written to.
        others: Other trainers, of which critics are saved.

    Raises:
        RunDirectoryError: The checkpoints will not fit.
    """
    step = session.saved.state.step if session.saved else 0
    critics = [describe_model(spec.model_path) for spec in others if spec.role == "critic"]
    use = disk_use(
        config,
        training,
        describe_model(model_path),
        max(0, training.num_steps - step),
        num_further=sum(num_trained(config.model, sizes) for sizes in critics),
    )
    path = session.directory.path
    free = shutil.disk_usage(path).free
    if problem := use.problem(free):
        raise RunDirectoryError(f"run directory '{path}': {problem}")
    if use.num_checkpoints * use.checkpoint_bytes > free:
        logger.warning(
            "checkpoints take up to %.1f GiB, and the disk of '%s' has %.1f GiB free",
            use.num_checkpoints * use.checkpoint_bytes / 2**30,
            path,
            free / 2**30,
        )


async def check_own_rewards(data: Sequence[DataConfig], sandbox: SandboxConfig, read: Data) -> None:
    """Try the rewards that may not work here, on one prompt of every source: see `check_rewards`.

    Raises:
        UserError: A reward does not work.
    """
    first = read.train.first_of_each()
    await check_rewards(sandbox, [(entry, first[entry.domain or entry.source]) for entry in data])


async def check_own_references(data: Sequence[DataConfig], read: Data) -> None:
    """Score references against themselves, of at most `MOST_REFERENCES` prompts of every source.

    Raises:
        DataError: More than a tenth of a source's references are scored as wrong.
    """
    await check_references(data, read.train.some_of_each(MOST_REFERENCES))
