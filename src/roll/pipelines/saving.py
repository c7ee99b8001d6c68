"""Saving a run at a step's boundary: when the configuration asks for it, and whenever it ends early.

What was begun since the last boundary (draws, rollouts) is forgotten, and made again by the resumed run. What trainers
did since then cannot be undone: while `Parts.mid_update` says so, nothing true can be saved before the next boundary.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from roll.errors import AlarmError
from roll.pipelines.parts import Parts

__all__ = ["save", "save_before_the_end", "save_boundary", "save_if_due"]

logger = logging.getLogger(__name__)

LONGEST_LAST_SAVE_S = 1800.0
"""For the save of a run that failed: a rank that hangs must not keep the error from its user for ever."""


async def save_if_due(parts: Parts, alarms: list[str]) -> None:
    """Save where the configuration or an alarm asks for it.

    Raises:
        AlarmError: an alarm stops the run; everything up to this boundary is saved.
    """
    if alarms or parts.checkpointer.due(parts.state):
        await save(parts)
    if alarms:
        raise AlarmError("; ".join(alarms))


async def save(parts: Parts) -> Path:
    """Write a checkpoint of the last boundary."""
    with parts.spans.phase("checkpoint"):
        return await parts.checkpointer.save(parts.state, parts.ledger)


def _return_to_boundary(parts: Parts) -> None:
    """Forget draws that were made since the last boundary; they will be made again."""
    parts.data.train.restore(parts.state.data)
    parts.ledger.forget_from(parts.state.num_draws)


async def save_boundary(parts: Parts) -> Path:
    """Forget what was begun since the last boundary, and save that."""
    _return_to_boundary(parts)
    return await save(parts)


async def save_before_the_end(parts: Parts, error: Exception) -> None:
    """The run is about to end because of `error`: save the last boundary, if it is still there to be saved."""
    if parts.state.step == parts.began_at or parts.mid_update:
        return
    try:
        async with asyncio.timeout(LONGEST_LAST_SAVE_S):
            await parts.controller.close()
            path = await save_boundary(parts)
    except Exception as failure:  # what broke the run may break this as well
        if str(failure) != str(error):
            logger.warning("what was learnt since the last checkpoint could not be saved: %s", failure)
    else:
        logger.warning("the run ends early (%s); up to step %d it is saved in %s", error, parts.state.step, path)
