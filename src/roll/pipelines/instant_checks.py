"""Fast checks before any role starts, for errors that would otherwise stop the run after minutes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from roll.config.data import DataConfig
from roll.config.estimate import count_trained_parameters, estimate_disk_use
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.config.training import TrainingConfig
from roll.data import PromptData
from roll.errors import RunDirectoryError
from roll.models import describe_model
from roll.pipelines.run import Session
from roll.preflight.references import check_references
from roll.preflight.rewards import check_rewards
from roll.training import TrainerSpec

__all__ = ["check_disk", "check_run_references", "check_run_rewards"]

logger = logging.getLogger(__name__)

MAX_REFERENCES = 2_000
"""Maximum number of scored references per source; scoring takes a second or two."""


def check_disk(
    config: RunConfig,
    training: TrainingConfig,
    model_path: Path,
    session: Session,
    other_trainers: Iterable[TrainerSpec] = (),
) -> None:
    """Check that the disk has space for the checkpoints that the run will certainly write.

    Args:
        config: Configuration of the run.
        training: Training configuration with the number of steps.
        model_path: Path of the policy's model.
        session: Session with the run directory, and the checkpoint from which the run resumes.
        other_trainers: Trainers of other models than the policy. Only critics are saved in checkpoints.

    Raises:
        RunDirectoryError: The checkpoints will not fit.
    """
    step = session.saved.state.step if session.saved else 0
    critics = [describe_model(spec.model_path) for spec in other_trainers if spec.role == "critic"]
    use = estimate_disk_use(
        config,
        training,
        describe_model(model_path),
        max(0, training.num_steps - step),
        num_other_parameters=sum(count_trained_parameters(config.model, sizes) for sizes in critics),
    )
    path = session.directory.path
    free = shutil.disk_usage(path).free
    if problem := use.find_problem(free):
        raise RunDirectoryError(f"run directory '{path}': {problem}")
    if use.num_checkpoints * use.checkpoint_bytes > free:
        logger.warning(
            "checkpoints may take up to %.1f GiB, but the disk of '%s' has only %.1f GiB free: free space, or save "
            "less often (section checkpoint)",
            use.num_checkpoints * use.checkpoint_bytes / 2**30,
            path,
            free / 2**30,
        )


async def check_run_rewards(entries: Sequence[DataConfig], sandbox: SandboxConfig, data: PromptData) -> None:
    """Test the rewards that may not work on this machine: score one prompt of every source.

    Raises:
        UserError: A reward does not work.
    """
    first = data.train.get_first_by_domain()
    await check_rewards(sandbox, [(entry, first[entry.domain or entry.source]) for entry in entries])


async def check_run_references(entries: Sequence[DataConfig], data: PromptData) -> None:
    """Check that reference answers score as correct, for at most `MAX_REFERENCES` prompts of every source.

    Raises:
        DataError: More than a tenth of a source's references are scored as incorrect.
    """
    await check_references(entries, data.train.sample_by_domain(MAX_REFERENCES))
