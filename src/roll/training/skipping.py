"""What a back-end says of a step that it left out."""

from __future__ import annotations

import logging

from roll.errors import TrainingDivergedError

__all__ = ["note_skipped"]

logger = logging.getLogger(__name__)


def note_skipped(loss: float, grad_norm: float, in_a_row: int, limit: int) -> None:
    """Warn of a step whose loss or gradients were not finite.

    Raises:
        TrainingDivergedError: it was the last of `limit` in a row.
    """
    logger.warning("step skipped: loss %s, gradient norm %s (%d in a row)", loss, grad_norm, in_a_row)
    if in_a_row >= limit:
        raise TrainingDivergedError(
            f"loss {loss} or gradient norm {grad_norm} was not finite, {in_a_row} steps in a row. "
            "Lower training.learning_rate, or raise training.max_nonfinite_steps."
        )
